// SPDX-License-Identifier: Apache-2.0
#include "plan/high_throughput.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/core/carver.h"

namespace weft {
namespace {

constexpr uint32_t kMaxPieceBytes =
    16 * 1024;  // one bulk-copy warp per SM with 16 KiB pieces fills the links
constexpr uint32_t kMaxCombinePieceBytes = kMaxPieceBytes / 2;
constexpr uint32_t kCudaWarp = 32;
constexpr uint32_t kPushWarps = 3;
constexpr uint32_t kOtherWarps = 13;
constexpr uint32_t kSumWarps = kOtherWarps - 1;  // and one watches
// From so many ranks on combine takes half as many SMs again, and sums by loads. A token has many rows then, so lanes have
// enough of them under way. Pushes need all that an SM's bulk copies carry (decision 67).
constexpr uint32_t kManyRanks = 4;

// On the host every warp takes both roles in turn.
GridPlan host_grid(const ComputeLimits& limits, uint32_t shared_bytes) {
  const WarpRange all{0, limits.host_threads};
  return {1, limits.host_threads, shared_bytes, all, all, {}};
}

// As many row warps as `wanted` and shared memory allow, then `others`.
GridPlan cuda_grid(uint32_t ranks, uint32_t piece_bytes, uint32_t num_sms, uint32_t wanted, uint32_t others,
                   const ComputeLimits& limits) {
  const uint32_t fits = (limits.shared_bytes - pipes_at(ranks)) / pipe_bytes(piece_bytes);
  const uint32_t row_warps = std::max(1u, std::min(wanted, fits));
  return {std::clamp(num_sms, 1u, limits.max_blocks),
          (row_warps + others) * kCudaWarp,
          rows_shared_bytes(ranks, row_warps, piece_bytes),
          {0, row_warps},
          {row_warps, others},
          {}};
}

uint32_t equal_pieces(uint64_t row_bytes, uint32_t most_bytes) {
  const uint64_t pieces = std::max<uint64_t>(1, (row_bytes + most_bytes - 1) / most_bytes);
  return static_cast<uint32_t>(round_up((row_bytes + pieces - 1) / pieces, 16));
}

// How many pieces a RowQueue holds where `bytes` of shared memory are left for those of all sum warps.
uint32_t sum_slots_in(uint32_t bytes) {
  constexpr uint32_t kMost = 3;  // more were not measured
  static_assert(kMost <= kMostQueueSlots);
  uint32_t slots = 1;
  while (slots < kMost && kSumWarps * queue_bytes(slots + 1) <= bytes) ++slots;
  return slots;
}

}  // namespace

uint64_t report_bytes(uint32_t ranks) {
  return sizeof(CountReport) + ranks * sizeof(RankCounts) + kMaxExpertsPerRank * sizeof(int32_t);
}

HighThroughputControl plan_control(uint32_t ranks, uint32_t domains) {
  HighThroughputControl control{};
  HighThroughputOffsets& at = control.offsets;
  Carver carver;
  const uint32_t domain_words = domains > 1 ? domains : 0;
  at.record_words = round_up(sizeof(CountHeader) / 4 + ranks + kMaxExpertsPerRank + domain_words, 32);
  at.count_signal = carver.take(ranks * 8);
  at.count_record = carver.take(2 * ranks * at.record_words * 4);
  at.rendezvous_signal = carver.take(ranks * 8);
  at.rendezvous_record = carver.take(2 * ranks * sizeof(RendezvousRecord));
  at.arrived_signal = carver.take(ranks * 8);
  at.combine_signal = carver.take(ranks * 8);
  at.combine_record = carver.take(2 * ranks * sizeof(RendezvousRecord));
  at.burst_signal = carver.take(uint64_t{ranks} * kMaxBursts * 8);
  control.notify_state = carver.take(sizeof(GridState));
  control.dispatch_state = carver.take(sizeof(GridState));
  control.combine_state = carver.take(sizeof(GridState));
  control.gave_up = carver.take(sizeof(uint32_t));
  control.barrier_prefix = carver.take(uint64_t{ranks} * ranks * sizeof(int32_t));
  control.unawaited_report = carver.take(report_bytes(ranks));
  control.end = carver.end();
  return control;
}

uint32_t plan_piece_bytes(uint64_t row_bytes) {
  return equal_pieces(row_bytes, kMaxPieceBytes);
}

uint32_t plan_combine_piece_bytes(uint64_t row_bytes) {
  return equal_pieces(row_bytes, kMaxCombinePieceBytes);
}

uint32_t plan_num_sms(int nvlinks, int compute_major, const ComputeLimits& limits) {
  constexpr uint32_t kUnknown = 20;  // DeepEP's default
  if (nvlinks < 0) return std::min(kUnknown, limits.max_blocks);
  const double link_gbs = compute_major >= 10 ? 53.1 : compute_major == 9 ? 26.6 : 25.0;
  constexpr double kPcieGbs = 64, kUsable = 0.75;  // of a link's raw rate
  const double egress_gbs = kUsable * (nvlinks > 0 ? nvlinks * link_gbs : kPcieGbs);
  const double push_gbs = compute_major >= 9 ? 32 : 18;  // one SM: bulk copies, or 16-byte stores
  const auto pairs = static_cast<uint32_t>(std::ceil(egress_gbs / push_gbs * 4 / 3 / 2));
  return std::min(2 * std::max(pairs, 2u), limits.max_blocks);
}

uint32_t plan_combine_num_sms(uint32_t num_sms, uint32_t ranks, int compute_major,
                              const ComputeLimits& limits) {
  if (compute_major < 9 || ranks < kManyRanks) return num_sms;
  return std::min(num_sms / 4 * 6, limits.max_blocks);
}

GridPlan plan_layout(uint64_t tokens, uint32_t ranks, uint32_t experts, const ComputeLimits& limits) {
  const auto shared_bytes = static_cast<uint32_t>((ranks + experts) * sizeof(int32_t));
  if (!limits.is_cuda) return host_grid(limits, shared_bytes);
  constexpr uint32_t kThreads = 512, kMostBlocks = 8;  // of a cluster on any GPU that has them
  // More tokens take longer in one cluster than in more blocks, zeroed counts included (decision 78).
  constexpr uint64_t kMostTokens = 4096;
  const auto blocks = static_cast<uint32_t>((tokens + kThreads - 1) / kThreads);
  GridPlan grid{std::clamp(blocks, 1u, limits.max_blocks), kThreads, shared_bytes, {}, {}, {}};
  if (limits.has_clusters && limits.max_blocks >= kMostBlocks && tokens <= kMostTokens)
    grid.blocks = grid.blocks_per_cluster = std::min(std::bit_ceil(grid.blocks), kMostBlocks);
  return grid;
}

GridPlan plan_notify(uint32_t ranks, const ComputeLimits& limits) {
  const uint32_t warps = limits.is_cuda ? 32 : limits.host_threads;
  const uint32_t shared_bytes = std::max(warps, ranks + 1) * 4;
  if (!limits.is_cuda) return host_grid(limits, shared_bytes);
  return {std::min(ranks + 2, limits.max_blocks), warps * kCudaWarp, shared_bytes, {}, {}, {}};
}

GridPlan plan_dispatch(uint32_t ranks, uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits) {
  if (!limits.is_cuda) return host_grid(limits, pipes_at(ranks));
  return cuda_grid(ranks, piece_bytes, num_sms, kPushWarps, kOtherWarps, limits);
}

GridPlan plan_combine(uint32_t ranks, uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits) {
  if (!limits.is_cuda) return host_grid(limits, pipes_at(ranks));
  const bool has_queues = ranks < kManyRanks;
  ComputeLimits left = limits;  // queues get room for two pieces each before a second warp pushes
  if (has_queues) left.shared_bytes -= std::min(limits.shared_bytes / 2, kSumWarps * queue_bytes(2));
  GridPlan grid = cuda_grid(ranks, piece_bytes, num_sms, kPushWarps, kOtherWarps, left);
  grid.second_role.count = kSumWarps;
  grid.watch_role = {grid.second_role.first + kSumWarps, 1};
  if (!has_queues) return grid;
  grid.sum_slots = sum_slots_in(limits.shared_bytes - std::min(limits.shared_bytes, grid.shared_bytes));
  grid.shared_bytes += kSumWarps * queue_bytes(grid.sum_slots);
  return grid;
}

}  // namespace weft
