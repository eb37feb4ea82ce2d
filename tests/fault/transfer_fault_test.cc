// SPDX-License-Identifier: Apache-2.0
//
// The transfer engine over a network that misbehaves: lost, doubled, overtaking and refused packets, dead
// peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/conformance/transfer_fixture.h"
#include "transfer/core.h"

namespace weft::transfer::testing {
namespace {

using provider::FaultPlan;
using provider::Loopback;
using ::testing::AllOf;
using ::testing::HasSubstr;

// While one lives, its engine neither posts nor polls: what its peers send lies in the network, and what is
// submitted to it starts together afterwards.
struct Standstill : HoldToken {
  explicit Standstill(const Side& side) : HoldToken(side.engine->core().token) {}
};

std::string rail_of(const Side& side, size_t i) {
  return parse_address(side.engine->address())->rails[i];
}

struct Faulty {
  std::shared_ptr<Loopback> network = std::make_shared<Loopback>();
  Pair pair;
  explicit Faulty(Options options = {}, uint64_t bytes = 100000) : pair(network, 1, 1, bytes, options) {}
  void plan(FaultPlan plan) {
    plan.seed = 5;
    plan.spare_messages = true;
    network->set_plan(plan);
  }
};

TEST(TransferFault, LostWriteFailsByItsDeadlineAndNamesThePeer) {
  Faulty f;
  f.plan({.drop = 1});
  WriteRequest request = f.pair.write(0, 0, 100);
  request.how.timeout_s = 0.1;
  auto lost = *f.pair.a.engine->write(request);
  const Status status = f.pair.a.engine->wait(lost, soon());
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_THAT(status.message(), HasSubstr("for peer 'b': expected 1 pieces done, saw 0"));
  f.plan({});
  request.how = with_imm(1);
  ASSERT_OK(f.pair.a.engine->write(request).status());
  EXPECT_OK(f.pair.wait_imm(1, 1));
}

TEST(TransferFault, WaitThatEndsBeforeItsWriteNamesThePeer) {
  Faulty f;
  f.plan({.drop = 1});
  auto lost = *f.pair.a.engine->write(f.pair.write(0, 0, 100));
  EXPECT_THAT(f.pair.a.engine->wait(lost, soon(0.05)).message(),
              HasSubstr("s for a write of 100 bytes, peer 'b': expected done, saw"));
  f.plan({});
}

TEST(TransferFault, FarewellDoesNotOvertakeTheLastBarrier) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    Faulty f;
    FaultPlan plan{.seed = seed, .delay = 0.5, .delay_polls = 1000};  // now and then of one of two writes
    plan.spare_messages = true;
    f.network->set_plan(plan);
    Status left;
    std::thread leaver([&] {
      left = f.pair.a.engine->barrier({f.pair.b_at_a}, 1, soon());
      f.pair.a.engine->close();
    });
    const Status stayed = f.pair.b.engine->barrier({f.pair.a_at_b}, 1, soon());
    leaver.join();
    EXPECT_TRUE(left.ok()) << "seed " << seed << ": " << left.message();
    EXPECT_TRUE(stayed.ok()) << "seed " << seed << ": " << stayed.message();
    f.network->set_plan({});
  }
}

TEST(TransferFault, LostWritesDoNotUseUpTheRail) {
  Faulty f;
  f.plan({.drop = 1});
  auto counter = std::make_shared<Counter>();
  for (int i = 0; i < 1000; ++i) {
    WriteRequest request = f.pair.write(0, 0, 100);
    request.how.timeout_s = 0.05;
    request.how.counter = counter;
    ASSERT_OK(f.pair.a.engine->write(request).status());
  }
  EXPECT_FALSE(f.pair.a.engine->wait(*counter, 1000, soon()).ok());
  EXPECT_EQ(counter->failed(), 1000u);
  f.plan({});
  WriteRequest request = f.pair.write(0, 0, 100);
  request.how = with_imm(1);
  ASSERT_OK(f.pair.a.engine->write(request).status());
  EXPECT_OK(f.pair.wait_imm(1, 1));
}

