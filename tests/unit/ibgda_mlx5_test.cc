// SPDX-License-Identifier: Apache-2.0
//
// The set-up of mlx5 NICs: what is missing is named, and transports/ibgda/mlx5_abi.h against rdma-core's headers where
// they are installed. That it makes queues that work: the channel suite over Mlx5Fixture.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/fixtures.h"
#include "transports/ibgda/mlx5_nic.h"

#if __has_include(<infiniband/mlx5dv.h>)
#include <infiniband/mlx5dv.h>

namespace weft::ibgda::mlx5 {

#define SAME_PLACE(mine, member, theirs, their_member) \
  static_assert(offsetof(mine, member) == offsetof(theirs, their_member))

static_assert(sizeof(CqInitAttr) == sizeof(ibv_cq_init_attr_ex));
SAME_PLACE(CqInitAttr, entries, ibv_cq_init_attr_ex, cqe);
SAME_PLACE(CqInitAttr, comp_mask, ibv_cq_init_attr_ex, comp_mask);
SAME_PLACE(CqInitAttr, flags, ibv_cq_init_attr_ex, flags);
static_assert(kCqMaskFlags == IBV_CQ_INIT_ATTR_MASK_FLAGS &&
              kCqIgnoreOverrun == IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN);
static_assert(sizeof(DirectQp) == sizeof(mlx5dv_qp));
SAME_PLACE(DirectQp, record, mlx5dv_qp, dbrec);
SAME_PLACE(DirectQp, sends.buffer, mlx5dv_qp, sq.buf);
SAME_PLACE(DirectQp, sends.blocks, mlx5dv_qp, sq.wqe_cnt);
SAME_PLACE(DirectQp, sends.stride, mlx5dv_qp, sq.stride);
SAME_PLACE(DirectQp, doorbell.reg, mlx5dv_qp, bf.reg);
SAME_PLACE(DirectQp, comp_mask, mlx5dv_qp, comp_mask);
static_assert(sizeof(DirectCq) == sizeof(mlx5dv_cq));
SAME_PLACE(DirectCq, buffer, mlx5dv_cq, buf);
SAME_PLACE(DirectCq, entries, mlx5dv_cq, cqe_cnt);
SAME_PLACE(DirectCq, entry_bytes, mlx5dv_cq, cqe_size);
SAME_PLACE(DirectCq, comp_mask, mlx5dv_cq, comp_mask);
static_assert(sizeof(Object) == sizeof(mlx5dv_obj));
SAME_PLACE(Object, qp, mlx5dv_obj, qp);
SAME_PLACE(Object, cq, mlx5dv_obj, cq);
static_assert(kObjectQp == MLX5DV_OBJ_QP && kObjectCq == MLX5DV_OBJ_CQ);

}  // namespace weft::ibgda::mlx5
#endif

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
