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
    const NeighbourPlan plan = plan_neighbours(bytes, 3);
    EXPECT_GE(plan.slot_bytes, bytes);
    EXPECT_EQ(plan.slot_bytes % 128, 0u);
    EXPECT_EQ(plan.at.slots % 128, 0u);
    EXPECT_EQ(plan.at.end, plan.at.slots + kRingSides * 3 * plan.slot_bytes);
    EXPECT_GE(plan.at.slots, plan.at.sizes + kRingSides * 3 * sizeof(uint64_t));
  }
}

TEST(ElasticPlan, GridsFitTheMachine) {
  for (const ComputeLimits& limits : {kH200, kHost}) {
    for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
      const GridPlan grid = plan_ring_message(bytes, 0, limits);
      EXPECT_GE(grid.blocks, 1u);
      EXPECT_LE(grid.blocks, limits.is_cuda ? limits.max_blocks : limits.host_threads);
      EXPECT_LE(grid.shared_bytes, 227u * 1024);
      EXPECT_GE(plan_engram_fetch(bytes, limits).blocks, 1u);
    }
  }
  EXPECT_EQ(plan_ring_message(uint64_t{1} << 32, 5, kH200).blocks, 5u);
}

}  // namespace
}  // namespace weft
