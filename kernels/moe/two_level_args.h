// SPDX-License-Identifier: Apache-2.0
//
// What host and device share for high-throughput dispatch and combine among ranks that do not all map each other.
//
// Domain: ranks that all map each other.
// Rail peer of a rank: the rank of another domain with the same place there, modulo that domain's size.
// Out: a token crosses the network once for each domain that needs it, to the rail peer. The rail peer forwards it to
// the ranks of its domain by stores.
// Back: the rail peer adds the results of its domain and sends one sum.
// Source of a rank: a rank of another domain whose rail peer it is. Where domains differ in size, a rank of the smaller
// one has several sources.
//
// A rank and its rail peer have rings between them, one for each batch of tokens. A ring is slots in the receiver's
// window. The sender fills them from an outbox of the same shape. The receiver says how many it has read.
//
// R ranks, D domains, L batches, T tokens here, K slots per token, W ranks in the widest domain, V sources of a rank at
// most.
#pragma once

#include "kernels/moe/high_throughput_args.h"

namespace weft {

// Where all ranks are. The same on every rank, but for `sources` and `number`. The arrays lie in this rank's window.
struct Domains {
  const uint32_t* domain;   // [R] each rank's domain
  const uint32_t* place;    // [R] each rank's place in its domain
  const uint32_t* members;  // [R] ranks by domain, then place
  const uint32_t* first;    // [D + 1] where a domain's members begin
  const uint32_t* sources;  // [source_count] ranks of other domains whose rail peer this rank is
  const uint32_t* number;   // [D] this rank's place among the sources of its rail peer there
  uint32_t count;
  uint32_t widest;
  uint32_t source_count;
  uint32_t batches;

