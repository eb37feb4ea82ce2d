// SPDX-License-Identifier: Apache-2.0
//
// exchange_args.h: what the exchange kernel is given. Host and device share it.
//
// Rounds. Each block of a launch owns a region of every rank's inbox, twice: rounds alternate. Rounds of one
// block are numbered for ever, alike on all ranks, since all make the same calls with the same grids. In a
// round a block sends to every peer's block of the same number and receives from every one. So a block that
// starts round n knows that all peers have read round n - 2, and no slot needs to be freed.
// Slices. The same for staging areas, of which there are four by turns, since one is filled while the one
// before is emptied (run_stages).
// Calls with a root move data from it or to it alone. In their rounds all other pairs of ranks send a line without
// data, and their slices are signalled to everybody, so that the two rules above hold for every call.
// Rendezvous. Before ranks touch each other's buffers, every block tells every peer's where they are, in
// descriptors: one word for each buffer. After it, every block tells that it is done.
// Shares. Where all bytes of a buffer come from one rank, or end at one, other ranks carry a share of them each:
// all_reduce, broadcast and reduce are cut into shares with an owner (exchange_owners).
// Calls. Lines, signals of slices and descriptors carry a digest of the call (what, element type, operation,
// count, way) beside their number, so ranks whose calls differ wait for each other in vain and touch nothing.
#pragma once

#include "kernels/collective/program_args.h"

namespace weft {

enum class Exchange : uint32_t {
  kAllReduce = 0,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,  // these and the following have a root
  kReduce,
  kGather,
  kScatter,
};
inline constexpr uint32_t kExchanges = 8;
enum class ExchangeWay : uint32_t { kLines = 0, kPlaces, kStages };
inline constexpr uint32_t kStageAreas = 4;

WEFT_DEVICE constexpr bool has_root(Exchange kind) {
  return kind >= Exchange::kBroadcast;
}
// Kinds whose buffer is cut into shares.
WEFT_DEVICE constexpr bool has_shares(Exchange kind) {
  return kind == Exchange::kAllReduce || kind == Exchange::kBroadcast || kind == Exchange::kReduce;
}
// How many ranks own a share, where the buffer has shares: all ranks; in a broadcast or reduce all but the
// root, so that a byte crosses the root's link once. With two ranks the receiver owns everything.
WEFT_DEVICE constexpr uint32_t exchange_owners(Exchange kind, uint32_t ranks) {
  if (kind == Exchange::kAllReduce) return ranks;
  return ranks > 2 ? ranks - 1 : 1;
}

// Offsets in every rank's window.
struct ExchangeLayout {
  uint64_t inbox_at;        // LL lines, 2 per unit: [2][ranks][blocks][region_units]
  uint64_t descriptors_at;  // u64[2][blocks][ranks][2]: input and output
  uint64_t done_at;         // u64[blocks][ranks]: the rendezvous that is over
  uint64_t stages_at;       // units: [kStageAreas][ranks][blocks][stage_units]
  uint64_t staged_at;       // u64[blocks][ranks]: the last slice that a sender has filled
  uint32_t blocks;          // the most of a launch
  uint32_t region_units;
  uint32_t stage_units;  // even
  uint32_t reserved;
};

// Of one block, in local memory; zero at first.
struct ExchangeState {
  uint64_t rounds;
  uint64_t rendezvous_done;
  uint64_t stages;  // slices that were published
};

// A buffer's place for peers: its window's number plus one in bits 35 to 44, its offset in 16-byte units
// below; 0: in no window, or not aligned. A descriptor has above it the rendezvous's number (a place is used at
// every second rendezvous) and, in bits 48 to 63, half of the call's digest: of the input the low one.
inline constexpr uint32_t kDescriptorOffsetBits = 35, kDescriptorWindowBits = 10,
                          kDescriptorRendezvousBits = 3;
inline constexpr uint32_t kDescriptorMarkAt = kDescriptorOffsetBits + kDescriptorWindowBits;
static_assert(kDescriptorMarkAt + kDescriptorRendezvousBits == 48);

// The signal of a slice: its number in the high half; below it 30 bits of the call's digest, and how many
// slices of the call came before it, 3 for more.
inline constexpr uint32_t kSlicesShown = 3;

struct ExchangeArgs {
  std::byte* input;
  std::byte* output;
  uint64_t bytes;  // of one part: what goes from one rank to another; kinds with shares: the whole buffer
  uint32_t slice_units;  // 16-byte units of a part that a block sends in one round, at most region_units
  uint32_t stage_slice_units;  // the same by stages: at most stage_units, where sums follow half of them
  uint32_t piece_bytes;        // of a bulk copy
  uint32_t pipe_warps;         // of a block, that make bulk copies
  uint32_t is_one_shot;        // all_reduce by lines: everyone sends everything to everyone
  ExchangeWay way;             // kPlaces where not all ranks' buffers lie in windows: kStages
  uint32_t digest;             // of the call
  uint32_t root;               // of kinds that have one
  uint64_t places[2];          // of input and output, as in a descriptor
  std::byte* const* own_windows[2];  // the tables of the windows that hold them; null: in none
  std::byte* const* const* windows;  // [window]: base addresses by rank; null: this rank destroyed it
  ExchangeState* states;             // [layout.blocks]
  ExchangeLayout layout;
  WaitRule wait;
};

// Constants on GPUs, fields on the host.
struct ExchangeShape {
  int64_t exchange;
  int64_t element;
  int64_t reduction;
  int64_t ranks;
};

}  // namespace weft
