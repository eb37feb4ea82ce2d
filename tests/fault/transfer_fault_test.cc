// SPDX-License-Identifier: Apache-2.0
//
// The transfer engine over a network that misbehaves: lost, doubled, overtaking and refused packets, dead
// peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/conformance/transfer_fixture.h"

namespace weft::transfer::testing {
namespace {

using provider::FaultPlan;
using provider::Loopback;
using ::testing::HasSubstr;

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

Options impatient() {
  Options options;
  options.heartbeat_s = 0.02;
  options.peer_dead_s = 0.3;
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
  network->kill(parse_address(pair.b.engine->address())->rails[0]);
  const Status status = pair.a.engine->wait(from_b, soon());
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_THAT(status.message(), HasSubstr("peer 'b' is lost: no sign of life for 0.3 s"));
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
  Options options;
  options.heartbeat_s = 0.01;
  options.peer_dead_s = 0.08;
  Side a = Side::open(network, 1, 1000, Pair::named(options, "a"));
  for (int i = 0; i < 40; ++i) {
    Side victim = Side::open(network, 1, 1000, Pair::named(options, "victim"));
    auto peer = a.engine->connect(victim.engine->address(), soon());
    ASSERT_OK(peer.status());
    network->kill(parse_address(victim.engine->address())->rails[0]);
    for (int k = 0; k < 4; ++k) (void)a.engine->send(*peer, a.memory, 0, 10, {});
    ASSERT_TRUE(wait_until(soon(), [&] { return !(*peer)->is_alive(); }));
    victim.engine->close();
  }
  Side b = Side::open(network, 1, 1000, Pair::named(options, "b"));
  auto peer = a.engine->connect(b.engine->address(), soon());
  ASSERT_OK(peer.status());
  auto send = *a.engine->send(*peer, a.memory, 0, 10, {});
  EXPECT_OK(a.engine->wait(send, soon()));
  a.engine->close();
  b.engine->close();
}

struct TwoRails {
  std::shared_ptr<Loopback> network = std::make_shared<Loopback>();
  Pair pair{network, 2, 2, 300000, impatient()};
  std::string rail_of_b(size_t i) { return parse_address(pair.b.engine->address())->rails[i]; }

