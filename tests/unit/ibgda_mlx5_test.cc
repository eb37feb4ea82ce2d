// SPDX-License-Identifier: Apache-2.0
//
// The set-up of mlx5 NICs: what is missing is named. That it makes queues that work: the channel suite over Mlx5Fixture.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/fixtures.h"
#include "transports/ibgda/mlx5_nic.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Mlx5Fixture;
using testing::Settings;

class IbgdaMlx5 : public ::testing::Test {
 protected:
  void SetUp() override { Mlx5Fixture::set_up(); }
  void TearDown() override { Mlx5Fixture::tear_down(); }
  static std::string missing() { return ibgda::nic_source().find(Device{}).unusable_because; }
};

TEST_F(IbgdaMlx5, WhatIsMissingIsNamed) {
  EXPECT_EQ(missing(), "");
  EXPECT_THAT(ibgda::nic_source().find(Device{}).details, HasSubstr("RoCE on fake0 port 2"));
  Mlx5Fixture::fake()->be_of_another_family();
  EXPECT_THAT(missing(), AllOf(HasSubstr("fake0: not of the mlx5 family"), HasSubstr("fake1: not of")));
  const Status none(Code::kUnsupported, "libmlx5: not there");
  ibgda::Mlx5Nics without(Mlx5Fixture::fake()->verbs(), none);
  EXPECT_EQ(without.find(Device{}).unusable_because, "libmlx5: not there");
  EXPECT_EQ(without.open(Device{}).status().message(), "libmlx5: not there");
}

TEST_F(IbgdaMlx5, NicsAndPortsAreChosenAsTheSettingsSay) {
  Settings::set({{"WEFT_PROXY_NICS", "fake1"}});
  EXPECT_THAT(ibgda::nic_source().find(Device{}).details, HasSubstr("fake1"));
  Settings::set({{"WEFT_PROXY_NICS", "fake7"}});
  EXPECT_THAT(missing(), HasSubstr("fake0: not in WEFT_PROXY_NICS"));
  Settings::clear({"WEFT_PROXY_NICS"});
  Settings::set({{"WEFT_IB_PORT", "1"}});
  EXPECT_THAT(missing(), HasSubstr("port 1 (WEFT_IB_PORT) is not active"));
  Settings::clear({"WEFT_IB_PORT"});
}

TEST_F(IbgdaMlx5, AKernelThatMindsOverrunIsNamed) {
  Mlx5Fixture::fake()->refuse_overrun_flag();
  testing::run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{}, 20, "ibgda");
    EXPECT_THAT(comm.status().message(),
                HasSubstr("making a completion queue that ignores overrun on fake0"));
  });
}

// Both are made anew: completions of a queue keep their count when it is reset.
TEST_F(IbgdaMlx5, AQueueBeginsAnew) {
  auto nic = ibgda::nic_source().open(Device{});
  ASSERT_EQ(nic.status().message(), "");
  auto a = (*nic)->create_queue(16), b = (*nic)->create_queue(16);
  ASSERT_TRUE(a.ok() && b.ok());
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ((*a)->connect((*b)->address()).message(), "");
    ASSERT_EQ((*b)->connect((*a)->address()).message(), "");
    EXPECT_GE((*a)->memory().entries, (*a)->memory().blocks);
    ASSERT_EQ((*a)->reset().message(), "");
    ASSERT_EQ((*b)->reset().message(), "");
  }
  EXPECT_EQ((*a)->connect("nonsense").code(), Code::kInvalid);
}

}  // namespace
}  // namespace weft
