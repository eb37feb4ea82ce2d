// SPDX-License-Identifier: Apache-2.0
//
// What the proxy transport promises beyond the channel suite: its limits, and how it fails. Over loopback.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>

#include "conformance/fixtures.h"
#include "kernels/core/wait.cuh"
#include "measure/fifo_load.h"
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
  static void on_two_ranks(Body body, bool meet_again = true) {
    run_thread_ranks(2, [&](std::shared_ptr<Bootstrap> boot) {
      auto comm = Communicator::create(boot, Device{}, kTimeout_s, "proxy");
      ASSERT_TRUE(comm.ok()) << comm.status().message();
      auto window = Window::create(*comm, kWindow);
      ASSERT_TRUE(window.ok()) << window.status().message();
      body(**comm, **window, mesh_of<ProxyMesh>(**window));
      if (meet_again) EXPECT_TRUE((*comm)->barrier().ok());
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

// Ranks drop windows at different times, so that they call the same window by different regions.
TEST_F(ProxyTest, ManyWindowsOneAfterAnotherAndSixteenAtATime) {
  run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{}, kTimeout_s, "proxy");
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    const auto rank = static_cast<size_t>((*comm)->rank());
    std::deque<std::unique_ptr<Window>> windows;
    for (uint64_t turn = 1; turn <= 60; ++turn) {
      auto window = Window::create(*comm, kWindow);
      ASSERT_TRUE(window.ok()) << turn << ": " << window.status().message();
      windows.push_back(std::move(*window));
      const ProxyMesh mesh = mesh_of<ProxyMesh>(*windows.back());
      auto other = mesh.to(1 - mesh.rank());
      for (const uint64_t bytes : {16u, 4096u}) {
        std::memset(mesh.local() + 65536, static_cast<int>(turn + bytes), bytes);
        other.put_with_signal(Warp{}, 4096, 65536, bytes, 0, bytes);
        other.flush();
        ASSERT_TRUE(wait(mesh, 0, bytes)) << turn;
        EXPECT_EQ(mesh.local()[4096 + bytes - 1], static_cast<std::byte>(turn + bytes)) << turn;
        ASSERT_TRUE((*comm)->barrier().ok());
      }
      while (windows.size() > (turn % 3 + 1) * (1 + rank)) windows.pop_front();
    }
    windows.clear();
    ASSERT_TRUE((*comm)->barrier().ok());
    for (uint32_t i = 0; i < proxy::kRegions; ++i) {
      auto window = Window::create(*comm, 4096);
      ASSERT_TRUE(window.ok()) << i << ": " << window.status().message();
      windows.push_back(std::move(*window));
    }
    EXPECT_THAT(Window::create(*comm, 4096).status().message(),
                HasSubstr("windows with port peers: got one more, allowed: 16 at a time"));
    EXPECT_TRUE((*comm)->barrier().ok());
  });
}

// Everyone to everyone, small and large, with one proxy thread for all of a rank's peers.
TEST_F(ProxyTest, SeventeenRanksPutToEachOther) {
  Settings::set({{"WEFT_PROXIES", "1"}});
  run_thread_ranks(17, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{}, kTimeout_s, "proxy");
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    auto window = Window::create(*comm, kWindow);
    ASSERT_TRUE(window.ok()) << window.status().message();
    const ProxyMesh mesh = mesh_of<ProxyMesh>(**window);
    constexpr uint64_t kLarge = 4096, kSmall = 32, kDst = 4096, kSrc = kWindow / 2, kAdds = 2048;
    std::memset(mesh.local() + kSrc, 1 + static_cast<int>(mesh.rank()), kLarge);
    for (uint32_t step = 0; step < mesh.ranks(); ++step) {
      auto peer = mesh.to((mesh.rank() + step) % mesh.ranks());
      const uint64_t dst = kDst + mesh.rank() * (kLarge + kSmall);
      peer.put(Warp{}, dst, kSrc, kLarge);
      peer.put_with_signal(Warp{}, dst + kLarge, kSrc, kSmall, 8 * mesh.rank(), 1);
      peer.signal_add(kAdds, mesh.rank() + 1);
    }
    ASSERT_TRUE(wait(mesh, kAdds, 17 * 18 / 2));
    for (uint32_t from = 0; from < mesh.ranks(); ++from) {
      ASSERT_TRUE(wait(mesh, 8 * from, 1)) << from;
      const std::byte* const came = mesh.local() + kDst + from * (kLarge + kSmall);
      const auto theirs = static_cast<std::byte>(1 + from);
      EXPECT_EQ(std::count(came, came + kLarge + kSmall, theirs), static_cast<long>(kLarge + kSmall)) << from;
    }
    EXPECT_TRUE((*comm)->barrier().ok());
  });
}