TEST(TransferFault, RefusedPieceFailsOnlyItsTransfer) {
  Faulty f;
  f.plan({.fail = 1});
  auto failed = *f.pair.a.engine->write(f.pair.write(0, 0, 100));
  const Status status = f.pair.a.engine->wait(failed, soon());
  EXPECT_EQ(status.code(), Code::kSystem);
  EXPECT_THAT(status.message(), HasSubstr("to peer 'b' on loop0: loopback: damaged"));
  f.plan({});
  auto fine = *f.pair.a.engine->write(f.pair.write(0, 0, 100));
  EXPECT_OK(f.pair.a.engine->wait(fine, soon()));
  EXPECT_TRUE(f.pair.b_at_a->is_alive());
}

TEST(TransferFault, OvertakingWritesAreAllCounted) {
  Faulty f;
  f.plan({.reorder = 0.8, .delay = 0.3});
  f.pair.a.buffer.randomize(3);
  for (int i = 0; i < 100; ++i) {
    WriteRequest request = f.pair.write(i * 1000ull, i * 1000ull, 1000);
    request.how = with_imm(4);
    ASSERT_OK(f.pair.a.engine->write(request).status());
  }
  ASSERT_OK(f.pair.wait_imm(4, 100));
  EXPECT_EQ(std::memcmp(f.pair.a.buffer.data(), f.pair.b.buffer.data(), 100000), 0);
}

TEST(TransferFault, DoubledMessagesArriveOnceAndInOrder) {
  Faulty f;
  FaultPlan plan{.seed = 9, .duplicate = 0.5, .reorder = 0.5, .delay = 0.2};
  f.network->set_plan(plan);
  for (uint8_t i = 0; i < 100; ++i) {
    f.pair.a.buffer.data()[0] = i;
    auto send = *f.pair.a.engine->send(f.pair.b_at_a, f.pair.a.memory, 0, 1, {});
    ASSERT_OK(f.pair.a.engine->wait(send, soon()));
  }
  for (uint8_t i = 0; i < 100; ++i) {
    auto receive = *f.pair.b.engine->recv(f.pair.a_at_b, f.pair.b.memory, 0, 1, {});
    ASSERT_OK(f.pair.b.engine->wait(receive, soon()));
    EXPECT_EQ(f.pair.b.buffer.data()[0], i);
  }
  f.network->set_plan({});
}

TEST(TransferFault, DoubledImmediateIsSeenInTheCount) {
  Faulty f;
  f.plan({.duplicate = 1});
  WriteRequest request = f.pair.write(0, 0, 100);
  request.how = with_imm(2);
  ASSERT_OK(f.pair.a.engine->write(request).status());
  ASSERT_OK(f.pair.wait_imm(2, 2));  // a reliable network never does this; a test that expects 1 can see 2
}

// Finds out soon who is silent, but not so soon that a thread waiting for its turn on a busy machine counts
// as such.
Options impatient() {
  Options options;
  options.heartbeat_s = 0.02;
  options.peer_dead_s = 1;
  return options;
}
// Longer than a silence may last.
void outwait_heartbeats() {
  std::this_thread::sleep_for(std::chrono::duration<double>(1.5 * impatient().peer_dead_s));
}
// Finds out only what an operation tells.
Options patient() {
  Options options;
  options.heartbeat_s = options.peer_dead_s = 10 * kPatience_s;
  return options;
}

TEST(TransferFault, SilentPeerIsFoundByItsHeartbeatAndFailsExactlyItsOwn) {
  auto network = std::make_shared<Loopback>();
  Pair pair(network, 1, 1, 1000, impatient());
  Side c = Side::open(network, 1, 1000, Pair::named(impatient(), "c"));
  auto c_at_a = *pair.a.engine->connect(c.engine->address(), soon());
  auto c_remote = *pair.a.engine->attach(c.descriptor(), soon());
  auto from_b = *pair.a.engine->recv(pair.b_at_a, pair.a.memory, 0, 10, {});
  auto from_c = *pair.a.engine->recv(c_at_a, pair.a.memory, 0, 10, {});
  auto imm_of_b = *pair.a.engine->imm_counter(pair.b_at_a, 1);
  network->kill(rail_of(pair.b, 0));
  const Status status = pair.a.engine->wait(from_b, soon());
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_THAT(status.message(), HasSubstr("peer 'b' is lost: no sign of life for 1 s"));
  EXPECT_THAT(pair.a.engine->wait_imm(imm_of_b, 1, soon()).message(), HasSubstr("peer 'b' is lost"));
  EXPECT_FALSE(from_c->is_finished());
  auto fine = *pair.a.engine->write({pair.a.memory, 0, c_remote, 0, 100, {}});
  EXPECT_OK(pair.a.engine->wait(fine, soon()));
  EXPECT_TRUE(c_at_a->is_alive());
  EXPECT_EQ(pair.a.engine->write(pair.write(0, 0, 10)).status().code(), Code::kPeerLost);
  c.engine->close();
}

