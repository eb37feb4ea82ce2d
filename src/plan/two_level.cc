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

TwoLevelGrid with_states(GridPlan grid, WarpRange batch_warps, const DomainPlan& domains, uint32_t batches) {
  const uint64_t states_at = round_up(grid.shared_bytes, 16);
  grid.shared_bytes =
      static_cast<uint32_t>(states_at + ring_states_bytes(domains.count, domains.most_sources, batches,
                                                          grid.blocks, batch_warps.count));
  return {grid, batch_warps, states_at};
}

}  // namespace

std::vector<uint32_t> DomainPlan::sources_of(uint32_t rank) const {
  std::vector<uint32_t> sources;
  for (uint32_t source = 0; source < domain.size(); ++source)
    if (domain[source] != domain[rank] && rail_peer(source, domain[rank]) == rank) sources.push_back(source);
  return sources;
}

uint32_t DomainPlan::most_sources_in(uint32_t which) const {
  std::vector<uint32_t> sources(size(which), 0);
  for (uint32_t rank = 0; rank < domain.size(); ++rank)
    if (domain[rank] != which) ++sources[place[rank] % size(which)];
  return *std::max_element(sources.begin(), sources.end());
}

std::vector<uint32_t> DomainPlan::numbers_of(uint32_t rank) const {
  std::vector<uint32_t> numbers(count, 0);
  for (uint32_t which = 0; which < count; ++which) {
    if (which == domain[rank]) continue;
    const std::vector<uint32_t> sources = sources_of(rail_peer(rank, which));
    numbers[which] = static_cast<uint32_t>(std::find(sources.begin(), sources.end(), rank) - sources.begin());
  }
  return numbers;
}

DomainPlan plan_domains(const std::vector<std::vector<uint64_t>>& mapped) {
  DomainPlan plan;
  const auto ranks = static_cast<uint32_t>(mapped.size());
  plan.domain.resize(ranks);
  plan.place.resize(ranks);
  std::vector<uint32_t> leaders;  // the first rank of each domain
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const auto found = std::find_if(leaders.begin(), leaders.end(),
                                    [&](uint32_t leader) { return mapped[leader] == mapped[rank]; });
    plan.domain[rank] = static_cast<uint32_t>(found - leaders.begin());
    if (found == leaders.end()) leaders.push_back(rank);
  }
  plan.count = static_cast<uint32_t>(leaders.size());
  plan.first.push_back(0);
  for (uint32_t which = 0; which < plan.count; ++which) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (plan.domain[rank] != which) continue;
      plan.place[rank] = static_cast<uint32_t>(plan.members.size()) - plan.first[which];
      plan.members.push_back(rank);
    }
    plan.first.push_back(static_cast<uint32_t>(plan.members.size()));
    plan.widest = std::max(plan.widest, plan.size(which));
  }
  for (uint32_t rank = 0; rank < ranks; ++rank)
    plan.most_sources = std::max(plan.most_sources, static_cast<uint32_t>(plan.sources_of(rank).size()));
  return plan;
}

TwoLevelControl plan_two_level(uint64_t begin, uint64_t count_record_words, const DomainPlan& domains,
                               const ComputeLimits& limits) {
  TwoLevelControl control{};
  const auto ranks = static_cast<uint64_t>(domains.domain.size());
  const uint64_t batches = limits.is_cuda ? kCudaBatches : kHostBatches;
  const uint64_t to_domains = domains.count * batches, to_sources = domains.most_sources * batches;
  const uint64_t slots = (to_domains + to_sources) * kRailPeerSlots;
  TwoLevelOffsets& at = control.offsets;
  control.batches = static_cast<uint32_t>(batches);
  at.slot_bytes = std::clamp(kRingBytes / slots / 4096 * 4096, kLeastSlotBytes, kMostSlotBytes);
  Carver carver(begin);
  control.tables = carver.take((3 * ranks + 2 * domains.count + 1 + domains.most_sources) * sizeof(uint32_t));
  at.counts_out = carver.take(2 * ranks * count_record_words * sizeof(uint32_t));
  at.rows_sent = carver.take(to_sources * 8);
  at.rows_taken = carver.take(to_domains * 8);
  at.sums_sent = carver.take(to_domains * 8);
  at.sums_taken = carver.take(to_sources * 8);
  at.pushed = carver.take(ranks * domains.widest * kPushBursts * 8);
  at.domain_rings = carver.take(to_domains * kRailPeerSlots * at.slot_bytes, 4096);
  at.source_rings = carver.take(to_sources * kRailPeerSlots * at.slot_bytes, 4096);
  control.end = carver.end();
  return control;
}

// Half the threads of plan_notify() on GPUs: code that writes a NIC's queues takes more than 64 registers of a thread.
GridPlan plan_two_level_notify(uint32_t ranks, uint32_t domains, const ComputeLimits& limits) {
  GridPlan grid = plan_notify(ranks, limits);
  grid.shared_bytes = std::max(grid.shared_bytes, (1 + ranks + domains) * 4);
  if (!limits.is_cuda) return grid;
  grid.threads_per_block = 512;
  grid.blocks = std::min(ranks + domains + 3, limits.max_blocks);
  return grid;
}

// On GPUs a third of the warps that are not row warps serve batches.
TwoLevelGrid plan_two_level_dispatch(uint32_t ranks, const DomainPlan& domains, uint32_t batches,
                                     uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits) {
  constexpr uint32_t kBatchWarps = 4;
  ComputeLimits left = limits;
  const auto states =
      static_cast<uint32_t>(ring_states_bytes(domains.count, domains.most_sources, batches, 1, kBatchWarps));
  if (limits.is_cuda) left.shared_bytes -= std::min(left.shared_bytes / 2, states + 16);
  GridPlan grid = plan_dispatch(ranks, piece_bytes, num_sms, left);
  if (!limits.is_cuda) return with_states(grid, grid.first_role, domains, batches);
  grid.second_role.count -= kBatchWarps;
  return with_states(grid, {grid.second_role.first + grid.second_role.count, kBatchWarps}, domains, batches);
}

TwoLevelGrid plan_two_level_combine(const DomainPlan& domains, uint32_t batches, uint32_t num_sms,
                                    const ComputeLimits& limits) {
  constexpr uint32_t kPushWarps = 8, kBatchWarps = 8, kFlagsBytes = 128;
  if (!limits.is_cuda) {
    const WarpRange all{0, limits.host_threads};
    return with_states({1, limits.host_threads, kFlagsBytes, all, all, {}}, all, domains, batches);
  }
  const GridPlan grid{std::clamp(num_sms, 1u, limits.max_blocks),
                      (kPushWarps + kBatchWarps) * kCudaWarp,
                      kFlagsBytes,
                      {0, kPushWarps},
                      {},
                      {}};
  return with_states(grid, {kPushWarps, kBatchWarps}, domains, batches);
}

}  // namespace weft
