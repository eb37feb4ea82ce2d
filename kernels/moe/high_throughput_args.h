// SPDX-License-Identifier: Apache-2.0
//
// What host and device share for high-throughput dispatch and combine on one node. Offsets are positions in a
// window; plain pointers are memory of this rank. R ranks, T tokens here, K slots per token, N rows received
// here.
#pragma once

#include "kernels/core/fault.h"
#include "kernels/core/grid.cuh"
#include "kernels/core/roles.cuh"
#include "kernels/core/wait.cuh"
#include "kernels/moe/row_element.h"

namespace weft {

// Where each exchange stands in every rank's window. Records have two parities: a peer that is one call ahead
// does not overwrite what this rank still reads, and none can be two ahead, since each call waits for all
// records.
struct HighThroughputOffsets {
  uint64_t count_signal;       // u64[R]            by source: epoch of its counts
  uint64_t count_record;       // u32[2][R][words]  by parity, source
  uint64_t rendezvous_signal;  // u64[R]
  uint64_t rendezvous_record;  // RendezvousRecord[2][R]
  uint64_t arrived_signal;     // u64[R]
  uint64_t combine_signal;     // u64[R]
  uint64_t combine_record;     // RendezvousRecord[2][R]
  uint64_t burst_signal;       // u64[R][kMaxBursts] by source, burst of its rows: epoch of the combine
  uint64_t record_words;
};

// Counts that a rank tells every peer, before its rows for each rank and the tokens for each of the peer's
// experts.
struct CountHeader {
  uint32_t row_bytes;  // these five must agree on all ranks
  uint32_t scale_words;
  uint32_t top_k;
  uint32_t experts;
  uint32_t element;
  uint32_t tokens;
  uint32_t reserved[2];
  uint64_t free_bytes;     // largest free piece of the sender's heap
  uint64_t staging_bytes;  // of its combine staging
};
static_assert(sizeof(CountHeader) == 48);
inline constexpr uint32_t kAgreedWords = 5;

// The record that a rank gives each peer right before rows move: where rows go, and which dispatch they belong to.
struct RendezvousRecord {
  uint64_t rows_at;
  uint64_t meta_at;
  uint64_t capacity_rows;
  uint64_t handle;  // these three must agree on all ranks
  uint64_t row_bytes;
  uint64_t extras;  // what else travels with a row: see row_extras()
  // Of a rank that found no room: its peers send it no rows.
  uint64_t lacking_bytes;  // what it needs in one piece; 0: it has room
  uint64_t free_bytes;     // its largest free piece
};
static_assert(sizeof(RendezvousRecord) == 64);
WEFT_DEVICE constexpr uint64_t row_extras(uint64_t scale_words, uint64_t top_k, uint64_t id_bytes) {
  return scale_words | top_k << 32 | id_bytes << 56;
}

// Why a rank refuses a peer's RendezvousRecord: the last number of the fault that it raises.
inline constexpr uint64_t kOtherHandle = 0;
inline constexpr uint64_t kOtherRowBytes = 1;
inline constexpr uint64_t kOtherExtras = 2;
inline constexpr uint64_t kLacksRoom = 3;

// Per rank, what the host learns from the counts.
struct RankCounts {
  uint64_t received_rows;
  uint64_t sent_rows;
  uint64_t free_bytes;
  uint64_t staging_bytes;
};

// Written by the notify kernel, then, where the host waits for it, `epoch`; in memory that it can read then.
// RankCounts[R] and the tokens of each local expert, i32[local experts], follow it.
struct CountReport {
  uint64_t epoch;
  uint32_t disagreeing_word;  // index into CountHeader of the first value that differs, or kAgreedWords
  uint32_t disagreeing_rank;
  uint32_t theirs;
  uint32_t mine;
};
static_assert(sizeof(CountReport) == 24);

// A receiver's memory for C rows: rows and scales in one piece, the rest in another that the handle keeps.
struct ReceiveLayout {
  uint64_t scales;   // after the rows:      4-byte words [C][scale_words]
  uint64_t weights;  // in the second piece: f32[C][K]; top-k ids [C][K] stand at its start
  uint64_t token;    // i32[C], the row's token at its source
  uint64_t slot;     // i32[C], the row's place in its source's combine staging
  uint64_t rows_bytes;
  uint64_t meta_bytes;
};
WEFT_DEVICE constexpr uint64_t round_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}
WEFT_DEVICE constexpr ReceiveLayout receive_layout(uint64_t rows, uint64_t row_bytes, uint64_t scale_words,
                                                   uint64_t top_k, uint64_t id_bytes) {
  ReceiveLayout layout{};
  layout.scales = round_up(rows * row_bytes, 16);
  layout.rows_bytes = layout.scales + round_up(rows * scale_words * 4, 16);
  layout.weights = round_up(rows * top_k * id_bytes, 16);
  layout.token = layout.weights + round_up(rows * top_k * 4, 16);
  layout.slot = layout.token + round_up(rows * 4, 16);
  layout.meta_bytes = layout.slot + round_up(rows * 4, 16);
  return layout;
}

