// SPDX-License-Identifier: Apache-2.0
//
// What the proxy transport promises beyond the channel suite: its limits, and how it fails. Over loopback.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>

#include "conformance/fixtures.h"
#include "kernels/core/wait.cuh"
#include "support/ranks.h"
#include "transports/proxy/network.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::mesh_of;
using testing::ReorderingFixture;
using testing::run_thread_ranks;
using testing::Settings;

constexpr double kTimeout_s = 30;
constexpr uint64_t kWindow = 512 << 10;

struct ProxyTest : ::testing::Test {
  void SetUp() override { ReorderingFixture::set_up(); }
  void TearDown() override { ReorderingFixture::tear_down(); }

  template <class Body>
  static void on_two_ranks(Body body) {
    run_thread_ranks(2, [&](std::shared_ptr<Bootstrap> boot) {
      auto comm = Communicator::create(boot, Device{}, kTimeout_s, "proxy");
      ASSERT_TRUE(comm.ok()) << comm.status().message();
      auto window = Window::create(*comm, kWindow);
      ASSERT_TRUE(window.ok()) << window.status().message();
      body(**comm, **window, mesh_of<ProxyMesh>(**window));
      EXPECT_TRUE((*comm)->barrier().ok());
    });
  }
  static bool wait(const ProxyMesh& mesh, uint64_t word, uint64_t want) {
    FaultBox fault{};
    const WaitRule rule{static_cast<uint64_t>(kTimeout_s * 1e9), &fault, mesh.rank(), 0};
    uint64_t seen = 0, waited_ns = 0;
    return poll_signal(reinterpret_cast<uint64_t*>(mesh.local() + word), want, rule, seen, waited_ns);
  }
};

// More commands than several laps of the FIFO of 8 hold, and more records than numbers go around.
TEST_F(ProxyTest, ManySignalsWrapEveryRing) {
  on_two_ranks([](Communicator&, Window&, const ProxyMesh& mesh) {
    auto other = mesh.to(1 - mesh.rank());
    for (uint64_t i = 1; i <= 3000; ++i) {
      other.put(Warp{}, 4096 + 16 * (i % 1000), 65536, 16);  // so that signals do not share a record
      other.signal_add(0, 1);
    }
    EXPECT_TRUE(wait(mesh, 0, 3000));
  });
}

TEST_F(ProxyTest, ThePutOfAWholeWindowAndThatOfNothing) {
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    auto other = mesh.to(1 - mesh.rank());
    const uint64_t half = kWindow / 2;
    std::memset(mesh.local() + half, 7, half);
    ASSERT_TRUE(comm.barrier().ok());
    other.put(Warp{}, 0, 0, 0);
    other.put_with_signal(Warp{}, 16, half, half - 16, 0, 1);
    ASSERT_TRUE(wait(mesh, 0, 1));
    EXPECT_EQ(mesh.local()[16], std::byte{7});
    EXPECT_EQ(mesh.local()[half - 1], std::byte{7});
  });
}

TEST_F(ProxyTest, PlacesOutsideTheWindowAreRefusedByName) {
  for (const auto& [dst, src, bytes] : {std::array<uint64_t, 3>{kWindow, 0, 16},
                                        {0, kWindow - 16, 32},
                                        {0, 0, kWindow + 16},
                                        {8, 0, 16},
                                        {0, 8, 16},
                                        {0, 0, 24}})
    on_two_ranks([&](Communicator& comm, Window&, const ProxyMesh& mesh) {
      mesh.to(1 - mesh.rank()).put(Warp{}, dst, src, bytes);
      const Status status = comm.port_link()->status();
      EXPECT_EQ(status.code(), Code::kInvalid);
      EXPECT_THAT(status.message(), HasSubstr(text("rank {}, proxy: a put or signal to rank {}", mesh.rank(),
                                                   1 - mesh.rank())));
    });
}

TEST(ProxyPace, IsThatOfTheNicsFamily) {
  EXPECT_EQ(proxy::pace_of("bnxt_re0").writes_in_flight, 1u);
  EXPECT_EQ(proxy::pace_of("bnxt_re0").bytes_in_flight, 3u << 19);
  EXPECT_EQ(proxy::pace_of("ionic_3").bytes_in_flight, 2u << 20);
  EXPECT_EQ(proxy::pace_of("mlx5_0").family, std::string_view("mlx5"));
  EXPECT_EQ(proxy::pace_of("lo@127.0.0.1").family, std::string_view(""));
}

// With a pace of 4 KiB and one write, a put of more goes in parts, one after the other, and arrives whole.
TEST_F(ProxyTest, APutLargerThanThePaceArrivesWhole) {
  Settings::set({{"WEFT_PROXY_BYTES_IN_FLIGHT", "4096"}, {"WEFT_PROXY_WRITES_IN_FLIGHT", "1"}});
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    constexpr uint64_t kBytes = 100 << 10, kDst = 4096, kSrc = kWindow / 2;
    for (uint64_t i = 0; i < kBytes; ++i) mesh.local()[kSrc + i] = static_cast<std::byte>(i / 128);
    ASSERT_TRUE(comm.barrier().ok());
    mesh.to(1 - mesh.rank()).put_with_signal(Warp{}, kDst, kSrc, kBytes, 0, 1);
    ASSERT_TRUE(wait(mesh, 0, 1));
    EXPECT_EQ(std::memcmp(mesh.local() + kDst, mesh.local() + kSrc, kBytes), 0);
  });
  Settings::clear({"WEFT_PROXY_BYTES_IN_FLIGHT", "WEFT_PROXY_WRITES_IN_FLIGHT"});
}

// A rail that falls silent in mid-run: both ranks learn who is gone, as they do of one that dies.
TEST_F(ProxyTest, ASilentPeerIsLostByName) {
  Settings::set({{"WEFT_PEER_DEAD_S", "1"}, {"WEFT_HEARTBEAT_S", "0.2"}});
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    std::atomic<int> lost{-1};
    const PeerWatch::Alarm alarm = comm.peers().alarm([&](int peer) { lost = peer; });
    ASSERT_TRUE(comm.barrier().ok());
    if (mesh.rank() == 0) ReorderingFixture::network().set_plan({.dies_after = 1});
    ASSERT_TRUE(comm.barrier().ok());
    mesh.to(1 - mesh.rank()).put_value(0, 1);
    const int other = 1 - static_cast<int>(mesh.rank());
    EXPECT_TRUE(wait_until(Deadline::after_s(kTimeout_s), [&] { return lost == other; }));
    EXPECT_THAT(comm.peers().lost(), HasSubstr(text("rank {} is lost: ", other)));
    EXPECT_THAT(comm.port_link()->status().message(),
                HasSubstr(text("rank {}, proxy: lost rank {}", mesh.rank(), 1 - mesh.rank())));
  });
  Settings::clear({"WEFT_PEER_DEAD_S", "WEFT_HEARTBEAT_S"});
}

}  // namespace
}  // namespace weft
