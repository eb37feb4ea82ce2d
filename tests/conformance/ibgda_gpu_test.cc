// SPDX-License-Identifier: Apache-2.0
//
// GPUs that write queues in pinned memory of the host, or in their own, which a model of the NIC serves: what a GPU's stores look like from
// outside, in which order, and what posting costs it. Two ranks are threads of this process, each with a GPU, or both
// with the only one. Their windows lie in pinned memory or in the GPU's own, too.
#include <chrono>
#include <optional>
#include <thread>

#include "conformance/ibgda_gpu.h"
#include "kernels/low_latency_rounds.h"
#include "plan/low_latency.h"
#include "support/posting_floor.cuh"

namespace weft {
namespace {

using namespace weft::testing;  // NOLINT(google-build-using-namespace)

// A million calls through 16 entries, of every kind; launches go on where the last one stopped.
TEST_P(IbgdaPosts, AMillionOperationsArriveInOrder) {
  use({.seed = 71, .passes = 0.05}, "16");
  const auto start = std::chrono::steady_clock::now();
  const ChannelLoad loads[] = {{ChannelCall::kPutWithSignal, ChannelWay::kRoundTrip, 256, times(5000), 2},
                               {ChannelCall::kAdd, ChannelWay::kRoundTrip, 0, times(5000), 2},
                               {ChannelCall::kPutWithSignal, ChannelWay::kOneWay, 256, times(40'000), 8},
                               {ChannelCall::kSignal, ChannelWay::kOneWay, 0, times(40'000), 6},
                               {ChannelCall::kAdd, ChannelWay::kOneWay, 0, times(40'000), 6},
                               {ChannelCall::kPut, ChannelWay::kOneWay, 1024, times(40'000), 5},
                               {ChannelCall::kPutFlush, ChannelWay::kOneWay, 256, times(2000), 2}};
  on_loops([&](ChannelLoop& loop, int rank) {
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
  uint64_t operations = 0;
  for (const ChannelLoad& load : loads)
    operations += uint64_t{load.count} * load.repeats *
                  (load.way == ChannelWay::kRoundTrip || load.call == ChannelCall::kPutFlush ? 2 : 1);
  EXPECT_GE(operations, 1'000'000u / GetParam().divisor);
  result("million.operations", static_cast<double>(operations));
  result("million.entries", static_cast<double>(model_->entries()));
  result("million.seconds", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

// A put that takes eight entries, and its signal: nine entries, one doorbell. Rendezvous have one of each.
TEST_P(IbgdaPosts, ABatchRingsOnce) {
  use({.seed = 73, .put_shift = 9}, "64");
  on_loops([&](ChannelLoop& loop, int rank) {
    const ChannelLoad load{ChannelCall::kPutWithSignal, ChannelWay::kOneWay, 4096, times(2000), 3};
    const Posted before = posted(loop.window(), rank);
    ASSERT_EQ(loop.run(load).status().message(), "") << "rank " << rank;
    const Posted after = posted(loop.window(), rank);
    const uint64_t calls = rank == 0 ? uint64_t{load.count} * load.repeats : 0, rendezvous = 2 * load.repeats;
    EXPECT_EQ(after.entries - before.entries, 9 * calls + rendezvous);
    EXPECT_EQ(after.doorbells - before.doorbells, calls + rendezvous);
    if (rank != 0) return;
    result("batches.calls", static_cast<double>(calls));
    result("batches.entries_of_a_call", 9);
    result("batches.doorbells_of_a_call",
           static_cast<double>(after.doorbells - before.doorbells - rendezvous) / static_cast<double>(calls));
  });
}

// Time of the device alone. `fresh`: a queue whose places nobody has used yet. `lasting`: places that were used, whose
// completions are there: the model is done before the next repetition begins, so nobody waits for it.
TEST_P(IbgdaPosts, WhatPostingCosts) {
  struct Case {
    const char* name;
    ChannelCall call;
    uint32_t count, repeats, skipped;
    uint64_t bytes = 256;
    uint32_t put_shift = 30;
  };
  constexpr Case kCases[] = {{"put_with_signal_256B.fresh", ChannelCall::kPutWithSignal, 2000, 7, 0},
                             {"put_with_signal_256B.lasting", ChannelCall::kPutWithSignal, 8000, 9, 2},
                             {"put_value.fresh", ChannelCall::kSignal, 4000, 7, 0},
                             {"put_value.lasting", ChannelCall::kSignal, 16'000, 9, 2},
                             {"batch_of_9.fresh", ChannelCall::kPutWithSignal, 500, 7, 0, 4096, 9}};
  for (const Case& one : kCases) {
    use({.seed = 72, .passes = 0, .put_shift = one.put_shift}, "32768");
    on_loops([&](ChannelLoop& loop, int rank) {
      const uint32_t calls = times(one.count);
      auto seconds = loop.run({one.call, ChannelWay::kPosting, one.bytes, calls, one.repeats});
      ASSERT_EQ(seconds.status().message(), "") << "rank " << rank;
      if (rank != 0) return;
      std::vector<double> ns;
      for (size_t i = one.skipped; i < seconds->size(); ++i) ns.push_back((*seconds)[i] * 1e9 / calls);
      std::sort(ns.begin(), ns.end());
      EXPECT_GT(ns.front(), 0);
      EXPECT_LT(ns.back(), 1e9 * kTimeout_s / calls);
      const std::string name = text("posting.{}", one.name);
      result(name + ".median_ns", ns[ns.size() / 2]);
      result(name + ".least_ns", ns.front());
      result(name + ".most_ns", ns.back());
    });
    EXPECT_EQ(model_->failures(), "");
  }
}

// What no call can do without, by the same clock.
TEST_P(IbgdaPosts, WhatItsFencesCost) {
  use({.seed = 75}, "16");
  on_ranks([&](const std::shared_ptr<Communicator>& comm, int rank) {
    const Device device = comm->device();
    auto window = Window::create(comm, 4096);
    auto queue = LocalMemory::create(device, 65 * ibgda::kBlockBytes);
    auto seen = HostVisible::create(device, 2 * sizeof(uint64_t));
    ASSERT_TRUE(window.ok() && queue.ok() && seen.ok());
    const uint32_t is_near = GetParam().has_gpus && GetParam().has_windows;
    const PostingFloorArgs args{(*queue)->at<std::byte>(0),
                                (*queue)->at<uint32_t>(64 * ibgda::kBlockBytes),
                                (*seen)->at<uint64_t>(0),
                                (*seen)->at<uint64_t>(8),
                                2000,
                                is_near,
                                0};
    if (device.is_host()) {
      posting_floor(args, mesh_of<IbgdaMesh>(**window), PostingFloorShape{});
    } else {
      auto stream = OwnStream::create(device.ordinal);
      ASSERT_TRUE(stream.ok());
      Launch how;
      how.threads_per_block = 32;
      how.stream = (*stream)->get();
      const KernelKey key{"tests/support/posting_floor.cuh", "posting_floor", "PostingFloorArgs"};
      const auto kernel = kernel_on_mesh(**window, key, how);
      ASSERT_EQ(kernel.status().message(), "");
      for (int i = 0; i < 2; ++i)
        EXPECT_EQ(launch_on_mesh(**window, **kernel, how, &args, sizeof args, nullptr).message(), "");
      EXPECT_EQ((*stream)->wait().message(), "");
    }
    EXPECT_EQ(*args.doorbell, args.count - 1);
    EXPECT_GT(*args.took_ns, 0u);
    if (rank == 0)
      result("posting.fences_ns", static_cast<double>(*args.took_ns) / static_cast<double>(args.count));
  });
}

// Queues of 8 entries: what a replay finds of them is not what was there when it was captured. Three entries and two
// doorbells a launch.
TEST_P(IbgdaPosts, ReplaysOfAGraphLoseNothing) {
  use({.seed = 74, .passes = 0.1}, "8");
  constexpr uint64_t kPlain = 10;
  const bool has_gpus = GetParam().has_gpus;
  const uint64_t replays_made = has_gpus ? 1000 : 200;
  const uint64_t launches = has_gpus ? replays_made + 2 * kPlain : replays_made;
  on_ranks([&](const std::shared_ptr<Communicator>& comm, int rank) {
    Replays replays(comm, rank, 1 - rank);
    const Posted before = posted(replays.window(), rank);
    has_gpus ? replays.on_gpu(kPlain, replays_made) : replays.on_host(replays_made);
    replays.check(launches, rank);
    const Posted after = posted(replays.window(), rank);
    EXPECT_EQ(after.entries - before.entries, 3 * launches);
    EXPECT_EQ(after.doorbells - before.doorbells, 2 * launches);
    if (rank == 0) result("replays.launches", static_cast<double>(launches));
  });
}

// Two ranks of a node map each other, and reach those of the other node through queues, in one launch and one window.
TEST_P(IbgdaPosts, MappedPeersAndPortsSideBySide) {
  use({.seed = 77, .passes = 0.1}, "8");
  Settings::set({{"WEFT_RANKS_PER_NODE", "2"}});
  const bool has_gpus = GetParam().has_gpus;
  const uint64_t replays_made = has_gpus ? 200 : 100, plain = has_gpus ? 5 : 0;
  on_ranks(
      [&](const std::shared_ptr<Communicator>& comm, int rank) {
        for (const int peer : {rank ^ 1, rank ^ 2}) {
          ASSERT_EQ(std::string_view(comm->transport_to(peer)->name()),
                    peer == (rank ^ 1) ? "mapped" : "ibgda");
          Replays replays(comm, rank, peer);
          has_gpus ? replays.on_gpu(plain, replays_made) : replays.on_host(replays_made);
          replays.check(replays_made + 2 * plain, rank);
          // Who gives memory of a GPU back waits for all that runs there, and the model's copies wait for that.
          ASSERT_TRUE(comm->barrier().ok());
        }
      },
      4, "mapped,ibgda");
}

// Dispatch and combine of a pair of ranks, and of two nodes of two.
TEST_P(IbgdaPosts, LowLatencyRoundsComeBack) {
  std::optional<SharedOnGpus> shared;
  if (GetParam().has_gpus) shared.emplace();
  for (const uint32_t ranks : {2u, 4u}) {
    use({.seed = 78, .passes = 0.1}, "64");
    Settings::set({{"WEFT_RANKS_PER_NODE", ranks == 2 ? "1" : "2"}});
    const Case c{ranks, 512, 4, 8, 9};
    on_ranks(
        [&](const std::shared_ptr<Communicator>& comm, int) {
          auto limits = compute_limits(*comm);
          ASSERT_EQ(limits.status().message(), "");
          limits->max_blocks = std::max(2u, limits->max_blocks / ranks_of_a_gpu(ranks));
          Rank one(comm, low_latency_bytes_with_ports(ranks, region_for(c)), *limits);
          for (uint32_t seed = 0; seed < 3; ++seed) {
            RoundTrip trip(c, one, seed);  // memory comes and goes while nothing runs
            ASSERT_TRUE(comm->barrier().ok());
            ASSERT_EQ(trip.dispatch(kBoth).message(), "");
            trip.check_dispatched();
            ASSERT_TRUE(comm->barrier().ok());
            ASSERT_EQ(trip.combine(kBoth).message(), "");
            trip.check_combined();
            ASSERT_TRUE(comm->barrier().ok());
          }
        },
        static_cast<int>(ranks), "mapped,ibgda");
    EXPECT_EQ(model_->failures(), "");
  }
}

// What would be exported of windows to a NIC: all of a range, also after it has grown. Needs a driver that exports
// memory.
TEST(IbgdaWindows, TheDriverExportsThemAlsoAfterTheyHaveGrown) {
  const auto driver = cuda_driver();
  if (!driver.ok()) GTEST_SKIP() << driver.status().message();
  const Device gpu{Device::Kind::kCuda, 0};
  constexpr uint64_t kSegment = 2 << 20;
  auto rooms = ibgda::cuda_rooms(gpu);
  auto range = make_range({gpu, Sharing::kCudaVmm, 4 * kSegment, 4 * kSegment});
  ASSERT_TRUE(rooms.ok() && range.ok());
  result("windows.ordered", (*rooms)->no_order().empty());
  for (uint64_t segment = 1; segment <= 3; ++segment) {
    ASSERT_EQ((*range)->extend(kSegment).status().message(), "");
    const Status exported = (*rooms)->export_file((*range)->base(), (*range)->bytes()).status();
    if (segment == 1 && !exported.ok()) GTEST_SKIP() << exported.message();
    EXPECT_EQ(exported.message(), "") << "with " << segment << " segments";
    result("windows.segments_exported", static_cast<double>(segment));
  }
}

INSTANTIATE_TEST_SUITE_P(Ibgda, IbgdaPosts,
                         ::testing::Values(Where{"host", false, 100, false, false},
                                           Where{"host_copies", false, 100, true, true},
                                           Where{"gpus", true, 1, false, false},
                                           Where{"gpus_own", true, 20, true, false},
                                           Where{"gpus_windows", true, 20, true, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace weft
