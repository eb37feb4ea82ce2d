// SPDX-License-Identifier: Apache-2.0
#include "jit/host_launch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "kernels/target/host.h"

namespace weft {
namespace {

TEST(HostLaunch, EveryPlaceRunsOnce) {
  std::vector<std::atomic<int>> runs(3 * 4);
  ASSERT_TRUE(run_on_host({.blocks = 3, .warps = 4}, [&] {
                EXPECT_EQ(Block().count(), 3u);
                EXPECT_EQ(Block().warps(), 4u);
                runs[Block().index() * 4 + Warp().index()].fetch_add(1);
              }).ok());
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count.load(), 1);
}

TEST(HostLaunch, TheCallerRunsTheFirstWarp) {
  const std::thread::id caller = std::this_thread::get_id();
  ASSERT_TRUE(run_on_host({.blocks = 1, .warps = 2}, [&] {
                EXPECT_EQ(std::this_thread::get_id() == caller, Warp().index() == 0);
              }).ok());
}

TEST(HostLaunch, TheCallerKnowsHowLongItsKernelsRan) {
  const uint64_t before = host_kernel_ns();
  std::atomic<uint32_t> sum{0};
  ASSERT_TRUE(run_on_host({.blocks = 1, .warps = 1}, [&] {
                for (uint32_t i = 0; i < 100'000; ++i) sum.fetch_add(i);
              }).ok());
  EXPECT_GT(host_kernel_ns(), before);
  std::thread([] { EXPECT_EQ(host_kernel_ns(), 0u); }).join();
}

TEST(HostLaunch, AnEmptyGridIsInvalid) {
  EXPECT_EQ(run_on_host({.blocks = 0, .warps = 4}, [] {}).code(), Code::kInvalid);
  EXPECT_EQ(run_on_host({.blocks = 4, .warps = 0}, [] {}).code(), Code::kInvalid);
}

// Plain, unsynchronised data handed over by the barrier and by the end of the launch: ThreadSanitizer sees
// both.
TEST(HostLaunch, BarriersAndReturnPublishPlainWrites) {
  constexpr uint32_t kWarps = 4;
  for (int round = 0; round < 50; ++round) {
    std::vector<uint32_t> totals(2 * kWarps);
    ASSERT_TRUE(run_on_host({.blocks = 2, .warps = kWarps, .shared_bytes = kWarps * sizeof(uint32_t)}, [&] {
                  auto* shared = reinterpret_cast<uint32_t*>(Block().shared());
                  shared[Warp().index()] = Warp().index() + 1;
                  Block().sync();
                  uint32_t total = 0;
                  for (uint32_t i = 0; i < kWarps; ++i) total += shared[i];
                  Block().sync();
                  totals[Block().index() * kWarps + Warp().index()] = total + Block().index();
                }).ok());
    for (uint32_t i = 0; i < totals.size(); ++i) EXPECT_EQ(totals[i], 10 + i / kWarps);
  }
}

TEST(HostLaunch, SharedMemoryIsAlignedAndPerBlock) {
  std::vector<std::byte*> shared(3);
  ASSERT_TRUE(run_on_host({.blocks = 3, .warps = 1, .shared_bytes = 100}, [&] {
                shared[Block().index()] = Block().shared();
              }).ok());
  std::set<std::byte*> distinct(shared.begin(), shared.end());
  EXPECT_EQ(distinct.size(), 3u);
  for (std::byte* at : shared) EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % 128, 0u);
}

// Blocks wait for each other, and launches of different ranks do: all must have threads of their own.
TEST(HostLaunch, LaunchesOfSeveralRanksRunTogether) {
  constexpr uint32_t kRanks = 5;
  constexpr uint32_t kThreads = 3;
  for (int round = 0; round < 20; ++round) {
    std::atomic<uint32_t> arrived{0};
    std::vector<std::thread> ranks;
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      ranks.emplace_back([&] {
        EXPECT_TRUE(run_on_host({.blocks = kThreads, .warps = 1}, [&] {
                      arrived.fetch_add(1);
                      for (uint32_t polls = 0; arrived.load() != kRanks * kThreads; ++polls) pause(polls);
                    }).ok());
      });
    for (std::thread& rank : ranks) rank.join();
  }
}

TEST(HostLaunch, NestedPlacesAreRestored) {
  ASSERT_TRUE(run_on_host({.blocks = 1, .warps = 1, .shared_bytes = 16}, [] {
                std::byte* outer = Block().shared();
                ASSERT_TRUE(run_on_host({.blocks = 2, .warps = 1, .shared_bytes = 16}, [] {}).ok());
                EXPECT_EQ(Block().shared(), outer);
                EXPECT_EQ(Block().count(), 1u);
              }).ok());
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not follow threads into a forked child
TEST(HostLaunch, AForkedChildHasThreadsOfItsOwn) {
  ASSERT_TRUE(run_on_host({.blocks = 4, .warps = 1}, [] {}).ok());
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> runs{0};
    const bool ok = run_on_host({.blocks = 4, .warps = 1}, [&] { runs.fetch_add(1); }).ok();
    _exit(ok && runs.load() == 4 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace weft
