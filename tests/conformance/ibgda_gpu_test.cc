// SPDX-License-Identifier: Apache-2.0
//
// Two GPUs that write queues in pinned memory of the host, which a model of the NIC serves: what a GPU's stores look like
// from outside, in which order, and what posting costs it. The ranks are threads, each with a GPU of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "base/cuda_driver.h"
#include "conformance/fixtures.h"
#include "jit/toolchain.h"
#include "measure/channel_loop.h"

namespace weft {
namespace {

using testing::NicModel;
using testing::NicPlan;
using testing::run_thread_ranks;
using testing::Settings;

constexpr double kTimeout_s = 60;
constexpr uint64_t kRoom = 1 << 20;

class IbgdaGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto driver = cuda_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    if ((*driver)->device_count < 2)
      GTEST_SKIP() << "needs two GPUs, this machine has " << (*driver)->device_count;
    set_toolchain({"", {}, WEFT_SOURCE_DIR});
  }
  void TearDown() override {
    EXPECT_EQ(model_ ? model_->failures() : "", "");
    ibgda::set_nic_source(nullptr);
    Settings::clear({"WEFT_IBGDA_DEPTH"});
  }
  void use(NicPlan plan, const char* depth) {
    Settings::set({{"WEFT_IBGDA_DEPTH", depth}});
    model_ = std::make_unique<NicModel>(plan);
    ibgda::set_nic_source(model_.get());
  }
  template <class Body>
  static void on_gpus(Body body) {
    run_thread_ranks(2, [&](std::shared_ptr<Bootstrap> boot) {
      const Device device{Device::Kind::kCuda, boot->rank()};
      auto comm = Communicator::create(boot, device, kTimeout_s, "ibgda");
      ASSERT_EQ(comm.status().message(), "");
      auto loop = ChannelLoop::create(*comm, kRoom);
      ASSERT_EQ(loop.status().message(), "");
      body(**loop, boot->rank());
      EXPECT_EQ((*comm)->port_link()->status().message(), "");
      EXPECT_TRUE((*comm)->barrier().ok());
    });
  }
  std::unique_ptr<NicModel> model_;
};

// A million calls through 16 entries, of every kind; launches go on where the last one stopped.
TEST_F(IbgdaGpu, AMillionOperationsArriveInOrder) {
  use({.seed = 71, .passes = 0.05}, "16");
  on_gpus([](ChannelLoop& loop, int rank) {
    const ChannelLoad loads[] = {{ChannelCall::kPutWithSignal, ChannelWay::kRoundTrip, 256, 5000, 2},
                                 {ChannelCall::kAdd, ChannelWay::kRoundTrip, 0, 5000, 2},
                                 {ChannelCall::kPutWithSignal, ChannelWay::kOneWay, 256, 40'000, 8},
                                 {ChannelCall::kSignal, ChannelWay::kOneWay, 0, 40'000, 6},
                                 {ChannelCall::kAdd, ChannelWay::kOneWay, 0, 40'000, 6},
                                 {ChannelCall::kPut, ChannelWay::kOneWay, 1024, 40'000, 5},
                                 {ChannelCall::kPutFlush, ChannelWay::kOneWay, 256, 2000, 2}};
    uint64_t added = 0;
    for (const ChannelLoad& load : loads) {
      const auto seconds = loop.run(load);
      ASSERT_EQ(seconds.status().message(), "") << "rank " << rank;
      const bool adds = load.call == ChannelCall::kAdd && (load.way == ChannelWay::kRoundTrip || rank == 1);
      added += adds ? uint64_t{load.count} * load.repeats : 0;
      const auto there = loop.added();
      ASSERT_EQ(there.status().message(), "") << "rank " << rank;
      EXPECT_EQ(*there, added);
    }
  });
  std::printf("entries %llu\n", static_cast<unsigned long long>(model_->entries()));
}

// The queue is deep enough that no call waits for the NIC.
TEST_F(IbgdaGpu, WhatPostingCosts) {
  use({.seed = 72, .passes = 0}, "32768");
  on_gpus([](ChannelLoop& loop, int rank) {
    constexpr uint32_t kCalls = 4000;
    for (ChannelCall call : {ChannelCall::kPutWithSignal, ChannelCall::kSignal}) {
      auto seconds = loop.run({call, ChannelWay::kPosting, 256, kCalls, 7});
      ASSERT_EQ(seconds.status().message(), "") << "rank " << rank;
      std::sort(seconds->begin(), seconds->end());
      if (rank == 0)
        std::printf("%s: %.0f ns a call, median of 7 x %u calls of one warp (from %.0f to %.0f)\n",
                    call == ChannelCall::kSignal ? "put_value" : "put_with_signal of 256 bytes",
                    (*seconds)[3] * 1e9 / kCalls, kCalls, (*seconds)[0] * 1e9 / kCalls,
                    (*seconds)[6] * 1e9 / kCalls);
    }
  });
}

}  // namespace
}  // namespace weft