  // One write over all rails, and whether it arrived.
  Status write_all(uint32_t imm) {
    pair.a.buffer.randomize(imm);
    WriteRequest request = pair.write(0, 0, 300000);
    request.how = with_imm(imm);
    request.how.timeout_s = 2;
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
    TwoRails t;
    ASSERT_OK(t.write_all(1));
    t.network->unplug(t.rail_of_b(broken));
    // What was on its way there is lost, unless a heartbeat has found the rail broken before.
    if (const Status status = t.write_all(2); !status.ok())
      EXPECT_THAT(status.message(), HasSubstr("to peer 'b' on loop0: loopback: no link"));
    EXPECT_TRUE(t.pair.b_at_a->is_alive());
    for (uint32_t imm = 3; imm < 20; ++imm) ASSERT_OK(t.write_all(imm));
    EXPECT_OK(t.exchange_message());
    EXPECT_OK(t.pair.a.engine->unregister(t.pair.a.memory, soon()));
    std::this_thread::sleep_for(std::chrono::milliseconds(600));  // heartbeats need the rail no more
    EXPECT_TRUE(t.pair.b_at_a->is_alive());
    EXPECT_TRUE(t.pair.a_at_b->is_alive());
  }
}

TEST(TransferFault, SilentRailIsLeftAndTheOthersCarryItsTraffic) {
  for (size_t silent : {0, 1}) {
    TwoRails t;
    ASSERT_OK(t.write_all(1));
    t.network->kill(t.rail_of_b(silent));
    (void)t.write_all(2);  // fails, unless a heartbeat has found the rail silent before
    EXPECT_TRUE(t.pair.b_at_a->is_alive());
    for (uint32_t imm = 3; imm < 20; ++imm) ASSERT_OK(t.write_all(imm));
    EXPECT_OK(t.exchange_message());
  }
}

// Messages that a broken rail held are sent again by another one, and arrive once and in order.
TEST(TransferFault, MessagesSurviveABrokenRail) {
  TwoRails t;
  FaultPlan slow{.delay = 1, .delay_polls = 1000};
  t.network->set_plan(slow);
  std::vector<std::shared_ptr<Transfer>> sent;
  for (uint8_t i = 0; i < 20; ++i) {
    t.pair.a.buffer.data()[i] = i;
    sent.push_back(*t.pair.a.engine->send(t.pair.b_at_a, t.pair.a.memory, i, 1, {}));
  }
  t.network->kill(t.rail_of_b(0));
  t.network->set_plan({});
  for (uint8_t i = 0; i < 20; ++i) {
    auto came = *t.pair.b.engine->recv(t.pair.a_at_b, t.pair.b.memory, 0, 1, {});
    ASSERT_OK(t.pair.b.engine->wait(came, soon()));
    EXPECT_EQ(t.pair.b.buffer.data()[0], i);
  }
  for (auto& transfer : sent) EXPECT_OK(t.pair.a.engine->wait(transfer, soon()));
}

TEST(TransferFault, PagesTakeTheRailsThatAreLeft) {
  TwoRails t;
  t.network->unplug(t.rail_of_b(1));
  (void)t.write_all(1);
  t.pair.a.buffer.randomize(9);
  Pages pages{0, 1000, {}, 300};
  auto written = t.pair.a.engine->write_pages(
      {t.pair.a.memory, pages, t.pair.remote, {0, 1000, {}, 300}, 1000, with_imm(30, Notify::kEach)});
  ASSERT_OK(written.status());
  ASSERT_OK(t.pair.wait_imm(30, 300));
  EXPECT_EQ(std::memcmp(t.pair.a.buffer.data(), t.pair.b.buffer.data(), 300000), 0);
}

TEST(TransferFault, LastRailTakesThePeerAlong) {
  TwoRails t;
  t.network->unplug(t.rail_of_b(0));
  t.network->unplug(t.rail_of_b(1));
  EXPECT_FALSE(t.write_all(1).ok());
  EXPECT_TRUE(wait_until(soon(), [&] { return !t.pair.b_at_a->is_alive(); }));
  EXPECT_THAT(t.pair.b_at_a->why().message(), HasSubstr("no link"));
}

TEST(TransferFault, ConnectFindsTheRailThatWorks) {
  auto network = std::make_shared<Loopback>();
  Side a = Side::open(network, 2, 100, Pair::named(impatient(), "a"));
  Side b = Side::open(network, 2, 100, Pair::named(impatient(), "b"));
  network->kill(parse_address(b.engine->address())->rails[0]);
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
  std::this_thread::sleep_for(std::chrono::milliseconds(900));
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
  network->kill(parse_address(pair.a.engine->address())->rails[0]);
  const Status status = pair.b.engine->unregister(pair.b.memory, soon(0.2));
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_THAT(status.message(), HasSubstr("no answer of: 'a'"));
  EXPECT_FALSE(pair.b.memory->is_registered());
}

TEST(TransferFault, CancelledWriteIsQuietOnceItHasEnded) {
  Faulty f;
  f.plan({.delay = 1, .delay_polls = 2000});
  auto transfer = *f.pair.a.engine->write(f.pair.write(0, 0, 100));
  EXPECT_EQ(f.pair.a.engine->cancel(transfer), Phase::kPosted);
  EXPECT_EQ(transfer->phase(), Phase::kDraining);
  f.plan({});
  EXPECT_FALSE(f.pair.a.engine->wait(transfer, soon()).ok());
  EXPECT_EQ(transfer->phase(), Phase::kCancelled);
}

// A burst of small writes of which most travel in a few messages.
struct Burst {
  static constexpr size_t kWrites = 64;
  std::shared_ptr<Loopback> network;
  Pair pair;
  std::vector<std::shared_ptr<Transfer>> writes;

