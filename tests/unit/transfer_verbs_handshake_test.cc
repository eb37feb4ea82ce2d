// SPDX-License-Identifier: Apache-2.0
//
// How rails of the verbs provider find each other by datagrams that may be lost.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "base/deadline.h"
#include "providers/verbs/rail.h"
#include "tests/conformance/fake_verbs.h"

namespace weft::transfer::testing {
namespace {

namespace ib = provider::ib;
using provider::Context;
using provider::Event;
using provider::EventKind;
using provider::Place;
using provider::Posted;
using provider::Rail;
using provider::Route;

std::unique_ptr<Rail> open_rail(const std::string& secret = "") {
  const auto provider = make_fake_verbs();
  return std::move(*provider->open(provider->probe()[0], {0, 0, secret}));
}

void poll(Rail& rail) {
  std::array<Event, 32> events;
  (void)rail.poll(events.data(), events.size());
}

// One byte by a write without an immediate: refused for now until the link stands.
Posted try_write(Rail& rail, Route to, Context& context) {
  return rail.post_write({.to = to, .piece = {}, .context = &context});
}

TEST(VerbsHandshake, GreetingsThatArriveTogetherAreAllAnsweredAtOnce) {
  const FakeVerbsLoss none([](uint32_t) { return false; });
  const std::unique_ptr<Rail> one = open_rail();
  std::array<std::unique_ptr<Rail>, 8> many;
  std::array<Context, 8> contexts;
  std::array<Route, 8> routes;
  for (size_t i = 0; i < many.size(); ++i) {
    many[i] = open_rail();
    routes[i] = *many[i]->resolve(one->address());
    poll(*many[i]);  // sends its handshake
  }
  poll(*one);
  for (size_t i = 0; i < many.size(); ++i) {
    poll(*many[i]);
    EXPECT_EQ(try_write(*many[i], routes[i], contexts[i]), Posted::kOk) << i;
    poll(*many[i]);
  }
}

TEST(VerbsHandshake, WhoSendsIsKnownToBeUp) {
  // b's link comes up by a's first handshake, and every later word of a is lost.
  bool is_lost = false;
  const FakeVerbsLoss later([&](uint32_t) { return is_lost; });
  const std::unique_ptr<Rail> a = open_rail(), b = open_rail();
  const Route a_to_b = *a->resolve(b->address()), b_to_a = *b->resolve(a->address());
  poll(*a);
  poll(*b);
  poll(*a);
  is_lost = true;
  Context at_a, at_b;
  char word[8] = {};
  ASSERT_EQ(a->post_send(a_to_b, word, 0, nullptr, &at_a), Posted::kOk);
  poll(*b);
  EXPECT_EQ(try_write(*b, b_to_a, at_b), Posted::kOk);
  poll(*a);
  poll(*b);
}

// What is lost follows a pattern that rails whose handshakes keep step would run into again and again.
TEST(VerbsHandshake, LossInAPatternKeepsNobodyApart) {
  for (uint32_t period = 2; period <= 5; ++period)
    for (uint32_t lost = 0; lost < period; ++lost) {
      const FakeVerbsLoss some([=](uint32_t datagram) { return datagram % period == lost; });
      std::array<std::unique_ptr<Rail>, 3> rails = {open_rail(), open_rail(), open_rail()};
      std::array<std::array<Route, 3>, 3> routes{};
      std::array<std::array<Context, 3>, 3> contexts;
      for (size_t i = 0; i < 3; ++i)
        for (size_t j = 0; j < 3; ++j)
          if (i != j) routes[i][j] = *rails[i]->resolve(rails[j]->address());
      for (size_t i = 0; i < 3; ++i)
        for (size_t j = 0; j < 3; ++j) {
          if (i == j) continue;
          const bool came = wait_until(
              Deadline::after_s(20),
              [&] { return try_write(*rails[i], routes[i][j], contexts[i][j]) == Posted::kOk; },
              [&] {
                for (auto& rail : rails) poll(*rail);
                return false;
              });
          ASSERT_TRUE(came) << i << " to " << j << ", one of " << period << " is lost";
        }
      for (auto& rail : rails) poll(*rail);
    }
}

// Polls both until a write from one to the other was done. Nothing that was posted may fail.
void expect_write_arrives(Rail& from, Rail& to, Route route) {
  Context context;
  bool is_posted = false, is_done = false;
  const auto advance = [&] {
    const Posted posted = is_posted ? Posted::kOk : try_write(from, route, context);
    ASSERT_NE(posted, Posted::kFatal) << from.refusal();
    is_posted = posted == Posted::kOk;
    poll(to);
    std::array<Event, 32> events;
    const size_t count = from.poll(events.data(), events.size());
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(events[i].kind, EventKind::kDone) << events[i].text;
      is_done = is_done || events[i].context == &context;
    }
  };
  const bool came = wait_until(
      Deadline::after_s(20), [&] { return is_done || ::testing::Test::HasFatalFailure(); },
      [&] {
        advance();
        return false;
      });
  EXPECT_TRUE(came);
}

Route start_anew(Rail& rail, const std::string& place) {
  rail.forget(*rail.resolve(place));
  return *rail.resolve(place);
}

// Both sides start anew again and again, so that what was said to links that are gone is read by those after.
TEST(VerbsHandshake, WordsOfLinksThatAreGoneJoinNobody) {
  const FakeVerbsLoss none([](uint32_t) { return false; });
  std::minstd_rand random(7);
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const std::unique_ptr<Rail> a = open_rail(), b = open_rail();
    for (int step = 0; step < 12; ++step) {
      const bool is_a = random() % 2;
      if (random() % 2)
        poll(is_a ? *a : *b);
      else
        start_anew(is_a ? *a : *b, (is_a ? b : a)->address());
    }
    const Route a_to_b = start_anew(*a, b->address()), b_to_a = start_anew(*b, a->address());
    expect_write_arrives(*a, *b, a_to_b);
    expect_write_arrives(*b, *a, b_to_a);
  }
}

