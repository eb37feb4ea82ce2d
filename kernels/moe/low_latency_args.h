// SPDX-License-Identifier: Apache-2.0
//
// What host and device share for low-latency dispatch and combine. R ranks, T tokens here, M tokens per rank
// at most, K slots per token, H channels, Le experts per rank. Plain pointers are memory of this rank.
#pragma once

#include "kernels/core/wait.cuh"
#include "kernels/moe/low_latency_layout.h"
#include "kernels/moe/payload.h"
#include "kernels/moe/row_element.h"

namespace weft {

inline constexpr uint32_t kPhaseSend = 1;
inline constexpr uint32_t kPhaseReceive = 2;

// How a reply travels. The rows of a dispatch: payload.h.
inline constexpr int64_t kReplyReduced =
    0;  // combine: as it is, one reply per (token, rank): weighted sum of its rows
inline constexpr int64_t kReplyExact =
    1;  // combine: as it is, one reply per (token, expert), weighted by the owner
inline constexpr int64_t kReplyReducedLog = 2;  // the same two, as LogFMT where a block of channels allows
inline constexpr int64_t kReplyExactLog = 3;

// Where windows lie in memory of the host that a GPU reads over PCIe, kernels keep in the GPU's memory what they can: see
// low_latency_watch.cuh.
struct LowLatencyPage {
  // This rank's copy of LowLatencyControl; null: there is none, and kernels look at the window.
  std::byte* control;
  std::byte* own;  // with a control page: [2] of own_bytes, by half: see low_latency_ports.h
  uint64_t own_bytes;
};

// The part of a call's arguments that both kernels have.
struct LowLatencyCall {
  WaitRule wait;
  uint64_t region;  // window offset
  uint64_t half_bytes;
  // In a half: lines_begin(); where ranks have port peers, the outbox (low_latency_ports.h).
  uint64_t lines_at;
  uint32_t* masked;    // u32[R]: peers to leave out; null where there is no shrinking
  uint32_t* silent;    // u32[R], also the host's: 1 for peers that kernels have masked; null as above
  uint32_t phases;     // kPhaseSend, kPhaseReceive, or both
  uint32_t call_slot;  // ties the two launches of a call: < kCallSlots, another for each outstanding call
  uint32_t may_mask;   // 1: a silent peer is masked; 0: it is a fault
  uint32_t max_tokens;
  uint32_t tokens;
  uint32_t experts;
  uint32_t id_bytes;
  uint32_t lines;        // 1: there may be lines: all links keep them whole (core/line.cuh), and they fit
  Batches batches;       // of any source
  Divisor batch_tokens;  // of this rank's tokens, in each batch but the last
  uint32_t reserved;
  LowLatencyHandshake handshake;  // dispatch_epoch is filled in by the kernel
  LowLatencyPage page;
};
static_assert(sizeof(LowLatencyCall) == 192);

// A dispatch's tensors, which change from call to call: the binding fills them in, the rest of the arguments is planned.
struct LowLatencyDispatchMemory {
  const std::byte* x;  // [T] rows of x_row_bytes
  // [T] rows of scale bytes, of rows that travel as they are; f32, the global scale, with NVFP4.
  const std::byte* x_scales;
  const void* topk_idx;       // [T][K] of id_bytes, -1 = none
  const float* topk_weights;  // [T][K], with weights = 1 in the shape; null: none travel
  int32_t* expert_stats;      // [Le] added to, or null
  uint64_t* wait_cycles;      // [R] or null: cycles spent waiting for each source are added
  std::byte* out;             // rows
  uint32_t* out_scales;       // 4-byte words, with the strides of the arguments
  int32_t* src_info;          // [Le][R * M]  the row's token at its source
  int64_t* layout_range;      // [Le][R]      begin << 32 | count
  int32_t* counts;            // [Le]
  int32_t* routes;            // RoutesLayout, for the combine; 16-byte aligned
  float* out_weights;         // [Le][R * M], or null
  int32_t* out_source;        // [Le][R * M], or null
};

// Outputs are [Le][expert_rows] rows; only the first counts[e] rows of each expert are written. With padding in the
// shape they are packed instead: [max_rows], each expert's behind those of the one before it, beginning at a multiple
// of the padding.
struct LowLatencyDispatchArgs : LowLatencyDispatchMemory {
  LowLatencyCall call;
  uint64_t x_row_bytes;
  // Of out_scales: word w of row i of expert e at e * expert_stride + i * row_stride + w * word_stride.
  uint64_t scale_expert_stride;
  uint64_t scale_row_stride;
  uint64_t scale_word_stride;
  Divisor receive_splits;       // warps that share one message
  Divisor source_jobs;          // batches times receive_splits
  uint32_t tiled_scales;        // 1: rows of scales stand in tiles: see tiled_row()
  uint32_t line_tokens;         // so many tokens, or fewer, leave as lines: at most one a batch
  uint32_t expert_rows;         // of each expert in the outputs, where these are not packed: R * M, or fewer
  uint32_t max_rows;            // of all experts in packed outputs
  const uint32_t* rail_tables;  // RailTables; null where each rank gets its own messages
};
static_assert(sizeof(LowLatencyDispatchArgs) == 384);

// Where matrix units of Blackwell want the first word of row `row` of an expert's scales, `words` to a row,
// the others kTiledWordStride apart: tiles [row / 128][word] of 128 words, in which rows 32 apart are
// neighbours.
inline constexpr uint32_t kTiledWordStride = 128;
WEFT_DEVICE constexpr uint64_t tiled_row(uint64_t row, uint64_t words) {
  return row / 128 * words * kTiledWordStride + row % 32 * 4 + row % 128 / 32;
}

// A combine's tensors.
struct LowLatencyCombineMemory {
  const std::byte* x;  // [Le][R * M] rows of x_row_bytes
  // [T][K] of id_bytes: those of the dispatch, some of them masked by -1 or in other slots of their token
  const void* topk_idx;
  // [T][K], of the slots of topk_idx, or of sent_idx; null: those of the dispatch, with kReplyReduced and weights = 1 in
  // the shape, and then topk_idx is sent_idx
  const float* topk_weights;
  const int32_t* routes;  // of the dispatch
  std::byte* combined;    // [T][H]
  uint64_t* wait_cycles;  // [R] or null: cycles spent waiting for each rank are added
  // u32[Le][signals_per_expert], written by this rank's other kernels: the rows behind one are there once it has reached
  // signal_value. Null: all rows are there.
  const uint32_t* signals;
  const void* sent_idx;  // [T][K] of sent_id_bytes: what the dispatch was given
};

struct LowLatencyCombineArgs : LowLatencyCombineMemory {
  LowLatencyCall call;
  uint64_t x_row_bytes;
  Divisor pieces;          // warps that share one reply: the same on all ranks
  Divisor owner_jobs;      // batches times pieces
  Divisor receive_splits;  // warps that share one token's sum: a multiple of pieces
  Divisor piece_splits;    // receive_splits in each piece
  uint32_t signal_value;
  uint32_t signals_per_expert;
  uint32_t signal_rows;  // of an expert, that one signal stands for
  // Where ranks have port peers:
  uint32_t answer_room;     // answer_room() of the outbox
  Divisor answer_parts;     // of each reply, which the warps of a block share out
  uint32_t domain_ranks;    // of this rank's domain
  uint32_t domain_sources;  // owners that one of them gathers replies for, at most
  uint32_t sent_id_bytes;
  uint32_t has_saved_weights;   // 1: topk_weights are of the slots of sent_idx
  const uint32_t* rail_tables;  // RailTables; null where each rank sends its own replies
};
static_assert(sizeof(LowLatencyCombineArgs) == 368);

// Sizes that matter for speed: constants on GPUs, fields on the host.
struct LowLatencyDispatchShape {
  int64_t ranks;
  int64_t experts_per_rank;
  int64_t top_k;
  int64_t row_bytes;    // of a message: H with FP8; a multiple of 16
  int64_t scale_bytes;  // of a message; a multiple of 4
  int64_t payload;
  int64_t weights;  // 1: top-k weights travel too
  int64_t padding;  // 0: rows of an expert have fixed places; else they are packed, at multiples of this
};
struct LowLatencyCombineShape {
  int64_t ranks;
  int64_t experts_per_rank;
  int64_t top_k;
  int64_t row_bytes;  // of x, a multiple of 16
  int64_t reply;
  int64_t weights;      // 1: routes hold the dispatch's weights
  int64_t element;      // of rows of x, and of replies that are not LogFMT
  int64_t out_element;  // of combined
  int64_t accumulate;   // 1: sums are added to what combined holds
};

// LogFMT is decided per block of channels: 1024, or the largest power of two that divides H; each must be
// whole groups.
WEFT_DEVICE constexpr uint64_t log_block_elems(uint64_t hidden) {
  uint64_t elems = 1024;
  while (elems > 128 && hidden % elems != 0) elems /= 2;
  return elems;
}
WEFT_DEVICE constexpr bool is_log(int64_t reply) {
  return reply >= kReplyReducedLog;
}
WEFT_DEVICE constexpr bool is_reduced(int64_t reply) {
  return reply == kReplyReduced || reply == kReplyReducedLog;
}

// A reply: the row (a LogFMT block stands at the start of its bf16 place), then per 128 channels bf16
// {largest, smallest}; or, unless it is LogFMT, the row, for which there is as much room as for its lines.
WEFT_DEVICE constexpr uint64_t reply_stride(uint64_t row_bytes, int64_t reply) {
  return is_log(reply) ? row_bytes + round_up_16(row_bytes / 256 * 4) : line_bytes_of(row_bytes);
}

}  // namespace weft