// What was sent to the dead never comes back; it must not use up what the living need.
TEST(TransferFault, ManyDeadPeersLeaveRoomForMessages) {
  auto network = std::make_shared<Loopback>();
  Side a = Side::open(network, 1, 1000, Pair::named(impatient(), "a"));
  Options silent = Pair::named(impatient(), "victim");
  silent.has_worker = false;  // takes nothing any more once it is connected
  std::vector<Side> victims;
  std::vector<std::shared_ptr<Peer>> peers;
  for (int i = 0; i < 20; ++i) {
    victims.push_back(Side::open(network, 1, 1000, silent));
    ASSERT_OK(victims.back().engine->connect(a.engine->address(), soon()).status());
    auto peer = a.engine->connect(victims.back().engine->address(), soon());
    ASSERT_OK(peer.status());
    peers.push_back(*peer);
    for (int k = 0; k < 4; ++k) (void)a.engine->send(*peer, a.memory, 0, 10, {});
  }
  for (auto& peer : peers) ASSERT_TRUE(wait_until(soon(), [&] { return !peer->is_alive(); }));
  Side b = Side::open(network, 1, 1000, Pair::named(impatient(), "b"));
  auto peer = a.engine->connect(b.engine->address(), soon());
  ASSERT_OK(peer.status());
  auto send = *a.engine->send(*peer, a.memory, 0, 10, {});
  EXPECT_OK(a.engine->wait(send, soon()));
  a.engine->close();
  b.engine->close();
}

struct TwoRails {
  std::shared_ptr<Loopback> network = std::make_shared<Loopback>();
  Pair pair;
  explicit TwoRails(Options options = impatient()) : pair(network, 2, 2, 300000, options) {}

  // One write over all rails, and whether it arrived.
  Status write_all(uint32_t imm) {
    pair.a.buffer.randomize(imm);
    WriteRequest request = pair.write(0, 0, 300000);
    request.how = with_imm(imm);
    request.how.timeout_s = kPatience_s;
    WEFT_TRY_ASSIGN(auto transfer, pair.a.engine->write(request));
    WEFT_TRY(pair.a.engine->wait(transfer, soon()));
    WEFT_TRY(pair.wait_imm(imm, 1));
    const bool is_equal = std::memcmp(pair.a.buffer.data(), pair.b.buffer.data(), 300000) == 0;
    return is_equal ? Status() : Status::make(Code::kSystem, "arrived damaged");
  }
  Status exchange_message() {
    WEFT_TRY_ASSIGN(auto sent, pair.a.engine->send(pair.b_at_a, pair.a.memory, 0, 100, {}));
    WEFT_TRY_ASSIGN(auto came, pair.b.engine->recv(pair.a_at_b, pair.b.memory, 0, 100, {}));
    WEFT_TRY(pair.a.engine->wait(sent, soon()));
    return pair.b.engine->wait(came, soon());
  }
};

TEST(TransferFault, BrokenRailIsLeftAndTheOthersCarryItsTraffic) {
  for (size_t broken : {0, 1}) {
    TwoRails t(patient());
    ASSERT_OK(t.write_all(1));
    t.network->unplug(rail_of(t.pair.b, broken));
    EXPECT_THAT(t.write_all(2).message(), HasSubstr("to peer 'b' on loop0: loopback: no link"));
    EXPECT_TRUE(t.pair.b_at_a->is_alive());
    for (uint32_t imm = 3; imm < 20; ++imm) ASSERT_OK(t.write_all(imm));
    EXPECT_OK(t.exchange_message());
    EXPECT_OK(t.pair.a.engine->unregister(t.pair.a.memory, soon()));
  }
}