// Around the size from which a put goes by itself, and with more signals behind it than one record holds.
TEST_F(ProxyTest, SmallPutsAndTheirSignalsComeWholeAndInOrder) {
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    constexpr uint64_t kDst = 4096, kSrc = kWindow / 2, kWord = 8, kAdds = 40;
    auto other = mesh.to(1 - mesh.rank());
    uint64_t turn = 0, added = 0;
    for (uint64_t bytes = 16; bytes <= proxy::kSmallPutBytesMax + 48; bytes += 16) {
      const auto fill = static_cast<int>(++turn + 100 * mesh.rank());
      std::memset(mesh.local() + kSrc, fill, bytes);
      for (uint64_t i = 0; i < kAdds; ++i) other.signal_add(kWord, 1);
      other.put_with_signal(Warp{}, kDst, kSrc, bytes, 0, turn);
      other.flush();
      ASSERT_TRUE(wait(mesh, 0, turn));
      EXPECT_EQ(load_acquire(reinterpret_cast<uint64_t*>(mesh.local() + kWord)), added += kAdds);
      const auto theirs = static_cast<std::byte>(turn + 100 * (1 - mesh.rank()));
      EXPECT_EQ(std::count(mesh.local() + kDst, mesh.local() + kDst + bytes, theirs),
                static_cast<long>(bytes));
      EXPECT_NE(mesh.local()[kDst + bytes], theirs);
      ASSERT_TRUE(comm.barrier().ok());
    }
  });
}

// Both proxy threads are at it as well.
TEST_F(ProxyTest, AThreadThatWaitsCarriesOutCommandsItself) {
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    const auto help = [](void* link) { return static_cast<Link*>(link)->help(); };
    host_thread.help = {help, comm.port_link()};
    auto other = mesh.to(1 - mesh.rank());
    for (uint64_t i = 1; i <= 2000; ++i) {
      std::memset(mesh.local() + 65536, static_cast<int>(i), 16);
      other.put_with_signal(Warp{}, 4096, 65536, 16, 0, i);
      ASSERT_TRUE(wait(mesh, 0, i));
      ASSERT_EQ(mesh.local()[4111], static_cast<std::byte>(i));
      other.put_value(8, i);  // the next put may come
      ASSERT_TRUE(wait(mesh, 8, i));
    }
    host_thread.help = {};
  });
}

void put_and_signal_often(const ProxyMesh& mesh) {
  auto other = mesh.to(1 - mesh.rank());
  for (uint64_t i = 1; i <= 200; ++i) {
    other.put(Warp{}, 4096 + 4096 * (i % 16), 131072, 4096);
    other.put(Warp{}, 2048, 131072, 16);
    other.signal_add(0, 1);
  }
}

// A rail that fails when more writes are under way than its NIC takes: data, records and confirmations count.
TEST_F(ProxyTest, NeverMoreWritesAreUnderWayThanTheNicTakes) {
  for (const uint32_t most : {1u, 3u}) {
    Settings::set({{"WEFT_PROXY_WRITES_IN_FLIGHT", most == 1 ? "1" : "3"}, {"WEFT_PROXIES", "2"}});
    ReorderingFixture::network().set_plan({.most_writes = most});
    on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
      put_and_signal_often(mesh);
      EXPECT_TRUE(wait(mesh, 0, 200)) << comm.port_link()->status().message();
      EXPECT_TRUE(comm.port_link()->status().ok()) << comm.port_link()->status().message();
    });
  }
  Settings::clear({"WEFT_PROXY_WRITES_IN_FLIGHT"});
}

