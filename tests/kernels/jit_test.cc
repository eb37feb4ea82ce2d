// SPDX-License-Identifier: Apache-2.0
//
// Jit on every device of this machine: the host always, and the first GPU where there is one with NVRTC.
#include "jit/jit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "base/cuda_driver.h"
#include "jit/host_kernels.h"
#include "jit/toolchain.h"
#include "kernels/moe/high_throughput_args.h"
#include "support/places.h"
#include "transports/mapped/channel.cuh"

namespace weft {
namespace {

const Device kHost{Device::Kind::kHost, 0};
const Device kGpu{Device::Kind::kCuda, 0};

// Memory of a device, filled from and read back to vectors.
class DeviceMemory {
 public:
  DeviceMemory(Device device, size_t bytes) : device_(device), bytes_(bytes) {
    if (device.is_host()) {
      host_.resize(bytes);
    } else {
      driver_ = *cuda_driver();
      auto current = CudaContext::enter(device.ordinal);
      EXPECT_EQ(driver_->cuMemAlloc(&address_, bytes), CUDA_SUCCESS);
      EXPECT_EQ(driver_->cuMemsetD8Async(address_, 0, bytes, nullptr), CUDA_SUCCESS);
    }
  }
  ~DeviceMemory() {
    if (!driver_) return;
    auto current = CudaContext::enter(device_.ordinal);
    driver_->cuMemFree(address_);
  }
  DeviceMemory(const DeviceMemory&) = delete;

  template <class T>
  T* as() {
    return device_.is_host() ? reinterpret_cast<T*>(host_.data()) : reinterpret_cast<T*>(address_);
  }
  template <class T>
  void write(const std::vector<T>& values) {
    copy(as<std::byte>(), values.data(), values.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> read() {
    std::vector<T> values(bytes_ / sizeof(T));
    copy(values.data(), as<std::byte>(), bytes_);
    return values;
  }

 private:
  void copy(void* dst, const void* src, size_t bytes) {
    if (device_.is_host()) {
      std::memcpy(dst, src, bytes);
      return;
    }
    auto current = CudaContext::enter(device_.ordinal);
    EXPECT_EQ(driver_->cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(dst), reinterpret_cast<CUdeviceptr>(src),
                                     bytes, nullptr),
              CUDA_SUCCESS);
    EXPECT_EQ(driver_->cuStreamSynchronize(nullptr), CUDA_SUCCESS);
  }

  const Device device_;
  const size_t bytes_;
  const CudaDriver* driver_ = nullptr;
  std::vector<std::byte> host_;
  CUdeviceptr address_ = 0;
};

// A generated kernel: what it writes is a constant.
KernelKey generated_key(int64_t value) {
  KernelKey key{"kernels/target/target.h", "write_value", "WriteValueArgs", "WriteValueMesh"};
  key.shape = {{"value", value}};
  key.threads_per_block = 32;
  key.prelude =
      "namespace weft { struct WriteValueArgs { int64_t* out; }; struct WriteValueMesh {};\n"
      "template <class Mesh, class Shape> WEFT_KERNEL void write_value(const WriteValueArgs& a, const "
      "Mesh&,\n"
      "                                                                const Shape&) { *a.out = "
      "Shape::value; } }\n";
  return key;
}

KernelKey layout_key() {
  return {"kernels/moe/high_throughput_layout.cuh", "dispatch_layout", "LayoutArgs", "MappedMesh", {}, 256};
}

class JitTest : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    set_toolchain({"", {}, testing::kDeviceDir});
    if (GetParam().is_host()) return;
    if (const auto driver = cuda_driver(); !driver.ok()) GTEST_SKIP() << driver.status().message();
    if (const auto nvrtc = Nvrtc::open(); !nvrtc.ok()) GTEST_SKIP() << nvrtc.status().message();
  }
  Jit& jit() { return Jit::of(GetParam()); }

