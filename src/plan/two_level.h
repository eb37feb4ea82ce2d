// SPDX-License-Identifier: Apache-2.0
//
// Plans of high-throughput dispatch and combine among ranks that do not all map each other: islands, hubs, places of
// rings, grid. Pure functions: no device, no environment, no clock. The words are those of
// kernels/moe/two_level_args.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/moe/two_level_args.h"
#include "plan/high_throughput.h"

namespace weft {

// The tables of Islands that are the same on all ranks, and how large theirs of their own get.
struct IslandPlan {
  std::vector<uint32_t> island, place, members, first;
  uint32_t count = 0;
  uint32_t widest = 0;
  uint32_t most_served = 0;

  uint32_t size(uint32_t which) const { return first[which + 1] - first[which]; }
  uint32_t hub(uint32_t rank, uint32_t which) const {
    return members[first[which] + place[rank] % size(which)];
  }
  std::vector<uint32_t> served_by(uint32_t hub) const;    // Islands::served
  uint32_t most_served_in(uint32_t which) const;          // by one rank of an island
  std::vector<uint32_t> numbers_of(uint32_t rank) const;  // Islands::number
};

// mapped[rank]: a bit for every rank that it maps, itself included. Ranks that map the same ranks make an island, so all
// of an island map each other. Islands are in the order of their first ranks.
IslandPlan plan_islands(const std::vector<std::vector<uint64_t>>& mapped);

// The part of every rank's window that rings and their words take, from `begin` on.
struct TwoLevelControl {
  TwoLevelOffsets offsets;
  uint64_t tables;  // u32: island, place, members, first, served, number
  uint32_t batches;
  uint64_t end;
};
TwoLevelControl plan_two_level(uint64_t begin, uint64_t count_record_words, const IslandPlan& islands,
                               const ComputeLimits& limits);

struct TwoLevelGrid {
  GridPlan grid;
  WarpRange batch_warps;
  uint64_t states_at;
};
GridPlan plan_two_level_notify(uint32_t ranks, uint32_t islands, const ComputeLimits& limits);
TwoLevelGrid plan_two_level_dispatch(uint32_t ranks, const IslandPlan& islands, uint32_t batches,
                                     uint32_t piece_bytes, uint32_t num_sms, const ComputeLimits& limits);
TwoLevelGrid plan_two_level_combine(const IslandPlan& islands, uint32_t batches, uint32_t num_sms,
                                    const ComputeLimits& limits);

}  // namespace weft
