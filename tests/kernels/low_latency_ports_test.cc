// SPDX-License-Identifier: Apache-2.0
//
// Low-latency dispatch and combine among ranks that cannot all map each other, as threads, over a network that reorders
// and delays. ThreadSanitizer sees both ends of every put.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "conformance/fixtures.h"
#include "kernels/low_latency_rounds.h"
#include "plan/low_latency.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using namespace weft::testing;  // NOLINT(google-build-using-namespace)

constexpr double kSilentS = 1.5;

uint64_t ports_region_for(const Case& c) {
  return low_latency_bytes_with_ports(c.ranks, region_for(c));
}

// Whether a block watches for the others, as it does on GPUs.
struct WatchedCase : PortsCase {
  bool has_page = false;

  friend void PrintTo(const WatchedCase& c, std::ostream* out) {
    PrintTo(static_cast<const PortsCase&>(c), out);
    *out << (c.has_page ? " watched" : "");
  }
};

// By ranks to a node.
class LowLatencyPorts : public ::testing::TestWithParam<WatchedCase> {
 protected:
  void SetUp() override { GetParam().set_up(); }
  void TearDown() override { GetParam().tear_down(); }
  static Rank make_rank(std::shared_ptr<Bootstrap> boot, uint64_t region_bytes, uint32_t host_threads,
                        double timeout_s = kTimeoutS) {
    return Rank(std::move(boot), region_bytes, host_threads, 0, false, timeout_s, GetParam().has_page);
  }
};
INSTANTIATE_TEST_SUITE_P(
    RanksPerNode, LowLatencyPorts,
    ::testing::Values(WatchedCase{{"1"}}, WatchedCase{{"1"}, true}, WatchedCase{{"2", false, "node"}},
                      WatchedCase{{"2", false, "node"}, true}, WatchedCase{{"2", false, "direct"}},
                      WatchedCase{{"2", false, "direct"}, true}, WatchedCase{{"3", false, "node"}},
                      WatchedCase{{"3", false, "node"}, true}, WatchedCase{{"1", true}},
                      WatchedCase{{"2", true, "node"}}));

TEST_P(LowLatencyPorts, RoundTripsOfAnyShape) {
  const Case cases[] = {{2, 512, 3, 8, 9, kPayloadFp8Exponent},
                        {2, 64, 8, 6, 130, kPayloadCopy, kReplyExact},
                        {3, 256, 4, 8, 17, kPayloadFp8Rounded, kReplyExact, 3},
                        {4, 1024, 8, 32, 20, kPayloadFp8, kReplyReducedLog},
                        {4, 1536, 8, 32, 20, kPayloadCopy, kReplyExactLog, 2},
                        {5, 8, 32, 64, 11, kPayloadCopy, kReplyReduced, 2, true},
                        {7, 16, 2, 5, 9, kPayloadCopy, kReplyReduced, 1, true},
                        {6, 136, 6, 11, 40, kPayloadCopy, kReplyReduced, 3}};
  for (const Case& c : cases)
    run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
      Rank rank = make_rank(boot, ports_region_for(c), c.host_threads);
      for (uint32_t seed = 0; seed < 3; ++seed) run_round_trip(c, rank, seed);
    });
}

TEST_P(LowLatencyPorts, TwoCallsMayBeOutstanding) {
  const Case c{3, 128, 3, 6, 10};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank = make_rank(boot, ports_region_for(c), 2);
    for (uint32_t turn = 0; turn < 4; ++turn) {
      RoundTrip a(c, rank, 2 * turn), b(c, rank, 2 * turn + 1);
      ASSERT_EQ(a.dispatch(kPhaseSend).message(), "");
      ASSERT_EQ(b.dispatch(kPhaseSend).message(), "");
      ASSERT_EQ(a.dispatch(kPhaseReceive).message(), "");
      a.check_dispatched();
      ASSERT_EQ(b.dispatch(kPhaseReceive).message(), "");
      b.check_dispatched();
      ASSERT_EQ(a.combine(kPhaseSend).message(), "");
      ASSERT_EQ(b.combine(kPhaseSend).message(), "");
      ASSERT_EQ(a.combine(kPhaseReceive).message(), "");
      ASSERT_EQ(b.combine(kPhaseReceive).message(), "");
      a.check_combined();
      b.check_combined();
    }
  });
}

TEST_P(LowLatencyPorts, SlowRanksAreWaitedFor) {
  const Case c{4, 64, 3, 8, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank = make_rank(boot, ports_region_for(c), 1);
    std::mt19937 random(rank.rank());
    for (uint32_t turn = 0; turn < 20; ++turn) {
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 4));
      run_round_trip(c, rank, turn);
    }
  });
}