TEST(TransferFault, HeartbeatsNeedABrokenRailNoMore) {
  for (size_t broken : {0, 1}) {
    TwoRails t;
    t.network->unplug(rail_of(t.pair.b, broken));
    outwait_heartbeats();
    EXPECT_TRUE(t.pair.b_at_a->is_alive());
    EXPECT_TRUE(t.pair.a_at_b->is_alive());
    (void)t.write_all(1);  // fails, unless a heartbeat has found the rail broken before
    EXPECT_OK(t.write_all(2));
  }
}

TEST(TransferFault, SilentRailIsLeftAndTheOthersCarryItsTraffic) {
  for (size_t silent : {0, 1}) {
    TwoRails t;
    ASSERT_OK(t.write_all(1));
    t.network->kill(rail_of(t.pair.b, silent));
    (void)t.write_all(2);  // fails, unless a heartbeat has found the rail silent before
    EXPECT_TRUE(t.pair.b_at_a->is_alive());
    for (uint32_t imm = 3; imm < 20; ++imm) ASSERT_OK(t.write_all(imm));
    EXPECT_OK(t.exchange_message());
  }
}

// Messages that a broken rail held are sent again by another one, and arrive once and in order: those that b
// has not taken when its rail falls silent, and those of which a never hears that b has.
TEST(TransferFault, MessagesSurviveABrokenRail) {
  for (const bool has_come : {false, true}) {
    TwoRails t;
    std::vector<std::shared_ptr<Transfer>> sent;
    {
      const Standstill b_takes_nothing(t.pair.b);
      for (uint8_t i = 0; i < 20; ++i) {
        t.pair.a.buffer.data()[i] = i;
        sent.push_back(*t.pair.a.engine->send(t.pair.b_at_a, t.pair.a.memory, i, 1, {}));
      }
      t.network->kill(rail_of(has_come ? t.pair.a : t.pair.b, 0));
    }
    for (uint8_t i = 0; i < 20; ++i) {
      auto came = *t.pair.b.engine->recv(t.pair.a_at_b, t.pair.b.memory, 0, 1, {});
      ASSERT_OK(t.pair.b.engine->wait(came, soon()));
      EXPECT_EQ(t.pair.b.buffer.data()[0], i);
    }
    for (auto& transfer : sent) EXPECT_OK(t.pair.a.engine->wait(transfer, soon()));
    EXPECT_OK(t.exchange_message());  // and nothing else was left to receive
    EXPECT_EQ(t.pair.b.buffer.data()[19], 19);
  }
}

TEST(TransferFault, PagesTakeTheRailsThatAreLeft) {
  TwoRails t(patient());
  t.network->unplug(rail_of(t.pair.b, 1));
  EXPECT_FALSE(t.write_all(1).ok());
  t.pair.a.buffer.randomize(9);
  Pages pages{0, 1000, {}, 300};
  auto written = t.pair.a.engine->write_pages(
      {t.pair.a.memory, pages, t.pair.remote, {0, 1000, {}, 300}, 1000, with_imm(30, Notify::kEach)});
  ASSERT_OK(written.status());
  ASSERT_OK(t.pair.wait_imm(30, 300));
  EXPECT_EQ(std::memcmp(t.pair.a.buffer.data(), t.pair.b.buffer.data(), 300000), 0);
}

TEST(TransferFault, LastRailTakesThePeerAlong) {
  TwoRails t(patient());
  t.network->unplug(rail_of(t.pair.b, 0));
  t.network->unplug(rail_of(t.pair.b, 1));
  EXPECT_FALSE(t.write_all(1).ok());
  EXPECT_TRUE(wait_until(soon(), [&] { return !t.pair.b_at_a->is_alive(); }));
  EXPECT_THAT(t.pair.b_at_a->why().message(), HasSubstr("no link"));
}