// Of two ranks one at least gives its NIC too much at once. It is lost to the other then, so they do not meet again.
TEST_F(ProxyTest, ANicThatIsGivenMoreThanItTakesFails) {
  ReorderingFixture::network().set_plan({.most_writes = 1});
  std::atomic<bool> has_failed{false};
  const bool meet_again = false;
  on_two_ranks(
      [&](Communicator& comm, Window&, const ProxyMesh& mesh) {
        put_and_signal_often(mesh);
        EXPECT_TRUE(wait_until(Deadline::after_s(kTimeout_s), [&] {
          if (!comm.port_link()->status().ok()) has_failed = true;
          return has_failed.load();
        }));
      },
      meet_again);
}

TEST(ProxyFifo, CarriesEveryCommandOfEveryProducerInOrder) {
  for (const uint64_t capacity : {2u, 8u, 2048u})
    for (const uint32_t producers : {1u, 4u}) {
      const auto seconds = measure_fifo(Device{}, producers, 20'000, capacity);
      ASSERT_TRUE(seconds.ok()) << capacity << " slots: " << seconds.status().message();
      EXPECT_GT(*seconds, 0);
    }
  EXPECT_FALSE(measure_fifo(Device{}, 0, 1, 2).ok());
  const auto trips = measure_fifo_trips(Device{}, 100, 2);
  ASSERT_TRUE(trips.ok()) << trips.status().message();
  ASSERT_EQ(trips->push_to_pop_us.size(), 100u);
  for (size_t i = 0; i < 100; ++i) EXPECT_LE(trips->push_to_pop_us[i], trips->round_trip_us[i]);
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

// Gets that are cut into parts, from a place before and from one behind their destination. Each part's own place counts, on both
// sides, and nothing beside it changes.
TEST_F(ProxyTest, AGetLargerThanThePaceBringsEachPartToItsPlace) {
  Settings::set({{"WEFT_PROXY_BYTES_IN_FLIGHT", "4096"}, {"WEFT_PROXY_WRITES_IN_FLIGHT", "2"}});
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    constexpr uint64_t kBytes = (40 << 10) + 48, kLow = 4096 + 16, kHigh = kWindow / 2 + 32;
    const auto pattern = [](uint32_t rank, uint64_t at) {
      return static_cast<std::byte>((at / 16 * 2654435761u >> 13) + rank * 101 + at % 16);
    };
    const auto mine = [&](uint64_t at) { return pattern(mesh.rank(), at); };
    const auto theirs = [&](uint64_t at) { return pattern(1 - mesh.rank(), at); };
    uint64_t got = 0;
    for (const auto& [dst, src] : {std::pair{kLow, kHigh}, {kHigh, kLow}}) {
      for (uint64_t at = 8; at < kWindow; ++at) mesh.local()[at] = mine(at);
      ASSERT_TRUE(comm.barrier().ok());
      mesh.to(1 - mesh.rank()).get(Warp{}, dst, src, kBytes, 0, ++got);
      ASSERT_TRUE(wait(mesh, 0, got));
      uint64_t wrong = 0;
      for (uint64_t at = 8; at < kWindow; ++at) {
        const bool is_got = at >= dst && at < dst + kBytes;
        wrong += mesh.local()[at] != (is_got ? theirs(at - dst + src) : mine(at));
      }
      EXPECT_EQ(wrong, 0u) << "from " << src << " to " << dst;
      ASSERT_TRUE(comm.barrier().ok());
    }
  });
  Settings::clear({"WEFT_PROXY_BYTES_IN_FLIGHT", "WEFT_PROXY_WRITES_IN_FLIGHT"});
}

