// SPDX-License-Identifier: Apache-2.0
//
// Decisions of high-throughput dispatch and combine: where the exchanges stand in a window, how rows are cut,
// what grid runs. Pure functions: no device, no environment, no clock. Units are in names.
#pragma once

#include <cstdint>

#include "kernels/moe/high_throughput_args.h"
#include "topology/compute_limits.h"

namespace weft {

// A rank owns at most this many experts: the counts of its experts travel in a record of fixed size.
inline constexpr uint32_t kMaxExpertsPerRank = 4096;

// Of a CountReport and what follows it.
uint64_t report_bytes(uint32_t ranks);

// The part of every rank's window that exchanges use, from offset 0. States are local, but live there too.
struct HighThroughputControl {
  HighThroughputOffsets offsets;
  uint64_t notify_state;
  uint64_t dispatch_state;
  uint64_t combine_state;
  uint64_t gave_up;           // u32: WaitRule::gave_up of all kernels of the buffer
  uint64_t barrier_prefix;    // of calls without rows, which nobody reads
  uint64_t unawaited_report;  // of calls whose counts the host does not wait for; the dispatch reads it
  uint64_t end;
};
// More than one domain: count records also say what goes to each (kernels/moe/two_level_args.h).
HighThroughputControl plan_control(uint32_t ranks, uint32_t domains = 1);

struct GridPlan {
  uint32_t blocks;
  uint32_t threads_per_block;
  uint32_t shared_bytes;
  WarpRange first_role;    // rows to push
  WarpRange second_role;   // dispatch: ids, weights, scales; combine: sums
  WarpRange watch_role{};  // combine: waits for the block; none on the host
  // combine: pieces of rows that each sum warp has under way in shared memory; 0: rows are loaded into registers
  uint32_t sum_slots = 0;
  uint32_t blocks_per_cluster = 1;
};

// SMs of a dispatch or combine whose caller names no number: as many as fill a GPU's links, and a third more
// for what goes beside the rows. `nvlinks`: that are up, -1 where nobody can say; `compute_major`: 9 on
// Hopper. Sources: bare bulk copies and stores between 8 H200 (bench/results/moe-on-gpus.md); A100's and B200's
// links as NVIDIA states them, in the same proportion.
uint32_t plan_num_sms(int nvlinks, int compute_major, const ComputeLimits& limits);

// The same of a combine alone, on one domain of ranks that map each other: half as many again on Hopper and newer, from
// 4 ranks on (decision 67). `num_sms`: of plan_num_sms().
uint32_t plan_combine_num_sms(uint32_t num_sms, uint32_t ranks, int compute_major,
                              const ComputeLimits& limits);

// A row moves in pieces of one pipe stage: as few as fit, equal, a multiple of 16 bytes.
uint32_t plan_piece_bytes(uint64_t row_bytes);
// The same for combine, whose pipes leave half of the shared memory to sums.
uint32_t plan_combine_piece_bytes(uint64_t row_bytes);
GridPlan plan_notify(uint32_t ranks, const ComputeLimits& limits);
// A grid that is one cluster stores its counts; others add to counts that were zeroed before.
GridPlan plan_layout(uint64_t tokens, uint32_t ranks, uint32_t experts, const ComputeLimits& limits);
GridPlan plan_dispatch(uint32_t ranks, uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits);
GridPlan plan_combine(uint32_t ranks, uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits);

}  // namespace weft
