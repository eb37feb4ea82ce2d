// SPDX-License-Identifier: Apache-2.0
//
// What an exchange's plan promises its kernel, for all kinds, ways and sizes.
#include "plan/collective.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

constexpr uint32_t kBlocks = 128, kRegionUnits = 256;

ComputeLimits gpu() {
  ComputeLimits limits{};
  limits.is_cuda = true;
  limits.max_blocks = 132;
  return limits;
}

ExchangeLayout layout_of(uint32_t ranks) {
  RingOptions options{ranks, 1, {256, 256, 256}};
  options.exchange_blocks = kBlocks;
  options.region_units = kRegionUnits;
  options.stage_units = exchange_stage_units(ranks, true);
  return plan_rings(options).exchange;
}

TEST(ExchangePlan, AreasOfUpToEightRanksTake64Mib) {
  for (uint32_t ranks = 2; ranks <= 64; ++ranks) {
    const uint64_t units = exchange_stage_units(ranks, true);
    EXPECT_EQ(units % 2, 0u) << ranks;
    EXPECT_GE(units, 1024u) << ranks;
    const uint64_t bytes = uint64_t{ranks} * kBlocks * kStageAreas * units * 16;
    if (ranks <= 8) {
      EXPECT_LE(bytes, 64u << 20) << ranks;
      EXPECT_GE(bytes, 55u << 20) << ranks;
    }
  }
}

TEST(ExchangePlan, SlicesFitTheirAreas) {
  for (uint32_t ranks : {2u, 3u, 4u, 5u, 8u, 16u}) {
    const ExchangeLayout layout = layout_of(ranks);
    for (uint32_t number = 0; number < kExchanges; ++number) {
      const auto kind = static_cast<Exchange>(number);
      const bool goes_on = has_shares(kind) && exchange_owners(kind, ranks) > 1;
      for (uint64_t bytes = 16; bytes <= uint64_t{1} << 32; bytes = bytes * 5 + 3) {
        const ExchangePlan plan =
            plan_exchange({kind, bytes, ranks, false, ExchangeWay::kStages}, layout, 0, gpu());
        EXPECT_GE(plan.stage_slice_units, 1u);
        EXPECT_LE(plan.stage_slice_units, layout.stage_units / (goes_on ? 2 : 1)) << number << " " << bytes;
        EXPECT_LE(plan.grid.blocks, kBlocks);
      }
    }
  }
}

TEST(ExchangePlan, OnlyLargeSumsOfFewRanksHaveManyThreads) {
  auto threads = [](Exchange kind, uint64_t bytes, uint32_t ranks, ExchangeWay way) {
    return plan_exchange({kind, bytes, ranks, false, way}, layout_of(ranks), 0, gpu()).grid.threads_per_block;
  };
  constexpr uint64_t kLarge = 64 << 20, kSmall = 1 << 20;
  for (Exchange kind : {Exchange::kAllReduce, Exchange::kReduceScatter, Exchange::kReduce}) {
    for (ExchangeWay way : {ExchangeWay::kStages, ExchangeWay::kPlaces}) {
      EXPECT_EQ(threads(kind, kLarge, 2, way), 512u);
      EXPECT_EQ(threads(kind, kLarge, 4, way), 512u);
      EXPECT_EQ(threads(kind, kLarge, 8, way), 256u);
      EXPECT_EQ(threads(kind, kSmall, 2, way), 256u);
    }
    EXPECT_EQ(threads(kind, kLarge, 2, ExchangeWay::kLines), 256u);
  }
  EXPECT_EQ(threads(Exchange::kAllGather, kLarge, 2, ExchangeWay::kStages), 256u);
}

}  // namespace
}  // namespace weft