// Two of three ranks own all experts, so that more replies of each go to a batch than fit its part of the outbox: they
// leave in several ranges.
TEST_P(LowLatencyPorts, TheLeastRegionServesWhereRepliesDoNotAllFit) {
  const Case c{3, 512, 4, 4, 30, kPayloadCopy, kReplyExact};
  if (std::stoi(GetParam().ranks_per_node) == 3) GTEST_SKIP() << "all ranks map each other";
  const LowLatencySizes sizes{c.ranks, c.max_tokens, c.top_k, c.experts, 0, 0, true};
  const Batches batches = sizes.batches();
  const PortCombineLayout at =
      port_combine_layout(c.ranks, c.max_tokens, c.top_k, batches, c.hidden * 2, c.reply);
  const uint64_t least = std::max(at.inbox_bytes, least_outbox(at, c.ranks, batches));
  ASSERT_GT(answer_room(at, c.ranks, batches, least), 0u);
  ASSERT_LT(answer_room(at, c.ranks, batches, least), batches.capacity * 2 * 3 / 4);
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank = make_rank(boot, low_latency_region_bytes(c.ranks, least, true), 1);
    for (uint32_t seed = 0; seed < 3; ++seed) run_round_trip(c, rank, seed);
  });
}

// Nodes of 4, 4, 4, 4 and 1: a rank of the last carries for all ranks of the others.
TEST(LowLatencyNodes, SeventeenRanksOverFiveNodes) {
  for (const bool has_page : {false, true}) {
    const WatchedCase nodes{{"4", false, "node"}, has_page};
    nodes.set_up();
    const Case c{17, 64, 6, 34, 12};
    run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
      Rank rank(boot, ports_region_for(c), 1, 0, false, kTimeoutS, has_page);
      for (uint32_t seed = 0; seed < 2; ++seed) {
        RoundTrip trip(c, rank, seed);
        EXPECT_TRUE(trip.replies_once_per_domain());
        ASSERT_EQ(trip.dispatch(kBoth).message(), "");
        trip.check_dispatched();
        ASSERT_EQ(trip.combine(kBoth).message(), "");
        trip.check_combined();
      }
    });
    nodes.tear_down();
  }
}

// Who has no room to gather sends once for each rank, on all ranks alike.
TEST_P(LowLatencyPorts, RepliesThatCannotBeGatheredGoToEachRank) {
  const Case c{5, 512, 2, 10, 20, kPayloadFp8};
  if (std::string(GetParam().fan_out) != "node") GTEST_SKIP() << "nothing is gathered";
  const LowLatencySizes sizes{c.ranks, c.max_tokens, c.top_k, c.experts, 0, 0, true};
  const PortCombineLayout at =
      port_combine_layout(c.ranks, c.max_tokens, c.top_k, sizes.batches(), c.hidden * 2, c.reply);
  const MessageLayout message = message_layout(c.top_k, false, c.row_bytes(), c.scale_bytes());
  const uint64_t least =
      std::max({at.inbox_bytes, least_outbox(at, c.ranks, sizes.batches()),
                dispatch_outbox(c.ranks, sizes.experts_per_rank(), sizes.batches(), message).bytes});
  for (const uint64_t more : {uint64_t{0}, uint64_t{4} << 20})
    run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
      Rank rank = make_rank(boot, low_latency_region_bytes(c.ranks, least + more, true), 1);
      for (uint32_t seed = 0; seed < 2; ++seed) {
        RoundTrip trip(c, rank, seed);
        EXPECT_EQ(trip.replies_once_per_domain(), more != 0);
        ASSERT_EQ(trip.dispatch(kBoth).message(), "");
        ASSERT_EQ(trip.combine(kBoth).message(), "");
        trip.check_combined();
      }
    });
}

TEST_P(LowLatencyPorts, TooSmallARegionIsRefusedBeforeAnythingIsSent) {
  const Case c{2, 64, 3, 6, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank = make_rank(boot, ports_region_for(c), 1);
    const Case big{2, 4096, 3, 6, 600};
    RoundTrip trip(big, rank, 0);
    const Status status = trip.dispatch(kBoth);
    EXPECT_EQ(status.code(), Code::kCapacity);
    EXPECT_THAT(status.message(), HasSubstr("num_rdma_bytes"));
    run_round_trip(c, rank, 1);
  });
}

TEST_P(LowLatencyPorts, SilentRankIsNamed) {
  const Case c{4, 64, 3, 6, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank = make_rank(boot, ports_region_for(c), 1, kSilentS);
    run_round_trip(c, rank, 0);
    const Status met = rank.comm().barrier();
    ASSERT_EQ(met.message(), "");
    if (rank.rank() == 3) return;
    RoundTrip trip(c, rank, 1);
    const Status status = trip.dispatch(kBoth);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_THAT(status.message(), HasSubstr("rank 3"));
    EXPECT_NE(trip.combine(kBoth).code(), Code::kOk);
  });
}

}  // namespace
}  // namespace weft
