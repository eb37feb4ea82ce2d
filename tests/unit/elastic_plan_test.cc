// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>

#include "plan/elastic.h"

namespace weft {
namespace {

constexpr ComputeLimits kH200{true, 132, 1, 227 * 1024};
constexpr ComputeLimits kHost{false, 1, 2, 0};

TEST(ElasticPlan, EverySideHasOneSender) {
  for (uint32_t ranks : {1u, 2u, 3u, 7u}) {
    for (uint32_t receiver = 0; receiver < ranks; ++receiver) {
      std::multiset<int> sides;
      for (uint32_t sender = 0; sender < ranks; ++sender)
        if (const int side = ring_side(sender, receiver, ranks); side >= 0) sides.insert(side);
      EXPECT_EQ(sides, ranks > 2 ? (std::multiset<int>{0, 1}) : (std::multiset<int>{0})) << ranks << " ranks";
    }
  }
}

TEST(ElasticPlan, SlotsAreWholeLinesAndDoNotOverlap) {
  for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{129}, uint64_t{1} << 33}) {
    const NeighbourPlan plan = plan_neighbours(bytes, 3, false);
    EXPECT_GE(plan.slot_bytes, bytes);
    EXPECT_EQ(plan.slot_bytes % 128, 0u);
    EXPECT_EQ(plan.at.slots % 128, 0u);
    EXPECT_EQ(plan.at.end, plan.at.slots + kRingSides * 3 * plan.slot_bytes);
    EXPECT_GE(plan.at.slots, plan.at.sizes + kRingSides * 3 * sizeof(uint64_t));
    const NeighbourPlan far = plan_neighbours(bytes, 3, true);
    EXPECT_EQ(far.at.slots, plan.at.slots);
    EXPECT_EQ(far.at.outbox, plan.at.end);
    EXPECT_EQ(far.at.end, far.at.outbox + kRingSides * 3 * plan.slot_bytes);
  }
}

TEST(ElasticPlan, GridsFitTheMachine) {
  for (const ComputeLimits& limits : {kH200, kHost}) {
    for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
      const GridPlan grid = plan_ring_message(bytes, 0, limits);
      EXPECT_GE(grid.blocks, 1u);
      EXPECT_LE(grid.blocks, limits.is_cuda ? limits.max_blocks : limits.host_threads);
      EXPECT_LE(grid.shared_bytes, 227u * 1024);
      for (bool has_ports : {false, true}) {
        EXPECT_GE(plan_engram_fetch(bytes, has_ports, limits).blocks, 1u);
        EXPECT_LE(plan_engram_fetch(bytes, has_ports, limits).blocks,
                  limits.is_cuda ? limits.max_blocks : limits.host_threads);
      }
    }
  }
  EXPECT_EQ(plan_ring_message(uint64_t{1} << 32, 5, kH200).blocks, 5u);
}

TEST(ElasticPlan, WordsLandingsAndEntriesLieApart) {
  for (const ComputeLimits& limits : {kH200, kHost}) {
    for (uint64_t row_bytes : {uint64_t{1}, uint64_t{16}, uint64_t{14337}}) {
      const EngramLayout near = plan_engram(7, row_bytes, false, limits);
      EXPECT_GE(near.end, round_up(7 * row_bytes, 16));
      const EngramLayout far = plan_engram(7, row_bytes, true, limits);
      const GridPlan grid = plan_engram_fetch(uint64_t{1} << 32, true, limits);
      const uint64_t warps = uint64_t{grid.blocks} * (limits.is_cuda ? grid.threads_per_block / 32 : 1);
      EXPECT_EQ(far.words, 0u) << "words come first, as they alone need a host part";
      EXPECT_GE(far.landings, far.words + warps * kLandings * 8);
      EXPECT_EQ(far.landings % 16 + far.landing_bytes % 16, 0u);
      EXPECT_GE(far.landing_bytes, row_bytes + 15);
      EXPECT_GE(far.entries, far.landings + warps * kLandings * far.landing_bytes);
      EXPECT_EQ(far.entries % 16, 0u);
      EXPECT_GE(far.end, far.entries + 7 * row_bytes);
    }
  }
  EXPECT_GT(plan_engram(0, 16, false, kHost).end, 0u);
}

}  // namespace
}  // namespace weft
