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
DomainPlan domains_of(const std::vector<uint32_t>& nodes) {
  std::vector<std::vector<uint64_t>> mapped(nodes.size(), std::vector<uint64_t>((nodes.size() + 63) / 64));
  for (size_t rank = 0; rank < nodes.size(); ++rank)
    for (size_t peer = 0; peer < nodes.size(); ++peer)
      if (nodes[rank] == nodes[peer]) mapped[rank][peer / 64] |= uint64_t{1} << (peer % 64);
  return plan_domains(mapped);
}

TEST(TwoLevelPlan, RailsJoinRanksOfTheSamePlace) {
  const DomainPlan plan = domains_of({0, 0, 1, 1});
  EXPECT_EQ(plan.count, 2u);
  EXPECT_EQ(plan.rail_peer(0, 1), 2u);
  EXPECT_EQ(plan.rail_peer(3, 0), 1u);
  EXPECT_EQ(plan.rail_peer(3, 1), 3u);
  EXPECT_THAT(plan.sources_of(2), ElementsAre(0));
  EXPECT_EQ(plan.most_sources, 1u);
}

TEST(TwoLevelPlan, ARankOfASmallDomainHasSeveralSourcesInALargeOne) {
  const DomainPlan plan = domains_of({0, 0, 0, 1, 1});
  EXPECT_THAT(plan.sources_of(3), ElementsAre(0, 2));
  EXPECT_THAT(plan.sources_of(4), ElementsAre(1));
  EXPECT_THAT(plan.sources_of(2), ElementsAre());
  EXPECT_THAT(plan.numbers_of(2), ElementsAre(0, 1));
  EXPECT_EQ(plan.widest, 3u);
  EXPECT_EQ(plan.most_sources, 2u);
}

TEST(TwoLevelPlan, RanksOfANodeNeedNotBeNeighbours) {
  const DomainPlan plan = domains_of({0, 1, 0, 1, 2});
  EXPECT_THAT(plan.members, ElementsAre(0, 2, 1, 3, 4));
  EXPECT_THAT(plan.place, ElementsAre(0, 0, 1, 1, 0));
  EXPECT_EQ(plan.rail_peer(3, 0), 2u);
  EXPECT_EQ(plan.rail_peer(3, 2), 4u);
}

// Rank 1 maps both others, which do not map each other: nobody makes a domain with anybody.
TEST(TwoLevelPlan, DomainsAreOfRanksThatAllMapEachOther) {
  const DomainPlan plan = plan_domains({{0b011}, {0b111}, {0b110}});
  EXPECT_THAT(plan.domain, ElementsAre(0, 1, 2));
}

// Every rank has one rail peer in each other domain, which has a ring of its own for it.
TEST(TwoLevelPlan, EveryRankHasItsRingAtEveryRailPeer) {
  for (const std::vector<uint32_t>& nodes :
       {std::vector<uint32_t>{0, 1, 2}, {0, 0, 0, 1}, {0, 1, 1, 1, 1, 2, 2}, {0, 0, 1, 2, 2, 2, 3, 3}}) {
    const DomainPlan plan = domains_of(nodes);
    for (uint32_t rank = 0; rank < nodes.size(); ++rank)
      for (uint32_t domain = 0; domain < plan.count; ++domain) {
        if (domain == plan.domain[rank]) continue;
        const std::vector<uint32_t> sources = plan.sources_of(plan.rail_peer(rank, domain));
        const uint32_t number = plan.numbers_of(rank)[domain];
        ASSERT_LT(number, plan.most_sources);
        EXPECT_EQ(sources.at(number), rank);
      }
  }
}

TEST(TwoLevelPlan, RingsOfManyRanksStayWithinTheirShareOfMemory) {
  std::vector<uint32_t> nodes(64);
  for (uint32_t rank = 0; rank < nodes.size(); ++rank) nodes[rank] = rank / 8;
  for (const ComputeLimits& limits : {kHost, kH200}) {
    const TwoLevelControl control = plan_two_level(4096, 1024, domains_of(nodes), limits);
    EXPECT_GE(control.offsets.slot_bytes, 64u << 10);
    EXPECT_EQ(control.offsets.slot_bytes % 4096, 0u);
    EXPECT_GE(control.offsets.domain_rings, 4096u);
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
  const DomainPlan domains = domains_of({0, 0, 1, 1, 2, 2});
  const TwoLevelGrid dispatch = plan_two_level_dispatch(6, domains, 32, 14336, 20, kH200);
  EXPECT_LE(dispatch.batch_warps.first + dispatch.batch_warps.count, dispatch.grid.threads_per_block / 32);
  EXPECT_LE(dispatch.grid.shared_bytes, kH200.shared_bytes);
  EXPECT_GE(dispatch.grid.shared_bytes - dispatch.states_at,
            ring_states_bytes(domains.count, domains.most_sources, 32, 20, dispatch.batch_warps.count));
  const TwoLevelGrid combine = plan_two_level_combine(domains, 2, 0, kHost);
  EXPECT_EQ(combine.grid.threads_per_block, kHost.host_threads);
  EXPECT_EQ(combine.batch_warps.count, kHost.host_threads);
}

}  // namespace
}  // namespace weft