TEST(TransferFault, ConnectFindsTheRailThatWorks) {
  auto network = std::make_shared<Loopback>();
  Side a = Side::open(network, 2, 100, Pair::named(impatient(), "a"));
  Side b = Side::open(network, 2, 100, Pair::named(impatient(), "b"));
  network->kill(rail_of(b, 0));
  auto peer = a.engine->connect(b.engine->address(), soon());
  ASSERT_OK(peer.status());
  auto remote = a.engine->attach(b.descriptor(), soon());
  EXPECT_OK(remote.status());
  a.engine->close();
  b.engine->close();
}

TEST(TransferFault, QuietPeersStayAliveByTheirHeartbeats) {
  auto network = std::make_shared<Loopback>();
  Pair pair(network, 1, 1, 1000, impatient());
  outwait_heartbeats();
  EXPECT_TRUE(pair.b_at_a->is_alive());
  EXPECT_TRUE(pair.a_at_b->is_alive());
}

TEST(TransferFault, ConnectToNobodyGivesUpInTime) {
  auto network = std::make_shared<Loopback>();
  Side a = Side::open(network, 1, 100), b = Side::open(network, 1, 100);
  const std::string address = b.engine->address();
  network->kill(parse_address(address)->rails[0]);
  const auto peer = a.engine->connect(address, soon(0.3));
  EXPECT_EQ(peer.status().code(), Code::kPeerLost);
  EXPECT_THAT(peer.status().message(), HasSubstr("no answer of peer 'side'"));
  a.engine->close();
  b.engine->close();
}

TEST(TransferFault, UnregisterNamesWhoDoesNotConfirm) {
  auto network = std::make_shared<Loopback>();
  Options slow;
  slow.peer_dead_s = 30;
  Pair pair(network, 1, 1, 1000, slow);
  network->kill(rail_of(pair.a, 0));
  const Status status = pair.b.engine->unregister(pair.b.memory, soon(0.2));
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_THAT(status.message(), HasSubstr("no answer of: 'a'"));
  EXPECT_FALSE(pair.b.memory->is_registered());
}

TEST(TransferFault, CancelledWriteIsQuietOnceItHasEnded) {
  Faulty f;
  std::shared_ptr<Transfer> transfer;
  {
    const Standstill b_takes_nothing(f.pair.b);
    transfer = *f.pair.a.engine->write(f.pair.write(0, 0, 100));
    EXPECT_EQ(f.pair.a.engine->cancel(transfer), Phase::kPosted);
    EXPECT_EQ(transfer->phase(), Phase::kDraining);
  }
  EXPECT_FALSE(f.pair.a.engine->wait(transfer, soon()).ok());
  EXPECT_EQ(transfer->phase(), Phase::kCancelled);
}

// A burst of small writes over rail 0, of which all but the first few travel in one message.
struct Burst {
  static constexpr size_t kWrites = 64, kLater = 40;  // one of those that travel together
  static constexpr uint64_t kBytes = 64;
  std::shared_ptr<Loopback> network;
  Pair pair;
  std::vector<std::shared_ptr<Transfer>> writes;