TEST(VerbsHandshake, ForgottenPeersLeaveNoQueuePairs) {
  const FakeVerbsLoss none([](uint32_t) { return false; });
  const std::unique_ptr<Rail> a = open_rail();
  const size_t before = fake_verbs_queue_pairs();
  for (int life = 0; life < 5; ++life) {
    const std::unique_ptr<Rail> b = open_rail();
    const Route to_b = *a->resolve(b->address()), to_a = *b->resolve(a->address());
    Context context;
    for (int i = 0; i < 4; ++i) poll(*a), poll(*b);
    ASSERT_EQ(try_write(*a, to_b, context), Posted::kOk);
    ASSERT_EQ(try_write(*b, to_a, context), Posted::kOk);
    poll(*a), poll(*b);
    a->forget(to_b);
    b->forget(to_a);
  }
  EXPECT_EQ(fake_verbs_queue_pairs(), before);
}

// Who speaks the NIC's protocol, knows a rail's address, and does not know the secret.
class Forger {
 public:
  Forger() {
    int count = 0;
    ibv_device** devices = ib_.get_device_list(&count);
    context_ = ib_.open_device(devices[0]);
    ib_.free_device_list(devices);
    pd_ = ib_.alloc_pd(context_);
    cq_ = ib_.create_cq(context_, 64, nullptr, nullptr, 0);
    ibv_qp_init_attr init{nullptr, cq_, cq_, nullptr, {64, 64, 1, 1, 0}, IBV_QPT_UD, 1};
    qp_ = ib_.create_qp(pd_, &init);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    ib_.modify_qp(qp_, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    attr.qp_state = IBV_QPS_RTR;
    ib_.modify_qp(qp_, &attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_RTS;
    ib_.modify_qp(qp_, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
  }
  ~Forger() {
    ib_.destroy_qp(qp_);
    ib_.destroy_cq(cq_);
    ib_.dealloc_pd(pd_);
    ib_.close_device(context_);
  }
  void send(const provider::Handshake& handshake, const Place& to) {
    ibv_sge part{reinterpret_cast<uint64_t>(&handshake), sizeof handshake, 0};
    ibv_send_wr wr{}, *bad = nullptr;
    wr.sg_list = &part;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.wr.ud.remote_qpn = to.handshake_qpn;
    wr.wr.ud.remote_qkey = to.qkey;
    EXPECT_EQ(context_->ops.post_send(qp_, &wr, &bad), 0);
  }

 private:
  ib::Library ib_ = fake_verbs_library();
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_qp* qp_ = nullptr;
};

Place place_of(const Rail& rail) {
  Place place;
  const std::string bytes = rail.address();
  std::memcpy(static_cast<void*>(&place), bytes.data(), sizeof place);
  return place;
}

TEST(VerbsHandshake, OfStrangersBreakNoLinkAndMakeNoQueuePair) {
  const FakeVerbsLoss none([](uint32_t) { return false; });
  const std::unique_ptr<Rail> a = open_rail("the secret"), b = open_rail("the secret");
  const Route a_to_b = *a->resolve(b->address()), b_to_a = *b->resolve(a->address());
  expect_write_arrives(*a, *b, a_to_b);
  Forger forger;
  const size_t before = fake_verbs_queue_pairs();
  for (uint32_t i = 0; i < 300; ++i) {
    provider::Handshake forged;
    forged.is_answer = i % 2;
    forged.from = place_of(*b);
    if (i % 3 == 0) forged.from.life += i;  // of nobody
    forged.qpn = 5000 + i;
    forged.number = 1000 + i;
    forged.proof[i % forged.proof.size()] = static_cast<uint8_t>(i);
    forger.send(forged, place_of(*a));
    poll(*a);
  }
  EXPECT_EQ(fake_verbs_queue_pairs(), before);
  expect_write_arrives(*a, *b, a_to_b);
  expect_write_arrives(*b, *a, b_to_a);
}

TEST(VerbsHandshake, OfAnotherJobJoinsNobody) {
  const FakeVerbsLoss none([](uint32_t) { return false; });
  const std::unique_ptr<Rail> a = open_rail("the secret"), stranger = open_rail("another");
  const Route to_a = *stranger->resolve(a->address());
  const size_t before = fake_verbs_queue_pairs();
  Context context;
  for (int i = 0; i < 50; ++i) poll(*stranger), poll(*a);
  EXPECT_EQ(try_write(*stranger, to_a, context), Posted::kAgain);
  EXPECT_EQ(fake_verbs_queue_pairs(), before);
}

TEST(VerbsHandshake, EachRailHasAKeyOfItsOwn) {
  const std::unique_ptr<Rail> a = open_rail(), b = open_rail();
  EXPECT_NE(place_of(*a).qkey, place_of(*b).qkey);
  EXPECT_EQ(place_of(*a).qkey >> 31, 0u);  // the operating system's
}

}  // namespace
}  // namespace weft::transfer::testing