// Combine is pipelined in bursts of rows of one (source, owner) pair, each with its own signal. A burst has
// enough rows that a warp still has some to send while its release of the previous burst waits for the
// link.
inline constexpr uint32_t kMaxBursts = 1024;
inline constexpr uint32_t kMinBurstRows = 8;
WEFT_DEVICE constexpr uint32_t burst_rows(uint32_t pair_rows) {
  const uint32_t even = (pair_rows + kMaxBursts - 1) / kMaxBursts;
  return even > kMinBurstRows ? even : kMinBurstRows;
}

struct LayoutArgs {
  const void* topk_idx;  // [T][K] of id_bytes
  uint64_t tokens;
  uint32_t top_k;
  uint32_t id_bytes;
  uint32_t ranks;
  uint32_t experts;
  uint32_t experts_per_rank;
  uint32_t reserved;
  int32_t* counts;         // [R + experts]: tokens per rank, then per expert; zeroed before several blocks
  uint8_t* token_in_rank;  // [T][R]
  int32_t* sum_place;      // [T][R], or null: when combine adds a rank's row, by its right-most slot
};

// The arguments of a call have three parts besides its own numbers: what all calls of a buffer share, what a dispatch's
// handle keeps, and the caller's tensors. The binding fills in the tensors, once.
struct CallControl {
  HighThroughputOffsets at;
  WaitRule wait;
  GridState* state;
};

// Written by a notify, read by its dispatches and combines.
struct RoutePlaces {
  int32_t* send_row;   // [T][R] the token's place among this rank's rows for a peer, or -1
  int32_t* slot_base;  // [T] the token's first place in this rank's combine staging
  int32_t* prefix;     // [R][R] rows that rank j gets from ranks 0..i
  // [T][R] of ranks that get the token, by a layout; null: combine adds ranks ascending.
  const int32_t* sum_place;
};

struct NotifyTensors {
  const uint8_t* token_in_rank;      // [T][R]
  const int32_t* tokens_per_expert;  // [experts]
};

struct NotifyArgs : CallControl, RoutePlaces, NotifyTensors {
  CountHeader mine;
  uint32_t experts_per_rank;
  uint32_t host_waits;  // for the report: 0, or 1
  CountReport* report;
};

struct DispatchTensors {
  const std::byte* x;      // [T] rows
  const uint32_t* scales;  // element (t, i) at t * scale_token_stride + i * scale_word_stride
  int64_t scale_token_stride;
  int64_t scale_word_stride;
  const void* topk_idx;       // [T][K], or null: no ids travel
  const float* topk_weights;  // [T][K], or null
};

struct DispatchArgs : CallControl, RoutePlaces, DispatchTensors {
  uint64_t tokens;
  const CountReport* report;  // a disagreement stops the dispatch
  RendezvousRecord mine;
  uint32_t experts;
  uint32_t experts_per_rank;
  uint32_t id_bytes;
  uint32_t fill_tail;     // 1: set the ids of rows that no rank fills to -1
  uint32_t keep_weights;  // 1: a slot whose expert is elsewhere keeps its weight, else 0 arrives
  uint32_t reserved;
  WarpRange row_warps;
  WarpRange meta_warps;
};

struct CombineTensors {
  const std::byte* x;         // [N] rows
  const float* topk_weights;  // [N][K], or null
  const int32_t* slot;        // [N] place in the owner's staging, from the dispatch
  const std::byte* bias[2];   // [T] rows each, or null
  std::byte* combined;        // [T] rows
  float* combined_weights;    // [T][K], or null
};

struct CombineArgs : CallControl, RoutePlaces, CombineTensors {
  uint64_t tokens;
  RendezvousRecord mine;  // rows_at: staging rows; meta_at: staging weights, f32[capacity][K]
  WarpRange push_warps;
  WarpRange sum_warps;
  WarpRange watch_warps;  // one warp that waits for the whole block, or none: sum warps wait themselves
  uint32_t sum_slots;     // of each sum warp's RowQueue; 0: rows are loaded into registers
  uint32_t reserved;
};

// Sizes that matter for speed: constants on GPUs, fields on the host.
struct HighThroughputShape {
  int64_t row_bytes;
  int64_t piece_bytes;  // a row moves in pieces of at most this
  int64_t scale_words;
  int64_t top_k;
  int64_t element;  // kElementBf16 or kElementFp32: what combine sums
};

// Shared memory of dispatch_rows and combine_rows: four words, a PeerPlace for each rank, a RowPipe for each
// row warp; for combine a RowQueue for each sum warp.
struct PeerPlace {
  std::byte* rows;
  std::byte* scales;
  std::byte* ids;
  std::byte* weights;
  std::byte* token;
  std::byte* slot;
  uint64_t first_row;
  uint64_t capacity_rows;
};
static_assert(sizeof(PeerPlace) == 64);
WEFT_DEVICE constexpr uint32_t pipes_at(uint32_t ranks) {
  return static_cast<uint32_t>(round_up(128 + ranks * sizeof(PeerPlace), 128));
}
WEFT_DEVICE constexpr uint32_t rows_shared_bytes(uint32_t ranks, uint32_t row_warps, uint32_t piece_bytes) {
  return pipes_at(ranks) + row_warps * pipe_bytes(piece_bytes);
}

}  // namespace weft
