// SPDX-License-Identifier: Apache-2.0
//
// Connections of the verbs provider that break and are made again: nothing is lost, and no immediate comes twice.
#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <random>

#include "base/deadline.h"
#include "tests/conformance/fake_verbs.h"

namespace weft::transfer::testing {
namespace {

using provider::Context;
using provider::Event;
using provider::EventKind;
using provider::Piece;
using provider::Posted;
using provider::Rail;
using provider::Route;

constexpr uint32_t kWords = 64;

// A rail with words that the other one writes to, and what has come over it.
struct End {
  End() {
    const auto provider = make_fake_verbs();
    rail = std::move(*provider->open(provider->probe()[0], {}));
    memory = *rail->enroll({words.data(), sizeof words}, provider::kRemoteRead | provider::kRemoteWrite);
    for (Context& context : receives) (void)rail->post_recv(inbox.data(), inbox.size(), nullptr, &context);
  }
  void poll() {
    std::array<Event, 32> events;
    const size_t count = rail->poll(events.data(), events.size());
    for (size_t i = 0; i < count; ++i) take(events[i]);
  }
  void take(const Event& event) {
    switch (event.kind) {
      case EventKind::kImm:
        return imms.push_back(event.imm);
      case EventKind::kReceived:
        messages.push_back(inbox[0]);
        return (void)rail->post_recv(inbox.data(), inbox.size(), nullptr, event.context);
      case EventKind::kDone:
        return done.push_back(event.context);
      default:
        failed.push_back(event.text);
    }
  }

  std::array<uint64_t, kWords> words{};
  std::array<char, 8> inbox{};
  std::unique_ptr<Rail> rail;
  provider::Registration memory;
  std::array<Context, 8> receives;
  std::vector<uint32_t> imms;
  std::vector<char> messages;
  std::vector<Context*> done;
  std::vector<std::string> failed;
};

struct Ends {
  Ends() : a_to_b(*a.rail->resolve(b.rail->address())), b_to_a(*b.rail->resolve(a.rail->address())) {}
  template <class Ready>
  bool poll_until(Ready ready) {
    return wait_until(Deadline::after_s(120), ready, [&] {
      a.poll(), b.poll();
      return false;
    });
  }
  // Of word `i` of `from`, with immediate i.
  Posted write(End& from, End& to, Route route, uint32_t i, Context& context) {
    const Piece piece{&from.words[i % kWords], from.memory.lkey, to.memory.base + 8 * (i % kWords),
                      to.memory.rkey, 8};
    return from.rail->post_write(
        {.to = route, .piece = piece, .has_imm = true, .imm = i, .context = &context});
  }
  bool write_soon(End& from, End& to, Route route, uint32_t i, Context& context) {
    return poll_until([&] { return write(from, to, route, i, context) == Posted::kOk; });
  }

  End a, b;
  Route a_to_b, b_to_a;
};

std::vector<uint32_t> numbers(uint32_t count) {
  std::vector<uint32_t> all(count);
  std::iota(all.begin(), all.end(), 0u);
  return all;
}

TEST(VerbsRecovery, ImmediatesComeOnceEachAndInOrderWhereverTheWireIsCut) {
  for (const FakeVerbsCut how : {FakeVerbsCut::kBefore, FakeVerbsCut::kAfter})
    for (uint32_t every : {2u, 3u, 7u}) {
      Ends ends;
      const FakeVerbsCuts cuts([=](uint32_t i) { return i % every == 0 ? how : FakeVerbsCut::kNone; });
      std::array<Context, 20> contexts;
      for (uint32_t i = 0; i < contexts.size(); ++i) {
        ends.a.words[i] = 1000 + i;
        ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, i, contexts[i])) << i;
      }
      ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == contexts.size(); }))
          << ends.a.done.size();
      ASSERT_TRUE(ends.poll_until([&] { return ends.b.imms.size() >= contexts.size(); }));
      EXPECT_EQ(ends.b.imms, numbers(contexts.size())) << "cut one of " << every;
      EXPECT_TRUE(ends.a.failed.empty()) << ends.a.failed[0];
      for (uint32_t i = 0; i < contexts.size(); ++i) EXPECT_EQ(ends.b.words[i], 1000 + i);
    }
}

