// SPDX-License-Identifier: Apache-2.0
#include "plan/high_throughput.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace weft
