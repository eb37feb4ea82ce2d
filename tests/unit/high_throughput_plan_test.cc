// SPDX-License-Identifier: Apache-2.0
#include "plan/high_throughput.h"

#include <gtest/gtest.h>

#include <utility>

namespace weft {
namespace {

constexpr ComputeLimits kH200{true, 132, 1, 227 * 1024};

TEST(HighThroughputPlan, SmsFillTheLinks) {
  EXPECT_EQ(plan_num_sms(18, 9, kH200), 16);   // H200
  EXPECT_EQ(plan_num_sms(8, 9, kH200), 8);     // fewer links
  EXPECT_EQ(plan_num_sms(12, 8, kH200), 18);   // A100: no bulk copies
  EXPECT_EQ(plan_num_sms(18, 10, kH200), 30);  // B200
  EXPECT_EQ(plan_num_sms(0, 9, kH200), 4);     // PCIe
  EXPECT_EQ(plan_num_sms(-1, 9, kH200), 20);   // nobody can say
}

TEST(HighThroughputPlan, SmsAreThere) {
  constexpr ComputeLimits kSmall{true, 6, 1, 227 * 1024};
  EXPECT_EQ(plan_num_sms(18, 9, kSmall), 6);
  EXPECT_EQ(plan_num_sms(-1, 9, kSmall), 6);
}

TEST(HighThroughputPlan, CombineOfManyRanksTakesHalfAsManySmsAgain) {
  EXPECT_EQ(plan_combine_num_sms(16, 4, 9, kH200), 24);
  EXPECT_EQ(plan_combine_num_sms(16, 3, 9, kH200), 16);
  EXPECT_EQ(plan_combine_num_sms(18, 8, 8, kH200), 18);    // A100: no bulk copies
  EXPECT_EQ(plan_combine_num_sms(30, 8, 10, kH200), 42);   // B200
  EXPECT_EQ(plan_combine_num_sms(120, 4, 9, kH200), 132);  // no more than there are
}

TEST(HighThroughputPlan, LayoutIsOneClusterUpTo4096Tokens) {
  ComputeLimits limits = kH200;
  limits.has_clusters = true;
  const auto clusters = [&](uint64_t tokens) {
    const GridPlan grid = plan_layout(tokens, 8, 256, limits);
    EXPECT_EQ(grid.blocks % grid.blocks_per_cluster, 0u) << tokens;
    return std::pair(grid.blocks, grid.blocks_per_cluster);
  };
  EXPECT_EQ(clusters(0), std::pair(1u, 1u));
  EXPECT_EQ(clusters(512), std::pair(1u, 1u));
  EXPECT_EQ(clusters(513), std::pair(2u, 2u));
  EXPECT_EQ(clusters(1500), std::pair(4u, 4u));  // three would do: a power of two
  EXPECT_EQ(clusters(4096), std::pair(8u, 8u));
  EXPECT_EQ(clusters(4097), std::pair(9u, 1u));
  limits.has_clusters = false;  // A100
  EXPECT_EQ(clusters(513), std::pair(2u, 1u));
}

TEST(HighThroughputPlan, CombineFitsIntoSharedMemory) {
  for (const uint32_t kib : {64u, 99u, 163u, 227u}) {
    const ComputeLimits limits{true, 132, 1, kib * 1024};
    for (const uint32_t ranks : {1u, 2u, 8u, 17u, 72u})
      for (const uint64_t row_bytes : {16u, 4096u, 14336u, 32768u, 14352u}) {
        const uint32_t piece = plan_combine_piece_bytes(row_bytes);
        const GridPlan grid = plan_combine(ranks, piece, 16, limits);
        EXPECT_LE(grid.shared_bytes, limits.shared_bytes)
            << kib << " KiB, " << ranks << " ranks, " << row_bytes;
        EXPECT_EQ(grid.sum_slots != 0, ranks < 4);
        EXPECT_GE(grid.first_role.count, 1u);
        const uint32_t queues =
            grid.sum_slots == 0 ? 0 : grid.second_role.count * queue_bytes(grid.sum_slots);
        EXPECT_EQ(grid.shared_bytes, rows_shared_bytes(ranks, grid.first_role.count, piece) + queues);
      }
  }
}

TEST(HighThroughputPlan, CombineOnHopperHasThreePiecesForEachSumWarp) {
  const uint32_t piece = plan_combine_piece_bytes(14336);
  EXPECT_EQ(piece, 7168u);
  const GridPlan grid = plan_combine(2, piece, 16, kH200);
  EXPECT_EQ(grid.first_role.count, 3u);
  EXPECT_EQ(grid.second_role.count, 12u);
  EXPECT_EQ(grid.watch_role.count, 1u);
  EXPECT_EQ(grid.sum_slots, 3u);
}

}  // namespace
}  // namespace weft