  explicit Burst(uint32_t rails = 1)
      : network(std::make_shared<Loopback>(options())),
        pair(network, rails, rails, kBytes * kWrites, patient()) {
    pair.a.buffer.randomize(1);
  }
  static Loopback::Options options() {
    Loopback::Options made;
    made.pages_per_post = 100;
    made.caps.pages_apart = true;
    return made;
  }
  // Returns once the network has them all. They are submitted during a standstill: else how many go alone,
  // and which ones are not posted yet, is up to the thread that happens to make progress.
  void start(FaultPlan plan, std::function<void(size_t, How&)> change = {}) {
    plan.spare_messages = true;
    network->set_plan(plan);
    {
      const Standstill all_at_once(pair.a);
      for (size_t i = 0; i < kWrites; ++i) {
        WriteRequest request = pair.write(kBytes * i, kBytes * i, kBytes);
        request.how.rail = 0;
        request.how.timeout_s = kPatience_s;
        if (change) change(i, request.how);
        writes.push_back(*pair.a.engine->write(request));
      }
    }
    const auto is_posted = [](const auto& write) { return write->phase() >= Phase::kPosted; };
    EXPECT_TRUE(wait_until(soon(), [&] { return std::all_of(writes.begin(), writes.end(), is_posted); }));
  }
  // How many ended as `phase`: each with its bytes there if it is done, and with `why` and the peer's name if
  // it failed.
  size_t ended_as(Phase phase, const char* why = "") {
    size_t count = 0;
    for (size_t i = 0; i < kWrites; ++i) {
      const Status status = pair.a.engine->wait(writes[i], soon());
      if (writes[i]->phase() == Phase::kDone) EXPECT_TRUE(has_arrived(i)) << i;
      if (writes[i]->phase() == Phase::kFailed)
        EXPECT_THAT(status.message(), AllOf(HasSubstr("peer 'b'"), HasSubstr(why))) << i;
      count += writes[i]->phase() == phase;
    }
    return count;
  }
  bool has_arrived(size_t i) {
    return std::memcmp(pair.a.buffer.data() + kBytes * i, pair.b.buffer.data() + kBytes * i, kBytes) == 0;
  }
  void expect_that_it_goes_on() {
    network->set_plan({});
    WriteRequest request = pair.write(0, 0, 100);
    request.how = with_imm(1);
    ASSERT_OK(pair.a.engine->write(request).status());
    EXPECT_OK(pair.wait_imm(1, 1));
  }
};

TEST(TransferFault, LateWriteLeavesTheOthersOfItsMessage) {
  Burst burst;
  {
    const Standstill b_takes_nothing(burst.pair.b);
    burst.start({}, [](size_t i, How& how) {
      if (i == Burst::kLater) how.timeout_s = 0.1;
    });
    const Status late = burst.pair.a.engine->wait(burst.writes[Burst::kLater], soon());
    EXPECT_EQ(late.code(), Code::kPeerLost);
    EXPECT_THAT(late.message(), HasSubstr("for peer 'b': expected 1 pieces done, saw 0"));
    for (size_t i = 0; i < Burst::kWrites; ++i)
      EXPECT_EQ(burst.writes[i]->is_finished(), i == Burst::kLater) << i;
  }
  EXPECT_EQ(burst.ended_as(Phase::kDone), Burst::kWrites - 1);
  EXPECT_EQ(burst.writes[Burst::kLater]->phase(), Phase::kFailed);
  burst.expect_that_it_goes_on();
}

TEST(TransferFault, LostMessageFailsAllItsWritesByTheirDeadlines) {
  Burst burst;
  burst.start({.drop = 1}, [](size_t i, How& how) { how.timeout_s = i < Burst::kLater ? 0.1 : 0.3; });
  EXPECT_EQ(burst.ended_as(Phase::kFailed, "expected 1 pieces done, saw 0"), Burst::kWrites);
  burst.expect_that_it_goes_on();
}

TEST(TransferFault, CancelledWriteLeavesTheOthersOfItsMessage) {
  Burst burst;
  {
    const Standstill b_takes_nothing(burst.pair.b);
    burst.start({});
    EXPECT_EQ(burst.pair.a.engine->cancel(burst.writes[Burst::kLater]), Phase::kPosted);
  }
  EXPECT_EQ(burst.ended_as(Phase::kDone), Burst::kWrites - 1);
  EXPECT_EQ(burst.writes[Burst::kLater]->phase(), Phase::kCancelled);
  burst.expect_that_it_goes_on();
}

TEST(TransferFault, RefusedMessageFailsAllItsWrites) {
  Burst burst;
  burst.start({.fail = 1});
  EXPECT_EQ(burst.ended_as(Phase::kFailed, "loopback: damaged"), Burst::kWrites);
  burst.expect_that_it_goes_on();
}

TEST(TransferFault, GatheredWritesFailWithTheirPeer) {
  Burst burst;
  burst.start({.drop = 1});
  burst.pair.b.engine->close();
  EXPECT_EQ(burst.ended_as(Phase::kFailed, "it closed its engine"), Burst::kWrites);
}