TEST(VerbsRecovery, BothWaysAtOnceUnderRandomCuts) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE(seed);
    Ends ends;
    std::minstd_rand random(seed + 1);
    const FakeVerbsCuts cuts([&](uint32_t) {
      const uint32_t drawn = random() % 8;
      return drawn == 0 ? FakeVerbsCut::kBefore : drawn == 1 ? FakeVerbsCut::kAfter : FakeVerbsCut::kNone;
    });
    std::array<Context, 40> to_b, to_a;
    uint32_t at_a = 0, at_b = 0;
    const bool are_done = ends.poll_until([&] {
      if (at_a < to_b.size() && ends.write(ends.a, ends.b, ends.a_to_b, at_a, to_b[at_a]) == Posted::kOk)
        ++at_a;
      if (at_b < to_a.size() && ends.write(ends.b, ends.a, ends.b_to_a, at_b, to_a[at_b]) == Posted::kOk)
        ++at_b;
      return ends.a.done.size() == to_b.size() && ends.b.done.size() == to_a.size();
    });
    ASSERT_TRUE(are_done) << ends.a.done.size() << " and " << ends.b.done.size();
    ASSERT_TRUE(ends.poll_until(
        [&] { return ends.b.imms.size() >= to_b.size() && ends.a.imms.size() >= to_a.size(); }));
    EXPECT_EQ(ends.b.imms, numbers(to_b.size()));
    EXPECT_EQ(ends.a.imms, numbers(to_a.size()));
    EXPECT_TRUE(ends.a.failed.empty() && ends.b.failed.empty());
  }
}

TEST(VerbsRecovery, MessagesAndReadsAreRepeatedToo) {
  Ends ends;
  Context message, read, again;
  char word = 'w';
  ends.b.words[5] = 77;
  ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 0, again));
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 1; }));
  const FakeVerbsCuts cuts([&](uint32_t i) { return i == 1 ? FakeVerbsCut::kAfter : FakeVerbsCut::kNone; });
  ASSERT_EQ(ends.a.rail->post_send(ends.a_to_b, &word, 1, ends.a.memory.lkey, &message), Posted::kOk);
  const Piece piece{&ends.a.words[9], ends.a.memory.lkey, ends.b.memory.base + 40, ends.b.memory.rkey, 8};
  ASSERT_EQ(ends.a.rail->post_read({.to = ends.a_to_b, .piece = piece, .context = &read}), Posted::kOk);
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 3; })) << ends.a.done.size();
  EXPECT_EQ(ends.b.messages, std::vector<char>{'w'});
  EXPECT_EQ(ends.a.words[9], 77u);
}

TEST(VerbsRecovery, AnOperationThatIsWrongFailsAloneAndSaysWhy) {
  Ends ends;
  Context wrong, right;
  ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 0, right));
  Piece piece{&ends.a.words[1], ends.a.memory.lkey, ends.b.memory.base + 8, ends.b.memory.rkey + 12345, 8};
  ASSERT_EQ(ends.a.rail->post_write({.to = ends.a_to_b, .piece = piece, .context = &wrong}), Posted::kOk);
  ASSERT_TRUE(ends.poll_until([&] { return !ends.a.failed.empty(); }));
  EXPECT_NE(ends.a.failed[0].find("status 10"), std::string::npos) << ends.a.failed[0];
  ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 1, right));
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 2; }));
  EXPECT_EQ(ends.b.imms, numbers(2));
}

