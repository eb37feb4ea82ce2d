// SPDX-License-Identifier: Apache-2.0
//
// Decisions of low-latency dispatch and combine: how much of the window a call needs, what grid runs, who
// shares a row. Pure functions: no device, no environment, no clock.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/moe/low_latency_layout.h"
#include "kernels/moe/low_latency_ports.h"
#include "plan/high_throughput.h"

namespace weft {

// For LowLatencySizes::line_tokens: as many as are faster as lines.
inline constexpr uint32_t kPlannedLineTokens = ~uint32_t{0};

// Whether rows go by bulk copies where a call takes a bounded number of SMs: never, where that is faster, or wherever it can be.
enum class BulkRows { kNever, kPlanned, kAlways };

// The sizes that all ranks of a call agree on.
struct LowLatencySizes {
  uint32_t ranks;
  uint32_t max_tokens;  // per rank
  uint32_t top_k;
  uint32_t experts;
  uint32_t line_tokens = 0;  // a rank with so many tokens, or fewer, sends them as lines; 0: none
  uint64_t line_room = 0;    // bytes of a half that lines have; calls whose lines do not fit have none
  bool has_ports = false;    // some rank has peers that it does not map: an outbox, no lines, larger batches
  bool is_watched =
      false;  // there is a control page: a block of every launch watches (low_latency_watch.cuh)
  uint32_t domain_ranks =
      0;  // combine: of this rank's node, whose sums cross once (low_latency_ports.h); 0: none do
  uint32_t grid_sms = 0;  // SMs, or host threads, of each launch of the call at most; 0: all
  BulkRows bulk_rows = BulkRows::kPlanned;

  // The last ranks own fewer, or none, where experts do not divide evenly.
  uint32_t experts_per_rank() const { return (experts + ranks - 1) / ranks; }
  Batches batches() const { return has_ports ? port_batches_of(max_tokens) : batches_of(max_tokens); }
};

struct LowLatencyPlan {
  uint64_t word_bytes;  // of each half of the region, without lines; with ports, as much again for the outbox
  bool lines;           // whether some rank's tokens may travel as lines
  uint32_t blocks;
  uint32_t threads_per_block;
  uint32_t shared_bytes;
  uint32_t pieces;  // combine: warps that share one reply; all ranks must use the same, so T plays no part
  uint32_t receive_splits;  // warps that share one message or one token's sum; a multiple of pieces
  uint32_t answer_parts =
      1;  // combine with port peers: parts of a reply, which the warps of a block share out
  uint32_t line_tokens = 0;  // dispatch: this rank's tokens travel as lines if they are so few; 0: never
  uint32_t blocks_per_cluster = 1;
  bool in_bulk = false;  // the kernels of low_latency_*_bulk.cuh: no lines, and nothing is shared by warps
};

// `tokens` are this rank's.
LowLatencyPlan plan_low_latency_dispatch(const LowLatencySizes& sizes, const LowLatencyDispatchShape& shape,
                                         const ComputeLimits& limits);
LowLatencyPlan plan_low_latency_combine(const LowLatencySizes& sizes, const LowLatencyCombineShape& shape,
                                        uint32_t tokens, const ComputeLimits& limits);

// 4-byte words that a dispatch leaves for its combine.
uint64_t low_latency_routes_words(const LowLatencySizes& sizes, bool has_weights);

// Bytes of the least region whose halves have `word_bytes` beside their lines, or beside an outbox of as many; of the
// halves of a region of `region_bytes` (0 if it is too small); and where in a half its lines, or the outbox, begin.
uint64_t low_latency_region_bytes(uint32_t ranks, uint64_t word_bytes, bool has_ports = false);
uint64_t low_latency_half_bytes(uint32_t ranks, uint64_t region_bytes);
uint64_t low_latency_lines_at(uint32_t ranks, uint64_t half_bytes, bool has_ports);
// Bytes of a control page beside a region of `region_bytes` of ranks with port peers: the control area, and a rank's
// messages to itself in each half.
uint64_t low_latency_page_bytes(uint32_t ranks, uint64_t region_bytes);
// Bytes of a region in which ranks with port peers can make every call that ranks which map each other make in one of
// `region_bytes`.
uint64_t low_latency_bytes_with_ports(uint32_t ranks, uint64_t region_bytes);

// Enough for every dispatch and combine of these sizes, as lines too, whatever the payload; rows of `hidden`
// bf16 channels.
// The zero-copy rows [Le][R * M] are not part of it: they are local memory.
uint64_t low_latency_hint_bytes(const LowLatencySizes& sizes, uint64_t hidden);

std::string to_text(const LowLatencyPlan& plan);

}  // namespace weft
