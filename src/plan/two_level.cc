// SPDX-License-Identifier: Apache-2.0
#include "plan/two_level.h"

#include <algorithm>

#include "kernels/core/carver.h"

namespace weft {
namespace {

constexpr uint32_t kHostBatches = 2, kCudaBatches = 32;
constexpr uint32_t kCudaWarp = 32;
// Of one rank's window for all rings. Slots larger than the second bring nothing over tcp and shm on a host.
constexpr uint64_t kRingBytes = uint64_t{64} << 20, kMostSlotBytes = 256 << 10, kLeastSlotBytes = 64 << 10;

TwoLevelGrid with_states(GridPlan grid, WarpRange batch_warps, const IslandPlan& islands, uint32_t batches) {
  const uint64_t states_at = round_up(grid.shared_bytes, 16);
  grid.shared_bytes =
      static_cast<uint32_t>(states_at + ring_states_bytes(islands.count, islands.most_served, batches,
                                                          grid.blocks, batch_warps.count));
  return {grid, batch_warps, states_at};
}

}  // namespace

std::vector<uint32_t> IslandPlan::served_by(uint32_t hub_rank) const {
  std::vector<uint32_t> served;
  for (uint32_t rank = 0; rank < island.size(); ++rank)
    if (island[rank] != island[hub_rank] && hub(rank, island[hub_rank]) == hub_rank) served.push_back(rank);
  return served;
}

uint32_t IslandPlan::most_served_in(uint32_t which) const {
  std::vector<uint32_t> served(size(which), 0);
  for (uint32_t rank = 0; rank < island.size(); ++rank)
    if (island[rank] != which) ++served[place[rank] % size(which)];
  return *std::max_element(served.begin(), served.end());
}

std::vector<uint32_t> IslandPlan::numbers_of(uint32_t rank) const {
  std::vector<uint32_t> numbers(count, 0);
  for (uint32_t which = 0; which < count; ++which) {
    if (which == island[rank]) continue;
    const std::vector<uint32_t> served = served_by(hub(rank, which));
    numbers[which] = static_cast<uint32_t>(std::find(served.begin(), served.end(), rank) - served.begin());
  }
  return numbers;
}

IslandPlan plan_islands(const std::vector<std::vector<uint64_t>>& mapped) {
  IslandPlan plan;
  const auto ranks = static_cast<uint32_t>(mapped.size());
  plan.island.resize(ranks);
  plan.place.resize(ranks);
  std::vector<uint32_t> leaders;  // the first rank of each island
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const auto found = std::find_if(leaders.begin(), leaders.end(),
                                    [&](uint32_t leader) { return mapped[leader] == mapped[rank]; });
    plan.island[rank] = static_cast<uint32_t>(found - leaders.begin());
    if (found == leaders.end()) leaders.push_back(rank);
  }
  plan.count = static_cast<uint32_t>(leaders.size());
  plan.first.push_back(0);
  for (uint32_t which = 0; which < plan.count; ++which) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (plan.island[rank] != which) continue;
      plan.place[rank] = static_cast<uint32_t>(plan.members.size()) - plan.first[which];
      plan.members.push_back(rank);
    }
    plan.first.push_back(static_cast<uint32_t>(plan.members.size()));
    plan.widest = std::max(plan.widest, plan.size(which));
  }
  for (uint32_t rank = 0; rank < ranks; ++rank)
    plan.most_served = std::max(plan.most_served, static_cast<uint32_t>(plan.served_by(rank).size()));
  return plan;
}

TwoLevelControl plan_two_level(uint64_t begin, uint64_t count_record_words, const IslandPlan& islands,
                               const ComputeLimits& limits) {
  TwoLevelControl control{};
  const auto ranks = static_cast<uint64_t>(islands.island.size());
  const uint64_t batches = limits.is_cuda ? kCudaBatches : kHostBatches;
  const uint64_t to_islands = islands.count * batches, to_served = islands.most_served * batches;
  const uint64_t slots = (to_islands + to_served) * kHubSlots;
  TwoLevelOffsets& at = control.offsets;
  control.batches = static_cast<uint32_t>(batches);
  at.slot_bytes = std::clamp(kRingBytes / slots / 4096 * 4096, kLeastSlotBytes, kMostSlotBytes);
  Carver carver(begin);
  control.tables = carver.take((3 * ranks + 2 * islands.count + 1 + islands.most_served) * sizeof(uint32_t));
  at.counts_out = carver.take(2 * ranks * count_record_words * sizeof(uint32_t));
  at.rows_sent = carver.take(to_served * 8);
  at.rows_taken = carver.take(to_islands * 8);
  at.sums_sent = carver.take(to_islands * 8);
  at.sums_taken = carver.take(to_served * 8);
  at.pushed = carver.take(ranks * islands.widest * kPushChunks * 8);
  at.island_rings = carver.take(to_islands * kHubSlots * at.slot_bytes, 4096);
  at.served_rings = carver.take(to_served * kHubSlots * at.slot_bytes, 4096);
  control.end = carver.end();
  return control;
}

// Half the threads of plan_notify() on GPUs: code that writes a NIC's queues takes more than 64 registers of a thread.
GridPlan plan_two_level_notify(uint32_t ranks, uint32_t islands, const ComputeLimits& limits) {
  GridPlan grid = plan_notify(ranks, limits);
  grid.shared_bytes = std::max(grid.shared_bytes, (1 + ranks + islands) * 4);
  if (!limits.is_cuda) return grid;
  grid.threads_per_block = 512;
  grid.blocks = std::min(ranks + islands + 3, limits.max_blocks);
  return grid;
}

// On GPUs a third of the warps beside the row warps serve batches.
TwoLevelGrid plan_two_level_dispatch(uint32_t ranks, const IslandPlan& islands, uint32_t batches,
                                     uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits) {
  constexpr uint32_t kBatchWarps = 4;
  ComputeLimits left = limits;
  const auto states =
      static_cast<uint32_t>(ring_states_bytes(islands.count, islands.most_served, batches, 1, kBatchWarps));
  if (limits.is_cuda) left.shared_bytes -= std::min(left.shared_bytes / 2, states + 16);
  GridPlan grid = plan_dispatch(ranks, piece_bytes, num_sms, left);
  if (!limits.is_cuda) return with_states(grid, grid.first_role, islands, batches);
  grid.second_role.count -= kBatchWarps;
  return with_states(grid, {grid.second_role.first + grid.second_role.count, kBatchWarps}, islands, batches);
}

TwoLevelGrid plan_two_level_combine(const IslandPlan& islands, uint32_t batches, uint32_t num_sms,
                                    const ComputeLimits& limits) {
  constexpr uint32_t kPushWarps = 8, kBatchWarps = 8, kFlagsBytes = 128;
  if (!limits.is_cuda) {
    const WarpRange all{0, limits.host_threads};
    return with_states({1, limits.host_threads, kFlagsBytes, all, all, {}}, all, islands, batches);
  }
  const GridPlan grid{std::clamp(num_sms, 1u, limits.max_blocks),
                      (kPushWarps + kBatchWarps) * kCudaWarp,
                      kFlagsBytes,
                      {0, kPushWarps},
                      {},
                      {}};
  return with_states(grid, {kPushWarps, kBatchWarps}, islands, batches);
}

}  // namespace weft