  // Counts the experts of 1000 tokens on the device and compares with a loop.
  void expect_layout(Launch launch) {
    constexpr uint32_t kTokens = 1000, kTopK = 4, kRanks = 4, kExperts = 32;
    launch.shared_bytes = (kRanks + kExperts) * sizeof(int32_t);
    std::vector<int64_t> experts(kTokens * kTopK);
    for (size_t i = 0; i < experts.size(); ++i)
      experts[i] = static_cast<int64_t>(i * 2654435761u % (kExperts + 1)) - 1;
    std::vector<int32_t> want_expert(kExperts), want_rank(kRanks);
    std::vector<uint8_t> want_in(kTokens * kRanks);
    for (size_t i = 0; i < experts.size(); ++i) {
      if (experts[i] < 0) continue;
      ++want_expert[experts[i]];
      uint8_t& in = want_in[i / kTopK * kRanks + experts[i] / (kExperts / kRanks)];
      if (!in) ++want_rank[experts[i] / (kExperts / kRanks)];
      in = 1;
    }

    const Device device = GetParam();
    DeviceMemory topk(device, experts.size() * 8), counts(device, (kRanks + kExperts) * 4),
        in_rank(device, kTokens * kRanks);
    topk.write(experts);
    LayoutArgs args{};
    args.topk_idx = topk.as<int64_t>();
    args.tokens = kTokens;
    args.top_k = kTopK;
    args.id_bytes = 8;
    args.ranks = kRanks;
    args.experts = kExperts;
    args.experts_per_rank = kExperts / kRanks;
    args.counts = counts.as<int32_t>();
    args.token_in_rank = in_rank.as<uint8_t>();

    const auto kernel = jit().get(layout_key());
    ASSERT_TRUE(kernel.ok()) << kernel.status().message();
    const Status launched = jit().launch(**kernel, launch, args, MappedMesh{}, HighThroughputShape{});
    ASSERT_TRUE(launched.ok()) << launched.message();
    want_rank.insert(want_rank.end(), want_expert.begin(), want_expert.end());
    EXPECT_EQ(counts.read<int32_t>(), want_rank);
    EXPECT_EQ(in_rank.read<uint8_t>(), want_in);
  }
};

TEST_P(JitTest, RunsAKernel) {
  const uint32_t threads = GetParam().is_host() ? 1 : 256;
  expect_layout({.blocks = 3, .threads_per_block = threads});
}

TEST_P(JitTest, RunsWithMuchSharedMemory) {
  const uint32_t threads = GetParam().is_host() ? 2 : 128;
  expect_layout({.blocks = 2, .threads_per_block = threads, .shared_bytes = 100 * 1024});
}

TEST_P(JitTest, RunsCooperatively) {
  const uint32_t threads = GetParam().is_host() ? 1 : 256;
  expect_layout({.blocks = 2, .threads_per_block = threads, .cooperative = true});
}

TEST_P(JitTest, TheSameKeyGivesTheSameKernel) {
  const auto first = jit().get(layout_key());
  const auto second = jit().get(layout_key());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(*first, *second);
}

TEST_P(JitTest, AnUnknownKernelIsRefused) {
  KernelKey key = layout_key();
  key.name = "no_such_kernel";
  const auto kernel = jit().get(key);
  ASSERT_FALSE(kernel.ok());
  EXPECT_THAT(kernel.status().message(), ::testing::HasSubstr("no_such_kernel"));
}

TEST_P(JitTest, WrongSizesAndEmptyGridsAreInvalid) {
  const auto kernel = jit().get(layout_key());
  ASSERT_TRUE(kernel.ok()) << kernel.status().message();
  const NotifyArgs wrong{};
  EXPECT_EQ(jit().launch(**kernel, {}, wrong, MappedMesh{}, HighThroughputShape{}).code(), Code::kInvalid);
  EXPECT_EQ(jit().launch(**kernel, {.blocks = 0}, LayoutArgs{}, MappedMesh{}, HighThroughputShape{}).code(),
            Code::kInvalid);
  if (!GetParam().is_host())
    EXPECT_EQ(
        jit()
            .launch(**kernel, {.threads_per_block = 512}, LayoutArgs{}, MappedMesh{}, HighThroughputShape{})
            .code(),
        Code::kInvalid);
}

TEST_P(JitTest, KernelsThatWerePreparedAreThereForAllWhoAsk) {
  const std::vector<KernelKey> keys{generated_key(1), generated_key(2)};
  Jit& jit = Jit::of(GetParam());
  jit.prepare(keys);
  jit.prepare(keys);
  std::vector<std::thread> callers;
  std::vector<const Kernel*> found(4);
  for (size_t i = 0; i < found.size(); ++i)
    callers.emplace_back([&, i] {
      const Result<const Kernel*> kernel = jit.get(keys[i % 2]);
      ASSERT_TRUE(kernel.ok()) << kernel.status().message();
      found[i] = *kernel;
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(found[0], found[2]);
  EXPECT_EQ(found[1], found[3]);
  EXPECT_NE(found[0], found[1]);
  Jit::finish_preparing();
}

TEST_P(JitTest, AKernelThatCannotBeCompiledFailsForWhoAsks) {
  KernelKey key = generated_key(0);
  key.prelude += "no such word;";
  Jit& jit = Jit::of(GetParam());
  jit.prepare({key});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(jit.get(key).status().code(), Code::kSystem);
  Jit::finish_preparing();
}

INSTANTIATE_TEST_SUITE_P(Devices, JitTest, ::testing::Values(kHost, kGpu),
                         [](const auto& device) { return device.param.is_host() ? "host" : "cuda"; });

}  // namespace
}  // namespace weft
