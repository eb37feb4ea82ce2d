// SPDX-License-Identifier: Apache-2.0
//
// What the jitter transport promises beyond the channel suite: its waits are bounded and repeat with the seed,
// calls reach the transport behind in the order in which a thread makes them, and waits there are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "conformance/fixtures.h"
#include "support/ranks.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::StartsWith;

constexpr uint64_t kMost_ns = 1'000'000;

TEST(Jitter, WaitsAreBoundedAndRepeatWithTheSeed) {
  uint64_t waits = 0, sum_ns = 0;
  std::set<uint64_t> differing;
  for (uint64_t draw = 0; draw < 4000; ++draw) {
    const uint64_t wait = jitter::wait_ns(7, draw, kMost_ns);
    ASSERT_LT(wait, kMost_ns);
    ASSERT_EQ(wait, jitter::wait_ns(7, draw, kMost_ns));
    differing.insert(wait ^ jitter::wait_ns(8, draw, kMost_ns));
    waits += wait > 0;
    sum_ns += wait;
  }
  EXPECT_NEAR(static_cast<double>(waits), 4000.0 / jitter::kOneIn, 150);
  EXPECT_NEAR(static_cast<double>(sum_ns) / static_cast<double>(waits), kMost_ns / 2, kMost_ns / 20);
  EXPECT_GT(differing.size(), 1000u);
}

// Writes down what it is asked for.
struct Recorder {
  std::vector<std::string>* calls;

  template <class Group>
  void put(Group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    calls->push_back(text("put {} {} {}", dst, src, bytes));
  }
  template <class Group>
  void put_with_signal(Group, WindowOffset, WindowOffset, uint64_t, WindowOffset, uint64_t) {
    calls->push_back("put_with_signal");
  }
  void put_value(WindowOffset word, uint64_t value) { calls->push_back(text("value {} {}", word, value)); }
  void signal_add(WindowOffset word, uint64_t n) { calls->push_back(text("add {} {}", word, n)); }
  void flush() { calls->push_back("flush"); }
};

TEST(Jitter, CallsReachTheTransportBehindInTheirOrder) {
  std::vector<std::string> calls;
  uint64_t drawn = 0;
  JitterChannel channel(Recorder{&calls}, {&drawn, 1, 1000});
  channel.put(Warp{}, 16, 32, 48);
  channel.put_with_signal(Warp{}, 64, 80, 96, 8, 5);
  channel.signal_add(24, 2);
  channel.flush();
  EXPECT_THAT(calls, ElementsAre("put 16 32 48", "put 64 80 96", "value 8 5", "add 24 2", "flush"));
  EXPECT_EQ(drawn, 5u);
}

TEST(Jitter, CallsOfAChannelWaitAsDrawn) {
  std::vector<std::string> calls;
  uint64_t drawn = 0, expected_ns = 0;
  for (uint64_t draw = 0; draw < 40; ++draw) expected_ns += jitter::wait_ns(3, draw, kMost_ns);
  ASSERT_GT(expected_ns, kMost_ns);
  JitterChannel channel(Recorder{&calls}, {&drawn, 3, kMost_ns});
  const uint64_t start = now_ns();
  for (int i = 0; i < 40; ++i) channel.put_value(8, 1);
  EXPECT_GE(now_ns() - start, expected_ns);
}

TEST(Jitter, StandsInFrontOfTheProxyAndIsTakenByNameAlone) {
  testing::JitterFixture::set_up();
  const Caps* behind = nullptr;
  const std::vector<Candidate> all = candidates(Device{});
  for (const Candidate& candidate : all) {
    const std::string_view name = candidate.transport->name();
    if (name == "proxy") behind = &candidate.caps;
    if (name != "jitter:proxy") continue;
    EXPECT_TRUE(candidate.caps.only_by_name);
    EXPECT_THAT(candidate.caps.details, StartsWith(behind->details));
    EXPECT_GT(candidate.caps.latency_us, behind->latency_us);
  }
  ASSERT_NE(behind, nullptr);
  EXPECT_FALSE(behind->only_by_name);
  testing::JitterFixture::tear_down();
}

// Mapped inside of nodes, random waits between them.
TEST(Jitter, ServesNodesBesideMappedMemory) {
  testing::JitterFixture::set_up();
  testing::Settings::set({{"WEFT_RANKS_PER_NODE", "2"}});
  testing::run_thread_ranks(4, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{}, 30, "mapped,jitter:proxy");
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    auto window = Window::create(*comm, 4096);
    ASSERT_TRUE(window.ok()) << window.status().message();
    using BothMesh = HybridMesh<MappedMesh, JitterMesh<ProxyMesh>>;
    const auto mesh = testing::mesh_of<BothMesh>(**window);
    EXPECT_EQ(mesh.mapped_window(mesh.rank() ^ 1), (*window)->base(static_cast<int>(mesh.rank() ^ 1)));
    EXPECT_EQ(mesh.mapped_window(mesh.rank() ^ 2), nullptr);
    for (uint32_t peer = 0; peer < 4; ++peer) mesh.to(peer).put_value(8 * mesh.rank(), 1 + mesh.rank());
    const auto* words = reinterpret_cast<const uint64_t*>(mesh.local());
    for (uint64_t from = 0; from < 4; ++from)
      EXPECT_TRUE(wait_until(Deadline::after_s(30), [&] { return load_acquire(words + from) == from + 1; }));
    EXPECT_TRUE((*comm)->barrier().ok());
  });
  testing::Settings::clear({"WEFT_RANKS_PER_NODE"});
  testing::JitterFixture::tear_down();
}

}  // namespace
}  // namespace weft
