// SPDX-License-Identifier: Apache-2.0
#include "plan/two_level.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "jit/host_kernels.h"

namespace weft {
namespace {

using ::testing::ElementsAre;

constexpr ComputeLimits kHost{false, 1, 1, 0};
constexpr ComputeLimits kH200{true, 132, 1, 227 * 1024};

// Who maps whom, by node.
IslandPlan islands_of(const std::vector<uint32_t>& nodes) {
  std::vector<std::vector<uint64_t>> mapped(nodes.size(), std::vector<uint64_t>((nodes.size() + 63) / 64));
  for (size_t rank = 0; rank < nodes.size(); ++rank)
    for (size_t peer = 0; peer < nodes.size(); ++peer)
      if (nodes[rank] == nodes[peer]) mapped[rank][peer / 64] |= uint64_t{1} << (peer % 64);
  return plan_islands(mapped);
}

TEST(TwoLevelPlan, RailsJoinRanksOfTheSamePlace) {
  const IslandPlan plan = islands_of({0, 0, 1, 1});
  EXPECT_EQ(plan.count, 2u);
  EXPECT_EQ(plan.hub(0, 1), 2u);
  EXPECT_EQ(plan.hub(3, 0), 1u);
  EXPECT_EQ(plan.hub(3, 1), 3u);
  EXPECT_THAT(plan.served_by(2), ElementsAre(0));
  EXPECT_EQ(plan.most_served, 1u);
}

TEST(TwoLevelPlan, AHubOfASmallIslandServesSeveralOfALargeOne) {
  const IslandPlan plan = islands_of({0, 0, 0, 1, 1});
  EXPECT_THAT(plan.served_by(3), ElementsAre(0, 2));
  EXPECT_THAT(plan.served_by(4), ElementsAre(1));
  EXPECT_THAT(plan.served_by(2), ElementsAre());
  EXPECT_THAT(plan.numbers_of(2), ElementsAre(0, 1));
  EXPECT_EQ(plan.widest, 3u);
  EXPECT_EQ(plan.most_served, 2u);
}

TEST(TwoLevelPlan, RanksOfANodeNeedNotBeNeighbours) {
  const IslandPlan plan = islands_of({0, 1, 0, 1, 2});
  EXPECT_THAT(plan.members, ElementsAre(0, 2, 1, 3, 4));
  EXPECT_THAT(plan.place, ElementsAre(0, 0, 1, 1, 0));
  EXPECT_EQ(plan.hub(3, 0), 2u);
  EXPECT_EQ(plan.hub(3, 2), 4u);
}

// Rank 1 maps both others, which do not map each other: nobody makes an island with anybody.
TEST(TwoLevelPlan, IslandsAreOfRanksThatAllMapEachOther) {
  const IslandPlan plan = plan_islands({{0b011}, {0b111}, {0b110}});
  EXPECT_THAT(plan.island, ElementsAre(0, 1, 2));
}

// Every rank is served by one hub in each other island, which has a ring of its own for it.
TEST(TwoLevelPlan, EveryRankHasItsRingAtEveryHub) {
  for (const std::vector<uint32_t>& nodes :
       {std::vector<uint32_t>{0, 1, 2}, {0, 0, 0, 1}, {0, 1, 1, 1, 1, 2, 2}, {0, 0, 1, 2, 2, 2, 3, 3}}) {
    const IslandPlan plan = islands_of(nodes);
    for (uint32_t rank = 0; rank < nodes.size(); ++rank)
      for (uint32_t island = 0; island < plan.count; ++island) {
        if (island == plan.island[rank]) continue;
        const std::vector<uint32_t> served = plan.served_by(plan.hub(rank, island));
        const uint32_t number = plan.numbers_of(rank)[island];
        ASSERT_LT(number, plan.most_served);
        EXPECT_EQ(served.at(number), rank);
      }
  }
}

TEST(TwoLevelPlan, RingsOfManyRanksStayWithinTheirShareOfMemory) {
  std::vector<uint32_t> nodes(64);
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) nodes[rank] = rank / 8;
  for (const ComputeLimits& limits : {kHost, kH200}) {
    const TwoLevelControl control = plan_two_level(4096, 1024, islands_of(nodes), limits);
    EXPECT_GE(control.offsets.slot_bytes, 64u << 10);
    EXPECT_EQ(control.offsets.slot_bytes % 4096, 0u);
    EXPECT_GE(control.offsets.island_rings, 4096u);
    EXPECT_LE(control.end, 200u << 20);
  }
}

// Registers are counted for the threads that the table names.
TEST(TwoLevelPlan, NotifyHasTheThreadsThatItIsCompiledFor) {
  const GridPlan grid = plan_two_level_notify(64, 8, kH200);
  EXPECT_EQ(grid.threads_per_block, find_kernel("two_level_notify", "IbgdaMesh")->threads_per_block);
  EXPECT_GE(grid.shared_bytes, (1 + 64 + 8) * 4u);
  EXPECT_EQ(plan_two_level_notify(64, 8, kHost).threads_per_block, kHost.host_threads);
}

TEST(TwoLevelPlan, EveryBatchHasAWarpAndItsStateAPlace) {
  const IslandPlan islands = islands_of({0, 0, 1, 1, 2, 2});
  const TwoLevelGrid dispatch = plan_two_level_dispatch(6, islands, 32, 14336, 20, kH200);
  EXPECT_LE(dispatch.batch_warps.first + dispatch.batch_warps.count, dispatch.grid.threads_per_block / 32);
  EXPECT_LE(dispatch.grid.shared_bytes, kH200.shared_bytes);
  EXPECT_GE(dispatch.grid.shared_bytes - dispatch.states_at,
            ring_states_bytes(islands.count, islands.most_served, 32, 20, dispatch.batch_warps.count));
  const TwoLevelGrid combine = plan_two_level_combine(islands, 2, 0, kHost);
  EXPECT_EQ(combine.grid.threads_per_block, kHost.host_threads);
  EXPECT_EQ(combine.batch_warps.count, kHost.host_threads);
}

}  // namespace
}  // namespace weft