  WEFT_DEVICE uint32_t size(uint32_t which) const { return first[which + 1] - first[which]; }
  WEFT_DEVICE uint32_t member(uint32_t which, uint32_t at) const { return members[first[which] + at]; }
  // The rail peer of a rank in a domain. In its own domain a rank is its own rail peer.
  WEFT_DEVICE uint32_t rail_peer(uint32_t rank, uint32_t which) const {
    return member(which, place[rank] % size(which));
  }
};

inline constexpr uint32_t kRailPeerSlots = 4;
inline constexpr uint32_t kPushBursts = 32;  // signals of a (source, member) pair

// A word of a ring: epoch << 32 | how many. A sender's last word has kRingDone, too.
inline constexpr uint64_t kRingDone = uint64_t{1} << 31;
inline constexpr uint64_t kRingCount = kRingDone - 1;

// Places in every rank's window.
struct TwoLevelOffsets {
  uint64_t counts_out;    // u32[2][R][record_words]: count records for port peers
  uint64_t rows_sent;     // u64[V][L] at a rail peer: messages that have come
  uint64_t rows_taken;    // u64[D][L] at a source: slots that the rail peer has read
  uint64_t sums_sent;     // u64[D][L] at a source
  uint64_t sums_taken;    // u64[V][L] at a rail peer
  uint64_t domain_rings;  // [D][L][slots]: to rail peers, and from them in a combine
  uint64_t source_rings;  // [V][L][slots]: from sources, and to them in a combine
  uint64_t pushed;        // u64[R][W][kPushBursts] at a rail peer: epoch of the combine, by source and member
  uint64_t slot_bytes;
};

// A dispatch's record for its combine, besides the arrays that DispatchArgs names. It lies in two pieces of memory that
// belong to the handle: `records`, and all others. Python's handle shows the first arrays as entries.
struct TwoLevelRoutes {
  // [T][D] a token's number among this rank's messages to a domain, or -1
  int32_t* send_pair;
  int32_t* pairs;      // [R][D] messages from each rank to each domain
  int32_t* forwarded;  // [D] messages from this and lower domains that this rank forwards
  // [R][W] first row, in the staging of a source's rail peer here, of the rows that a member of this domain returns to
  // that source
  int32_t* back_first;
  int32_t* source_first;  // [R] first record of a source of this rank
  int32_t* batch_first;   // [R][L] first message of a batch
  int32_t* batch_count;   // [R][L] its messages
  // Where sums have an order of their own, else null: the domains of a token, and the places of the members of this
  // rank's domain that have rows of it, as they are added; then -1.
  int32_t* domain_order;  // [T][D]
  int32_t* own_order;     // [T][W]
  // [messages][W] a message's number among the rows that a member got from its source, or -1. Where sums have an order,
  // behind it [W]: the places of members as their rows are added; then -1.
  int32_t* records;
  uint64_t most_messages;  // room of `records`
};
// Words of all arrays but `records`.
WEFT_DEVICE constexpr uint64_t route_words(uint64_t tokens, uint64_t ranks, uint64_t domains, uint64_t widest,
                                           uint64_t batches, bool is_ordered) {
  return (tokens + 1) * domains + ranks * (domains + widest + 1 + 2 * batches) +
         (is_ordered ? tokens * (domains + widest) : 0);
}
WEFT_DEVICE constexpr uint64_t record_words(uint64_t widest, bool is_ordered) {
  return is_ordered ? 2 * widest : widest;
}
WEFT_DEVICE constexpr TwoLevelRoutes routes_in(int32_t* at, int32_t* records, uint64_t tokens, uint64_t ranks,
                                               uint64_t domains, uint64_t widest, uint64_t batches,
                                               bool is_ordered) {
  TwoLevelRoutes routes{};
  routes.send_pair = at;
  routes.pairs = routes.send_pair + tokens * domains;
  routes.forwarded = routes.pairs + ranks * domains;
  routes.back_first = routes.forwarded + domains;
  routes.source_first = routes.back_first + ranks * widest;
  routes.batch_first = routes.source_first + ranks;
  routes.batch_count = routes.batch_first + ranks * batches;
  routes.domain_order = is_ordered ? routes.batch_count + ranks * batches : nullptr;
  routes.own_order = is_ordered ? routes.domain_order + tokens * domains : nullptr;
  routes.records = records;
  return routes;
}

// A token on its way to a domain: its row, and behind it 4-byte words.
struct ForwardLayout {
  uint64_t scales;
  uint64_t ids;      // i32[K], of all experts
  uint64_t weights;  // f32[K]
  uint64_t token;    // u32: at its source
  uint64_t number;   // u32: among the source's messages to this domain
  uint64_t rows;     // i32[W]: its row at each member of the domain, or -1
  uint64_t stride;
};
WEFT_DEVICE constexpr ForwardLayout forward_layout(uint64_t row_bytes, uint64_t scale_words, uint64_t top_k,
                                                   uint64_t widest) {
  ForwardLayout layout{};
  layout.scales = row_bytes;
  layout.ids = layout.scales + scale_words * 4;
  layout.weights = layout.ids + top_k * 4;
  layout.token = layout.weights + top_k * 4;
  layout.number = layout.token + 4;
  layout.rows = layout.number + 4;
  layout.stride = round_up(layout.rows + widest * 4, 16);
  return layout;
}
// A sum on its way back: its row, and its weights f32[K].
WEFT_DEVICE constexpr uint64_t sum_stride(uint64_t row_bytes, uint64_t top_k) {
  return round_up(row_bytes + top_k * 4, 16);
}

struct TwoLevelNotifyArgs {
  NotifyArgs base;
  Domains domains;
  TwoLevelOffsets at;
  TwoLevelRoutes routes;
};

struct TwoLevelDispatchArgs {
  DispatchArgs base;
  Domains domains;
  TwoLevelOffsets at;
  TwoLevelRoutes routes;
  WarpRange batch_warps;
  uint64_t states_at;  // of RingStates in shared memory
};

struct TwoLevelCombineArgs {
  CombineArgs base;
  Domains domains;
  TwoLevelOffsets at;
  TwoLevelRoutes routes;
  WarpRange batch_warps;
  uint64_t states_at;  // of RingStates in shared memory
};

// Rows of a (source, member) pair that share a signal.
WEFT_DEVICE constexpr uint32_t push_rows_of(uint32_t pair_rows) {
  const uint32_t even = (pair_rows + kPushBursts - 1) / kPushBursts;
  return even > kMinBurstRows ? even : kMinBurstRows;
}

// How far one end of a ring is, in shared memory.
struct RingState {
  uint32_t at;       // tokens looked at, or messages
  uint32_t moved;    // messages put or taken
  uint32_t slots;    // slots put or taken
  uint32_t is_done;  // 1: nothing more will come
};
WEFT_DEVICE constexpr uint32_t batches_per_warp(uint32_t batches, uint64_t warps) {
  return static_cast<uint32_t>((batches + warps - 1) / warps);
}
// The shared memory of a launch's batches, behind that of the other roles.
WEFT_DEVICE constexpr uint64_t ring_states_bytes(uint32_t domains, uint32_t sources, uint32_t batches,
                                                 uint32_t blocks, uint32_t warps) {
  return uint64_t{warps} * batches_per_warp(batches, uint64_t{blocks} * warps) * (domains + sources) *
         sizeof(RingState);
}

}  // namespace weft
