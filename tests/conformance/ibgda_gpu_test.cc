// SPDX-License-Identifier: Apache-2.0
//
// GPUs that write queues in pinned memory of the host, or in their own, which a model of the NIC serves: what a GPU's stores look like from
// outside, in which order, and what posting costs it. Two ranks are threads of this process, each with a GPU, or both
// with the only one. The CPU runs the same, shorter: a mistake of the test shows without a GPU.
// Every wait is bounded by kTimeout_s. Lines "result NAME VALUE" are for tests/gpu/test_ibgda_gpu.py.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "base/cuda_driver.h"
#include "conformance/fixtures.h"
#include "jit/mesh_launch.h"
#include "jit/toolchain.h"
#include "measure/channel_loop.h"
#include "memory/local_memory.h"
#include "support/channel_replay.cuh"
#include "support/fake_devx.h"
#include "support/posting_floor.cuh"

namespace weft {
namespace {

using testing::mesh_of;
using testing::NicModel;
using testing::NicPlan;
using testing::run_thread_ranks;
using testing::Settings;

constexpr double kTimeout_s = 30;
constexpr uint64_t kRoom = 1 << 20;

void result(const std::string& name, double value) {
  std::printf("result %s %.6g\n", name.c_str(), value);
}

struct Where {
  const char* name;
  bool has_gpus;
  uint32_t divisor;  // of the work
  bool is_far;       // queues lie in memory of the device, and the model copies
};
void PrintTo(const Where& where, std::ostream* out) {
  *out << where.name;
}

// What device code has kept of the queue from here to the other rank.
struct Posted {
  uint64_t entries, doorbells;
};

class IbgdaPosts : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    if (GetParam().is_far) GTEST_SKIP() << "copies are no atomic accesses";
#endif
    if (!GetParam().has_gpus) return;
    const auto driver = cuda_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    gpus_ = (*driver)->device_count;
    set_toolchain({"", {}, WEFT_SOURCE_DIR});
    result("gpus", gpus_);
    result("ranks_per_gpu", gpus_ < 2 ? 2 : 1);
  }
  void TearDown() override {
    EXPECT_EQ(model_ ? model_->failures() : "", "");
    ibgda::set_nic_source(nullptr);
    Settings::clear({"WEFT_IBGDA_DEPTH"});
  }
  void use(NicPlan plan, const char* depth) {
    Settings::set({{"WEFT_IBGDA_DEPTH", depth}});
    if (GetParam().is_far) {
      plan.rooms = [](Device device) -> Result<std::unique_ptr<ibgda::QueueRooms>> {
        if (!device.is_host()) return ibgda::cuda_rooms(device);
        return std::unique_ptr<ibgda::QueueRooms>(std::make_unique<testing::FileRooms>());
      };
    }
    model_ = std::make_unique<NicModel>(plan);
    ibgda::set_nic_source(model_.get());
  }
  Device device_of(int rank) const {
    return GetParam().has_gpus ? Device{Device::Kind::kCuda, rank % gpus_} : Device{};
  }
  // Of something that is done `count` times on GPUs.
  uint32_t times(uint32_t count) const { return std::max(1u, count / GetParam().divisor); }

  template <class Body>
  void on_ranks(Body body) {
    run_thread_ranks(2, [&](std::shared_ptr<Bootstrap> boot) {
      auto comm = Communicator::create(boot, device_of(boot->rank()), kTimeout_s, "ibgda");
      ASSERT_EQ(comm.status().message(), "");
      body(*comm, boot->rank());
      EXPECT_EQ((*comm)->port_link()->status().message(), "");
      EXPECT_TRUE((*comm)->barrier().ok());
    });
  }
  template <class Body>
  void on_loops(Body body) {
    on_ranks([&](const std::shared_ptr<Communicator>& comm, int rank) {
      auto loop = ChannelLoop::create(comm, kRoom);
      ASSERT_EQ(loop.status().message(), "");
      body(**loop, rank);
    });
  }
  static void read(Device device, void* to, const void* from, size_t bytes) {
    if (device.is_host())
      std::memcpy(to, from, bytes);
    else
      EXPECT_TRUE(copy_from_device(device.ordinal, to, static_cast<const std::byte*>(from), bytes).ok());
  }
  static Posted posted(const Window& window, int rank) {
    const Device device = window.communicator()->device();
    ibgda::Queue queue{};
    ibgda::QueueState state{};
    read(device, &queue, mesh_of<IbgdaMesh>(window).queues + (1 - rank), sizeof queue);
    read(device, &state, queue.state, sizeof state);
    EXPECT_EQ(state.is_broken, 0u);
    return {state.published, state.rung};
  }
  std::unique_ptr<NicModel> model_;
  int gpus_ = 0;
};

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