  explicit Burst(double timeout_s = kPatience_s, uint32_t rails = 1)
      : network(std::make_shared<Loopback>(options())),
        pair(network, rails, rails, 64 * kWrites, lasting(timeout_s)) {}
  static Options lasting(double timeout_s) {
    Options made;
    made.timeout_s = timeout_s;
    made.peer_dead_s = 10;
    return made;
  }
  static Loopback::Options options() {
    Loopback::Options made;
    made.pages_per_post = 100;
    made.caps.pages_apart = true;
    return made;
  }
  void start(FaultPlan plan, std::function<void(size_t, How&)> change = {}) {
    plan.spare_messages = true;
    network->set_plan(plan);
    for (size_t i = 0; i < kWrites; ++i) {
      WriteRequest request = pair.write(64 * i, 64 * i, 64);
      request.how.rail = 0;
      if (change) change(i, request.how);
      writes.push_back(*pair.a.engine->write(request));
    }
    pair.a.engine->progress();
  }
  // How many ended as `phase`, each with the peer's name in its error if that is a failure.
  size_t ended_as(Phase phase) {
    size_t count = 0;
    for (auto& transfer : writes) {
      const Status status = pair.a.engine->wait(transfer, soon());
      if (!status.ok() && transfer->phase() == Phase::kFailed)
        EXPECT_THAT(status.message(), HasSubstr("peer 'b'"));
      count += transfer->phase() == phase;
    }
    return count;
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
  Burst burst(1.5);
  burst.start({.drop = 1}, [](size_t i, How& how) { how.timeout_s = i == 40 ? 0.1 : 0; });
  const Status late = burst.pair.a.engine->wait(burst.writes[40], soon());
  EXPECT_EQ(late.code(), Code::kPeerLost);
  EXPECT_THAT(late.message(), HasSubstr("for peer 'b': expected 1 pieces done, saw 0"));
  EXPECT_FALSE(burst.writes[39]->is_finished());
  EXPECT_FALSE(burst.writes[41]->is_finished());
  EXPECT_EQ(burst.ended_as(Phase::kFailed), Burst::kWrites);
  burst.expect_that_it_goes_on();
}

TEST(TransferFault, CancelledWriteLeavesTheOthersOfItsMessage) {
  Burst burst;
  burst.start({.delay = 1, .delay_polls = 20000});
  EXPECT_EQ(burst.pair.a.engine->cancel(burst.writes[40]), Phase::kPosted);
  EXPECT_EQ(burst.ended_as(Phase::kDone), Burst::kWrites - 1);
  EXPECT_EQ(burst.writes[40]->phase(), Phase::kCancelled);
  burst.expect_that_it_goes_on();
}

TEST(TransferFault, RefusedMessageFailsAllItsWrites) {
  Burst burst;
  burst.start({.fail = 1});
  EXPECT_EQ(burst.ended_as(Phase::kFailed), Burst::kWrites);
  burst.expect_that_it_goes_on();
}

TEST(TransferFault, GatheredWritesFailWithTheirPeer) {
  Burst burst;
  burst.start({.drop = 1});
  burst.pair.b.engine->close();
  EXPECT_EQ(burst.ended_as(Phase::kFailed), Burst::kWrites);
}

TEST(TransferFault, GatheredWritesFailWithTheirRail) {
  Burst burst(kPatience_s, 2);
  burst.start({.drop = 1});
  burst.network->set_plan({});
  burst.network->unplug(parse_address(burst.pair.b.engine->address())->rails[0]);
  WriteRequest request = burst.pair.write(0, 0, 100);
  request.how.rail = 0;
  auto finder = *burst.pair.a.engine->write(request);  // finds the rail broken; it may be lost with it
  EXPECT_EQ(burst.ended_as(Phase::kFailed), Burst::kWrites);
  (void)burst.pair.a.engine->wait(finder, soon());
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