// From and to memory of users and windows, in every combination. Registrations end and begin again, so that numbers
// come back for other memory.
TEST_F(ProxyTest, PutsGoFromAndToTemporaryRegistrations) {
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    constexpr uint64_t kBytes = 3 * 4096 + 48, kAt = 32, kDst = 4096, kSrc = kWindow / 2,
                       kRegistrationWord = 8;
    Link& link = *comm.port_link();
    ASSERT_TRUE(link.takes_temporary());
    auto other = mesh.to(1 - mesh.rank());
    uint64_t signals = 0;
    for (uint64_t turn = 1; turn <= 20; ++turn) {
      const auto value = [&](uint32_t rank) { return static_cast<std::byte>(turn * 2 + rank); };
      std::vector<std::byte> from(kBytes + kAt, value(mesh.rank())), into(kBytes + 2 * kAt, std::byte{99});
      std::memset(mesh.local() + kSrc, static_cast<int>(value(mesh.rank())), kBytes);
      std::memset(mesh.local() + kDst, 99, kBytes);
      const Result<uint32_t> mine = link.register_temporary(from.data(), from.size()),
                             target = link.register_temporary(into.data(), into.size());
      ASSERT_TRUE(mine.ok() && target.ok());
      other.announce(*target);
      other.put_value(kRegistrationWord, turn << 12 | *target);
      ASSERT_TRUE(wait(mesh, kRegistrationWord, turn << 12));
      const auto theirs = static_cast<uint32_t>(
          load_acquire(reinterpret_cast<uint64_t*>(mesh.local() + kRegistrationWord)) & 0xfff);
      other.put_registered(0, kDst, *mine, kAt, kBytes);
      other.put_registered(theirs, kAt, turn % 2 ? *mine : 0, turn % 2 ? 0 : kSrc, kBytes);
      other.put_value(0, ++signals);
      ASSERT_TRUE(wait(mesh, 0, signals));
      const std::byte came = value(1 - mesh.rank());
      EXPECT_EQ(std::count(mesh.local() + kDst, mesh.local() + kDst + kBytes, came),
                static_cast<long>(kBytes));
      EXPECT_EQ(std::count(into.begin() + kAt, into.begin() + kAt + kBytes, came), static_cast<long>(kBytes));
      EXPECT_EQ(std::count(into.begin(), into.end(), std::byte{99}), static_cast<long>(2 * kAt));
      other.flush();
      ASSERT_TRUE(comm.barrier().ok());
      link.reclaim({*mine, *target}, true);
    }
  });
}

TEST_F(ProxyTest, ThereAreSixteenTemporaryRegistrationsAtATime) {
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh&) {
    std::array<std::byte, 64> memory{};
    std::vector<uint32_t> registrations;
    for (uint32_t i = 0; i < proxy::kTemporaries; ++i) {
      const Result<uint32_t> registration =
          comm.port_link()->register_temporary(memory.data(), memory.size());
      ASSERT_TRUE(registration.ok()) << registration.status().message();
      registrations.push_back(*registration);
    }
    const Result<uint32_t> more = comm.port_link()->register_temporary(memory.data(), memory.size());
    EXPECT_EQ(more.status().code(), Code::kCapacity);
    EXPECT_THAT(more.status().message(), HasSubstr("one more temporary registration, allowed: 16"));
    comm.port_link()->reclaim(registrations, true);
    EXPECT_TRUE(comm.port_link()->register_temporary(memory.data(), memory.size()).ok());
  });
}

// A peer whose call has failed: what comes late finds neither its memory nor its next registration, and costs nobody a
// peer.
TEST_F(ProxyTest, APutToARegistrationThatIsOverWritesNothingAndTheRestGoesOn) {
  on_two_ranks([](Communicator& comm, Window&, const ProxyMesh& mesh) {
    constexpr uint64_t kBytes = 4096, kRegistrationWord = 8;
    Link& link = *comm.port_link();
    auto other = mesh.to(1 - mesh.rank());
    std::vector<std::byte> into(kBytes, std::byte{99});
    uint32_t theirs = 0;
    if (mesh.rank() == 0) {
      const Result<uint32_t> first = link.register_temporary(into.data(), kBytes);
      ASSERT_TRUE(first.ok());
      other.announce(*first);
      other.put_value(kRegistrationWord, 1 << 12 | *first);
      ASSERT_TRUE(comm.barrier().ok());  // the other knows of it, and has not written
      link.reclaim({*first}, false);
    } else {
      ASSERT_TRUE(wait(mesh, kRegistrationWord, 1 << 12));
      theirs = static_cast<uint32_t>(
          load_acquire(reinterpret_cast<uint64_t*>(mesh.local() + kRegistrationWord)) & 0xfff);
      ASSERT_TRUE(comm.barrier().ok());
    }
    for (uint64_t turn = 1; turn <= 2; ++turn) {
      ASSERT_TRUE(comm.barrier().ok());
      uint32_t next = 0;
      if (mesh.rank() == 0) {
        if (turn == 2) {
          next = *link.register_temporary(into.data(), kBytes);
          other.announce(next);
        }
        other.put_value(16, turn);
        ASSERT_TRUE(wait(mesh, 16, turn));
        EXPECT_EQ(std::count(into.begin(), into.end(), std::byte{99}), static_cast<long>(kBytes)) << turn;
        if (next) link.reclaim({next}, true);
      } else {
        ASSERT_TRUE(wait(mesh, 16, turn));
        other.put_registered(theirs, 0, 0, kWindow / 2, kBytes);
        other.put_value(16, turn);
      }
      EXPECT_TRUE(link.status().ok()) << link.status().message();
    }
  });
}