TEST(TransferFault, GatheredWritesFailWithTheirRail) {
  Burst burst(2);
  burst.start({.drop = 1});
  burst.network->set_plan({});
  burst.network->unplug(rail_of(burst.pair.b, 0));
  WriteRequest request = burst.pair.write(0, 0, 100);
  request.how.rail = 0;
  auto finder = *burst.pair.a.engine->write(request);  // finds the rail broken, and is lost with it
  EXPECT_EQ(burst.ended_as(Phase::kFailed, "on loop0: loopback: no link"), Burst::kWrites);
  EXPECT_FALSE(burst.pair.a.engine->wait(finder, soon()).ok());
  EXPECT_TRUE(burst.pair.b_at_a->is_alive());
  burst.expect_that_it_goes_on();
}

// Strangers may send anything: the engine must not care.
TEST(TransferFault, GarbageFromTheNetworkIsDropped) {
  auto network = std::make_shared<Loopback>();
  Pair pair(network, 1, 1, 1000);
  auto opened = network->open(network->probe()[0], {});
  const std::unique_ptr<provider::Rail> stranger = std::move(*opened);
  const provider::Route to_b = *stranger->resolve(parse_address(pair.b.engine->address())->rails[0]);
  std::mt19937 random(7);
  const std::string real =
      to_bytes(MessageHead{MessageType::kHello, random_id(), 1, 0, 0}, std::string(100, 'x'));
  provider::Context contexts[300];
  for (int i = 0; i < 300; ++i) {
    std::string bytes = i % 2 ? real : std::string(random() % 300, '\0');
    for (int k = 0; k < 4 && !bytes.empty(); ++k)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    while (stranger->post_send(to_b, bytes.data(), bytes.size(), nullptr, &contexts[i]) !=
           provider::Posted::kOk) {
      provider::Event events[8];
      (void)stranger->poll(events, 8);
    }
  }
  WriteRequest request = pair.write(0, 0, 100);
  request.how = with_imm(1);
  ASSERT_OK(pair.a.engine->write(request).status());
  EXPECT_OK(pair.wait_imm(1, 1));
}

// Ten seconds of random everything; the long run is tests/system/test_transfer_soak.py.
TEST(TransferFault, SoakAccountsForEveryByte) {
  auto network = std::make_shared<Loopback>();
  constexpr uint64_t kSlots = 16, kSlotBytes = 20000;
  Pair pair(network, 2, 1, kSlots * kSlotBytes);
  std::mt19937 random(11);
  uint64_t expected[kSlots] = {};
  const Deadline until = soon(5);
  network->set_plan({.seed = 3, .duplicate = 0, .reorder = 0.4, .delay = 0.1});
  while (!until.passed()) {
    pair.a.buffer.randomize(static_cast<uint32_t>(random()));
    std::memset(pair.b.buffer.data(), 0, pair.b.buffer.bytes());
    uint64_t sizes[kSlots];
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      sizes[slot] = random() % kSlotBytes;
      const uint64_t at = slot * kSlotBytes;
      if (random() % 3 == 0) {
        const uint64_t page = 1 + random() % 200;
        sizes[slot] = sizes[slot] / page * page;
        if (sizes[slot] == 0) sizes[slot] = page;
        Pages pages{at, page, {}, sizes[slot] / page};
        ASSERT_OK(pair.a.engine
                      ->write_pages({pair.a.memory, pages, pair.remote, pages, page,
                                     with_imm(static_cast<uint32_t>(slot))})
                      .status());
      } else {
        WriteRequest request = pair.write(at, at, sizes[slot]);
        request.how = with_imm(static_cast<uint32_t>(slot));
        ASSERT_OK(pair.a.engine->write(request).status());
      }
      ++expected[slot];
    }
    for (uint64_t slot = 0; slot < kSlots; ++slot) {
      ASSERT_OK(pair.wait_imm(static_cast<uint32_t>(slot), expected[slot]));
      ASSERT_EQ(std::memcmp(pair.a.buffer.data() + slot * kSlotBytes,
                            pair.b.buffer.data() + slot * kSlotBytes, sizes[slot]),
                0);
      ASSERT_EQ(pair.b.buffer.data()[slot * kSlotBytes + sizes[slot]], 0);
    }
  }
  EXPECT_TRUE(pair.b.buffer.guards_hold());
}

}  // namespace
}  // namespace weft::transfer::testing
