// SPDX-License-Identifier: Apache-2.0
//
// Ranks as threads of this process over a model of the NIC, on GPUs or on the CPU: for ibgda_gpu_*.cc. The
// CPU runs the same as GPUs, shorter: a mistake of a test shows without a GPU.
// Every wait is bounded by kTimeout_s. Lines "result NAME VALUE" are for tests/gpu/test_ibgda_gpu.py.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "base/cuda_driver.h"
#include "conformance/fixtures.h"
#include "jit/mesh_launch.h"
#include "jit/toolchain.h"
#include "measure/loops/channel_loop.h"
#include "memory/local_memory.h"
#include "support/channel_replay.cuh"
#include "support/fake_devx.h"
#include "support/far_memory.h"
#include "support/places.h"

namespace weft::testing {

inline constexpr double kTimeout_s = 30;
inline constexpr uint64_t kRoom = 1 << 20;

inline void result(const std::string& name, double value) {
  std::printf("result %s %.6g\n", name.c_str(), value);
}

struct Where {
  const char* name;
  bool has_gpus;
  uint32_t divisor;  // of the work
  bool is_far;       // queues lie in memory of the device, and the model copies
  bool has_windows;  // ... and windows, too
};
inline void PrintTo(const Where& where, std::ostream* out) {
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
    set_toolchain({"", {}, testing::kDeviceDir});
    result("gpus", gpus_);
    result("ranks_per_gpu", gpus_ < 2 ? 2 : 1);
  }
  void TearDown() override {
    EXPECT_EQ(model_ ? model_->failures() : "", "");
    ibgda::set_nic_source(nullptr);
    Settings::clear({"WEFT_IBGDA_DEPTH", "WEFT_RANKS_PER_NODE"});
  }
  void use(NicPlan plan, const char* depth) {
    Settings::set({{"WEFT_IBGDA_DEPTH", depth}});
    if (GetParam().is_far) {
      plan.rooms = [](Device device) -> Result<std::unique_ptr<ibgda::QueueRooms>> {
        if (!device.is_host()) return ibgda::cuda_rooms(device);
        return std::unique_ptr<ibgda::QueueRooms>(std::make_unique<FileRooms>());
      };
    }
    if (GetParam().has_windows) {
      plan.windows = [](Device device) -> Result<std::shared_ptr<FarMemory>> {
        if (!device.is_host()) return gpu_memory(device);
        return file_memory(own_memory_file());
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
  void on_ranks(Body body, int ranks = 2, const char* transport = "ibgda") {
    run_thread_ranks(ranks, [&](std::shared_ptr<Bootstrap> boot) {
      auto comm = Communicator::create(boot, device_of(boot->rank()), kTimeout_s, transport);
      ASSERT_EQ(comm.status().message(), "");
      ASSERT_EQ((*comm)->sharing(), sharing());
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
  Sharing sharing() const {
    if (!GetParam().has_gpus) return Sharing::kHostMemory;
    return GetParam().has_windows ? Sharing::kCudaVmm : Sharing::kCudaPinned;
  }
  // Ranks that share a GPU, of so many.
  uint32_t ranks_of_a_gpu(uint32_t ranks) const {
    const auto gpus = static_cast<uint32_t>(std::max(1, gpus_));
    return (ranks + gpus - 1) / gpus;
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

// ---- graphs

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

  Replays(std::shared_ptr<Communicator> comm, int rank, int peer)
      : comm_(std::move(comm)), device_(comm_->device()) {
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
        static_cast<uint32_t>(peer),
        0};
  }

  void on_host(uint64_t count) {
    EXPECT_TRUE(comm_->barrier().ok());
    const bool is_mixed = comm_->mapped_ranks().size() > 1;
    is_mixed ? launch_on_host<HybridMesh<MappedMesh, IbgdaMesh>>(count) : launch_on_host<IbgdaMesh>(count);
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
    EXPECT_TRUE(wait_until(Deadline::after_s(kTimeout_s), [&] { return word(kAddedAt) >= launches; }));
    EXPECT_EQ(word(kAddedAt), launches) << "rank " << rank;
    EXPECT_EQ(word(kSignalAt), launches) << "rank " << rank;
  }
  const Window& window() const { return *window_; }

 private:
  template <class MeshT>
  void launch_on_host(uint64_t count) {
    const auto mesh = mesh_of<MeshT>(*window_);
    for (uint64_t i = 0; i < count; ++i) channel_replay(args_, mesh, ChannelReplayShape{});
  }
  uint64_t word(uint64_t at) const {
    const std::byte* from = window_->local() + at;
    if (comm_->sharing() != Sharing::kCudaVmm) return load_acquire(reinterpret_cast<const uint64_t*>(from));
    uint64_t value = 0;
    EXPECT_TRUE(copy_from_device(device_.ordinal, &value, from, sizeof value).ok());
    return value;
  }

  const std::shared_ptr<Communicator> comm_;
  const Device device_;
  std::unique_ptr<Window> window_;
  std::unique_ptr<LocalMemory> rounds_;
  std::unique_ptr<HostVisible> seen_;
  ChannelReplayArgs args_{};
};

}  // namespace weft::testing