// What was to be sent from it is missing for good.
TEST_F(ProxyTest, APutFromARegistrationThatIsOverLosesThePeer) {
  on_two_ranks(
      [](Communicator& comm, Window&, const ProxyMesh& mesh) {
        if (mesh.rank() == 1) return;
        std::vector<std::byte> from(4096);
        Link& link = *comm.port_link();
        const uint32_t mine = *link.register_temporary(from.data(), from.size());
        link.reclaim({mine}, true);
        mesh.to(1).put_registered(0, 0, mine, 0, from.size());
        EXPECT_TRUE(wait_until(Deadline::after_s(20), [&] { return !link.status().ok(); }));
        EXPECT_THAT(link.status().message(), HasSubstr("lost rank 1: a call failed here before all"));
      },
      false);
}

// A rail that falls silent in mid-run: both ranks lose each other, and one of them is given up, whoever was blamed first.
// A rank that is done with its last call leaves while others still tell it that they have read what it sent.
TEST_F(ProxyTest, SignalsToARankThatLeavesAreNoLoss) {
  for (int turn = 0; turn < 5; ++turn)
    on_two_ranks(
        [](Communicator& comm, Window&, const ProxyMesh& mesh) {
          auto other = mesh.to(1 - mesh.rank());
          other.put_value(0, 1);
          ASSERT_TRUE(wait(mesh, 0, 1));
          if (mesh.rank() == 0) return;
          const Deadline until = Deadline::after_s(0.5);
          for (uint64_t i = 2; !until.passed(); ++i) other.put_value(0, i);
          EXPECT_TRUE(comm.port_link()->status().ok()) << comm.port_link()->status().message();
        },
        false);
}

TEST_F(ProxyTest, ASilentPeerIsLostByName) {
  Settings::set({{"WEFT_PEER_DEAD_S", "1"}, {"WEFT_HEARTBEAT_S", "0.2"}});
  const auto lose_each_other = [](Communicator& comm, Window&, const ProxyMesh& mesh) {
    std::atomic<int> lost{-1};
    const PeerWatch::Alarm alarm = comm.peers().alarm([&](int peer) { lost = peer; });
    ASSERT_TRUE(comm.barrier().ok());
    if (mesh.rank() == 0) ReorderingFixture::network().set_plan({.dies_after = 1});
    ASSERT_TRUE(comm.barrier().ok());
    mesh.to(1 - mesh.rank()).put_value(0, 1);
    const Deadline until = Deadline::after_s(kTimeout_s);
    EXPECT_TRUE(wait_until(until, [&] { return lost != -1 && !comm.port_link()->status().ok(); }));
    EXPECT_THAT(comm.peers().lost(), HasSubstr("no sign of life for 1 s"));
    EXPECT_THAT(comm.port_link()->status().message(),
                HasSubstr(text("rank {}, proxy: lost rank {}", mesh.rank(), 1 - mesh.rank())));
  };
  on_two_ranks(lose_each_other, false);
  Settings::clear({"WEFT_PEER_DEAD_S", "WEFT_HEARTBEAT_S"});
}

}  // namespace
}  // namespace weft