TEST(VerbsRecovery, WhatIsUnderWayFailsWithTheFirstCauseWhenThePeerHasGivenTheLinkUp) {
  Ends ends;
  std::array<Context, 4> contexts;
  ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 0, contexts[0]));
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 1; }));
  ends.b.rail->forget(ends.b_to_a);
  for (uint32_t i = 1; i < contexts.size(); ++i)
    ASSERT_EQ(ends.write(ends.a, ends.b, ends.a_to_b, i, contexts[i]), Posted::kOk);
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.failed.size() == 3; })) << ends.a.failed.size();
  for (const std::string& why : ends.a.failed) EXPECT_NE(why.find("status 12"), std::string::npos) << why;
  EXPECT_EQ(ends.write(ends.a, ends.b, ends.a_to_b, 1, contexts[1]), Posted::kFatal);
  EXPECT_TRUE(ends.a.rail->is_route_broken());
  EXPECT_NE(ends.a.rail->refusal().find("status 12"), std::string::npos) << ends.a.rail->refusal();
}

TEST(VerbsRecovery, AReceiveThatFailsIsTheCauseOfWhatItEnds) {
  Ends ends;
  std::array<Context, 3> contexts;
  ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 0, contexts[0]));
  ASSERT_TRUE(ends.write_soon(ends.b, ends.a, ends.b_to_a, 0, contexts[1]));
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() + ends.b.done.size() == 2; }));
  const FakeVerbsCuts cuts([](uint32_t) { return FakeVerbsCut::kReceive; });
  ASSERT_EQ(ends.write(ends.a, ends.b, ends.a_to_b, 1, contexts[0]), Posted::kOk);
  ASSERT_EQ(ends.write(ends.b, ends.a, ends.b_to_a, 1, contexts[2]),
            Posted::kOk);  // over a queue pair that has stopped
  ends.b.poll();
  ends.b.rail->forget(ends.b_to_a);
  ends.b.poll();
  ASSERT_EQ(ends.b.failed.size(), 1u);
  EXPECT_NE(ends.b.failed[0].find("status 1,"), std::string::npos) << ends.b.failed[0];
}

TEST(VerbsRecovery, ARailThatIsGoneIsNoticedWithoutATimeout) {
  Ends ends;
  Context context, later;
  ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 0, context));
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 1; }));
  ends.b.rail->release(ends.b.memory);
  ends.b.rail.reset();  // as when its process is killed: nothing is said
  const bool is_noticed = wait_until(
      Deadline::after_s(120),
      [&] { return ends.write(ends.a, ends.b, ends.a_to_b, 1, later) == Posted::kFatal; },
      [&] {
        ends.a.poll();
        return false;
      });
  ASSERT_TRUE(is_noticed);
  EXPECT_TRUE(ends.a.rail->is_route_broken());
}

TEST(VerbsRecovery, AnInterfaceThatWasDownIsUsedAgain) {
  Ends ends;
  std::array<Context, 5> contexts;
  for (uint32_t i = 0; i < contexts.size(); ++i) {
    ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, i, contexts[i])) << i;
    fake_verbs_stop();
  }
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == contexts.size(); })) << ends.a.done.size();
  EXPECT_EQ(ends.b.imms, numbers(contexts.size()));
}

TEST(VerbsRecovery, AJoinThatFailsHalfWayIsTriedAgain) {
  namespace ib = provider::ib;
  for (const int state : {IBV_QPS_RTR, IBV_QPS_RTS}) {
    Ends ends;
    fake_verbs_refuse_once(state);
    Context context;
    ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 0, context)) << state;
    ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 1; }));
  }
}

TEST(VerbsRecovery, QueuePairsOfBrokenConnectionsGo) {
  Ends ends;
  Context context;
  ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 0, context));
  ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 1; }));
  const size_t before = fake_verbs_queue_pairs();
  {
    const FakeVerbsCuts cuts([](uint32_t i) { return i <= 3 ? FakeVerbsCut::kBefore : FakeVerbsCut::kNone; });
    ASSERT_TRUE(ends.write_soon(ends.a, ends.b, ends.a_to_b, 1, context));
    ASSERT_TRUE(ends.poll_until([&] { return ends.a.done.size() == 2; }));
  }
  EXPECT_EQ(fake_verbs_queue_pairs(), before);
}

}  // namespace
}  // namespace weft::transfer::testing