// A put that takes eight entries, and its signal: nine entries, one doorbell. Meetings have one of each.
TEST_P(IbgdaPosts, ABatchRingsOnce) {
  use({.seed = 73, .put_shift = 9}, "64");
  on_loops([&](ChannelLoop& loop, int rank) {
    const ChannelLoad load{ChannelCall::kPutWithSignal, ChannelWay::kOneWay, 4096, times(2000), 3};
    const Posted before = posted(loop.window(), rank);
    ASSERT_EQ(loop.run(load).status().message(), "") << "rank " << rank;
    const Posted after = posted(loop.window(), rank);
    const uint64_t calls = rank == 0 ? uint64_t{load.count} * load.repeats : 0, meetings = 2 * load.repeats;
    EXPECT_EQ(after.entries - before.entries, 9 * calls + meetings);
    EXPECT_EQ(after.doorbells - before.doorbells, calls + meetings);
    if (rank != 0) return;
    result("batches.calls", static_cast<double>(calls));
    result("batches.entries_of_a_call", 9);
    result("batches.doorbells_of_a_call",
           static_cast<double>(after.doorbells - before.doorbells - meetings) / static_cast<double>(calls));
  });
}

// Time of the device alone. `fresh`: a queue whose places nobody has used yet. `lasting`: places that were used, whose
// completions are there: the model is done before the next repetition begins, so nobody waits for it.
TEST_P(IbgdaPosts, WhatPostingCosts) {
  struct Case {
    const char* name;
    ChannelCall call;
    uint32_t count, repeats, skipped;
  };
  constexpr Case kCases[] = {{"put_with_signal_256B.fresh", ChannelCall::kPutWithSignal, 2000, 7, 0},
                             {"put_with_signal_256B.lasting", ChannelCall::kPutWithSignal, 8000, 9, 2},
                             {"put_value.fresh", ChannelCall::kSignal, 4000, 7, 0},
                             {"put_value.lasting", ChannelCall::kSignal, 16'000, 9, 2}};
  for (const Case& one : kCases) {
    use({.seed = 72, .passes = 0}, "32768");
    on_loops([&](ChannelLoop& loop, int rank) {
      const uint32_t calls = times(one.count);
      auto seconds = loop.run({one.call, ChannelWay::kPosting, 256, calls, one.repeats});
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
    const PostingFloorArgs args{(*queue)->at<std::byte>(0), (*queue)->at<uint32_t>(64 * ibgda::kBlockBytes),
                                (*seen)->at<uint64_t>(0), (*seen)->at<uint64_t>(8), 2000};
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

// ---- graphs

using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

// What only this test asks of the driver.
struct GraphCalls {
  CUresult (*begin)(CUstream, int mode) = nullptr;
  CUresult (*end)(CUstream, CUgraph*) = nullptr;
  CUresult (*instantiate)(CUgraphExec*, CUgraph, unsigned long long flags) = nullptr;
  CUresult (*launch)(CUgraphExec, CUstream) = nullptr;
  CUresult (*destroy_exec)(CUgraphExec) = nullptr;
  CUresult (*destroy)(CUgraph) = nullptr;

  static GraphCalls find() {
    GraphCalls calls;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto get = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      EXPECT_NE(function, nullptr) << name;
    };
    get(calls.begin, "cuStreamBeginCapture_v2");
    get(calls.end, "cuStreamEndCapture");
    get(calls.instantiate, "cuGraphInstantiateWithFlags");
    get(calls.launch, "cuGraphLaunch");
    get(calls.destroy_exec, "cuGraphExecDestroy");
    get(calls.destroy, "cuGraphDestroy");
    return calls;
  }
};

// One rank's side: memory that launches count in, and the launch.
class Replays {
 public:
  static constexpr uint64_t kSignalAt = 0, kAddedAt = 128, kSourceAt = 4096, kDataAt = 8192, kBytes = 1024;

  Replays(std::shared_ptr<Communicator> comm, int rank) : comm_(std::move(comm)), device_(comm_->device()) {
    auto window = Window::create(comm_, 16384);
    auto rounds = LocalMemory::create(device_, sizeof(uint64_t));
    auto seen = HostVisible::create(device_, sizeof(FaultBox) + sizeof(uint64_t));
    EXPECT_TRUE(window.ok() && rounds.ok() && seen.ok());
    window_ = std::move(*window);
    rounds_ = std::move(*rounds);
    seen_ = std::move(*seen);
    args_ = {
        {static_cast<uint64_t>(kTimeout_s * 1e9), seen_->at<FaultBox>(0), static_cast<uint32_t>(rank), 0},
        rounds_->at<uint64_t>(0),
        seen_->at<uint64_t>(sizeof(FaultBox)),
        kSignalAt,
        kAddedAt,
        kSourceAt,
        kDataAt,
        kBytes,
        static_cast<uint32_t>(1 - rank),
        0};
  }

  void on_host(uint64_t count) {
    const auto mesh = mesh_of<IbgdaMesh>(*window_);
    EXPECT_TRUE(comm_->barrier().ok());
    for (uint64_t i = 0; i < count; ++i) channel_replay(args_, mesh, ChannelReplayShape{});
  }

  // `plain` launches, a graph of one that is replayed `count` times, and `plain` again.
  void on_gpu(uint64_t plain, uint64_t count) {
    const GraphCalls graphs = GraphCalls::find();
    ASSERT_FALSE(::testing::Test::HasFailure());
    auto stream = OwnStream::create(device_.ordinal);
    auto entered = CudaContext::enter(device_.ordinal);
    ASSERT_TRUE(stream.ok() && entered.ok());
    auto* raw = static_cast<CUstream>((*stream)->get());
    Launch how;
    how.threads_per_block = 32;
    how.stream = raw;
    const KernelKey key{"tests/support/channel_replay.cuh", "channel_replay", "ChannelReplayArgs"};
    const auto kernel = kernel_on_mesh(*window_, key, how);
    ASSERT_EQ(kernel.status().message(), "");
    const auto launch = [&] {
      const Status launched = launch_on_mesh(*window_, **kernel, how, &args_, sizeof args_, nullptr);
      EXPECT_EQ(launched.message(), "");
    };
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    ASSERT_EQ(graphs.begin(raw, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    launch();
    ASSERT_EQ(graphs.end(raw, &graph), CUDA_SUCCESS);
    ASSERT_EQ(graphs.instantiate(&exec, graph, 0), CUDA_SUCCESS);
    ASSERT_TRUE(comm_->barrier().ok());
    for (uint64_t i = 0; i < plain; ++i) launch();
    for (uint64_t i = 0; i < count; ++i) EXPECT_EQ(graphs.launch(exec, raw), CUDA_SUCCESS);
    for (uint64_t i = 0; i < plain; ++i) launch();
    EXPECT_EQ((*stream)->wait().message(), "");
    graphs.destroy_exec(exec);
    graphs.destroy(graph);
  }

  // After so many launches of both ranks.
  void check(uint64_t launches, int rank) {
    const auto* fault = seen_->at<FaultBox>(0);
    EXPECT_EQ(fault->raised, 0u) << "rank " << rank << ", waited for " << fault->peer << ": expected "
                                 << fault->expected << ", saw " << fault->seen;
    EXPECT_EQ(*args_.wrong, 0u) << "rank " << rank;
    const auto* signal = reinterpret_cast<const uint64_t*>(window_->local() + kSignalAt);
    const auto* added = reinterpret_cast<const uint64_t*>(window_->local() + kAddedAt);
    EXPECT_TRUE(wait_until(Deadline::after_s(kTimeout_s), [&] { return load_acquire(added) >= launches; }));
    EXPECT_EQ(load_acquire(added), launches) << "rank " << rank;
    EXPECT_EQ(load_acquire(signal), launches) << "rank " << rank;
  }
  const Window& window() const { return *window_; }

 private:
  const std::shared_ptr<Communicator> comm_;
  const Device device_;
  std::unique_ptr<Window> window_;
  std::unique_ptr<LocalMemory> rounds_;
  std::unique_ptr<HostVisible> seen_;
  ChannelReplayArgs args_{};
};

// Queues of 8 entries: what a replay finds of them is not what was there when it was captured. Three entries and two
// doorbells a launch.
TEST_P(IbgdaPosts, ReplaysOfAGraphLoseNothing) {
  use({.seed = 74, .passes = 0.1}, "8");
  constexpr uint64_t kPlain = 10;
  const bool has_gpus = GetParam().has_gpus;
  const uint64_t replays_made = has_gpus ? 1000 : 200;
  const uint64_t launches = has_gpus ? replays_made + 2 * kPlain : replays_made;
  on_ranks([&](const std::shared_ptr<Communicator>& comm, int rank) {
    Replays replays(comm, rank);
    const Posted before = posted(replays.window(), rank);
    has_gpus ? replays.on_gpu(kPlain, replays_made) : replays.on_host(replays_made);
    replays.check(launches, rank);
    const Posted after = posted(replays.window(), rank);
    EXPECT_EQ(after.entries - before.entries, 3 * launches);
    EXPECT_EQ(after.doorbells - before.doorbells, 2 * launches);
    if (rank == 0) result("replays.launches", static_cast<double>(launches));
  });
}

INSTANTIATE_TEST_SUITE_P(Ibgda, IbgdaPosts,
                         ::testing::Values(Where{"host", false, 100, false},
                                           Where{"host_copies", false, 100, true},
                                           Where{"gpus", true, 1, false}, Where{"gpus_own", true, 20, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace weft
