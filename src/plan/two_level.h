// SPDX-License-Identifier: Apache-2.0
//
// Plans of high-throughput dispatch and combine among ranks that do not all map each other: domains, rail peers, places
// of rings, grid. Pure functions: no device, no environment, no clock. The words are those of
// kernels/moe/two_level_args.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/moe/two_level_args.h"
#include "plan/high_throughput.h"

namespace weft {

// Which ranks map each other: high-throughput and low-latency calls make their tables of it. It is the same on all
// ranks.
struct DomainPlan {
  std::vector<uint32_t> domain, place, members, first;
  uint32_t count = 0;
  uint32_t widest = 0;
  uint32_t most_sources = 0;

  uint32_t size(uint32_t which) const { return first[which + 1] - first[which]; }
  uint32_t rail_peer(uint32_t rank, uint32_t which) const {
    return members[first[which] + place[rank] % size(which)];
  }
  std::vector<uint32_t> sources_of(uint32_t rank) const;  // Domains::sources
  uint32_t most_sources_in(uint32_t which) const;         // of one rank of a domain
  std::vector<uint32_t> numbers_of(uint32_t rank) const;  // Domains::number
};

// mapped[rank]: a bit for every rank that it maps, itself included. Ranks that map the same ranks make a domain, so all
// of a domain map each other. Domains are in the order of their first ranks.
DomainPlan plan_domains(const std::vector<std::vector<uint64_t>>& mapped);

// The part of every rank's window that rings and their words take, from `begin` on.
struct TwoLevelControl {
  TwoLevelOffsets offsets;
  uint64_t tables;  // u32: domain, place, members, first, sources, number
  uint32_t batches;
  uint64_t end;
};
TwoLevelControl plan_two_level(uint64_t begin, uint64_t count_record_words, const DomainPlan& domains,
                               const ComputeLimits& limits);

struct TwoLevelGrid {
  GridPlan grid;
  WarpRange batch_warps;
  uint64_t states_at;
};
GridPlan plan_two_level_notify(uint32_t ranks, uint32_t domains, const ComputeLimits& limits);
TwoLevelGrid plan_two_level_dispatch(uint32_t ranks, const DomainPlan& domains, uint32_t batches,
                                     uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits);
TwoLevelGrid plan_two_level_combine(const DomainPlan& domains, uint32_t batches, uint32_t num_sms,
                                    const ComputeLimits& limits);

}  // namespace weft
