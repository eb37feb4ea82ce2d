// SPDX-License-Identifier: Apache-2.0
//
// The model of a NIC, by entries that are written by hand: what it carries out, in which order, what it refuses and how,
// and that it notices what a NIC would not forgive. A model that lets mistakes pass would prove nothing.
#include "support/nic_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/deadline.h"

namespace weft {
namespace {

using ibgda::Completion;
using ibgda::Entry;
using ibgda::Heading;
using ibgda::kBlockBytes;
using ibgda::kSignalled;
using ibgda::Opcode;
using ibgda::Place;
using ibgda::QueueMemory;
using ibgda::Syndrome;
using ::testing::HasSubstr;
using testing::ModelNic;
using testing::NicModel;
using testing::NicPlan;

constexpr uint64_t kMemory = 64 << 10;
constexpr uint32_t kAll = testing::kAccessWrite | testing::kAccessAtomic | testing::kAccessRead;

// A NIC with memory and one queue, written by the test's thread.
struct End {
  End(NicModel& model, uint32_t blocks, uint32_t completions)
      : nic(model.open_model()),
        data(kMemory),
        pair(nic->create_queue(blocks, completions)),
        at(pair->memory()) {
    enrolled = nic->enroll_for(data.data(), kMemory, kAll);
    foreign = nic->enroll_for(data.data(), kMemory, kAll, 1);
  }
  ~End() {
    pair.reset();
    nic->release(enrolled);
    nic->release(foreign);
  }
  Place remote(uint64_t offset) const { return {enrolled.base + offset, big_endian(enrolled.remote_key)}; }
  Place local(uint64_t offset) const { return {enrolled.base + offset, big_endian(enrolled.local_key)}; }
  // The same memory, registered in another protection domain than the queue's.
  Place foreign_remote() const { return {foreign.base, big_endian(foreign.remote_key)}; }
  Place foreign_local() const { return {foreign.base, big_endian(foreign.local_key)}; }
  uint64_t* word(uint64_t offset) { return reinterpret_cast<uint64_t*>(data.data() + offset); }
  Heading heading(uint32_t flags = kSignalled) const {
    return {static_cast<uint32_t>(next), at.number, flags};
  }

  void put(const Entry& entry) {
    std::memcpy(at.ring + next % at.blocks * kBlockBytes, &entry, sizeof entry);
    ++next;
  }
  void ring() {
    store_release(at.record + 1, ibgda::record_word(next));
    store_register(at.doorbell, ibgda::doorbell_word(next, at.number));
  }
  const Completion& completion(uint64_t number) const {
    return reinterpret_cast<const Completion*>(at.completions)[number % at.entries];
  }
  // Whether entry `index`, whose completion is number `number`, is done.
  bool is_done(uint64_t number, uint64_t index) const {
    const uint32_t last = load_acquire(&completion(number).last);
    return ibgda::opcode_of(last) != ibgda::kNotYet && ibgda::index_of(last) == (index & 0xffff);
  }
  bool wait(uint64_t number, uint64_t index) const {
    return wait_until(Deadline::after_s(20), [&] { return is_done(number, index); });
  }
  // The first entry's syndrome.
  uint32_t outcome(uint64_t number, uint64_t index) const {
    if (!wait(number, index)) return 999;
    const Completion& made = completion(number);
    return ibgda::opcode_of(made.last) == ibgda::kRefused ? made.syndrome : 0;
  }

  std::unique_ptr<ModelNic> nic;
  std::vector<std::byte> data;
  std::unique_ptr<ibgda::QueuePair> pair;
  QueueMemory at;
  ibgda::Enrolled enrolled, foreign;
  uint64_t next = 0;
};

struct Two {
  explicit Two(NicPlan plan = {}, uint32_t blocks = 8, uint32_t completions = 8)
      : model(plan), a(model, blocks, completions), b(model, blocks, completions) {
    EXPECT_TRUE(a.pair->connect(b.pair->address()).ok());
    EXPECT_TRUE(b.pair->connect(a.pair->address()).ok());
  }
  NicModel model;
  End a, b;
};

Entry units_of(Heading at, Opcode opcode, std::initializer_list<Vec16> more, uint32_t immediate = 0) {
  Entry entry{};
  entry.units[0] = ibgda::control_unit(at, opcode, static_cast<uint32_t>(more.size() + 1), immediate);
  std::copy(more.begin(), more.end(), entry.units + 1);
  return entry;
}
Vec16 data_of(Place at, uint32_t bytes) {
  return ibgda::data_unit(at.address, at.key, bytes);
}
Vec16 remote_of(Place at) {
  return ibgda::remote_unit(at.address, at.key);
}

TEST(NicModel, EveryOperationDoesWhatItSays) {
  Two two;
  End &a = two.a, &b = two.b;
  for (uint64_t i = 0; i < 4096; ++i) a.data[i] = static_cast<std::byte>(i * 7);
  *b.word(8192) = 41;
  a.put(ibgda::write_entry(a.heading(), b.remote(512), a.local(0), 4096));
  a.put(ibgda::value_entry(a.heading(), b.remote(5000), 77));
  a.put(ibgda::add_entry(a.heading(), b.remote(8192), 3, a.local(9000)));
  a.put(units_of(a.heading(), Opcode::kRead, {remote_of(b.remote(512)), data_of(a.local(16384), 64)}));
  a.put(units_of(
      a.heading(), Opcode::kCompareSwap,
      {remote_of(b.remote(8192)), {{0, big_endian(9u), 0, big_endian(44u)}}, data_of(a.local(9008), 8)}));
  a.put(units_of(a.heading(), Opcode::kNop, {}));
  a.put(units_of(a.heading(), Opcode::kDump, {data_of(a.local(0), 64)}));
  a.ring();
  ASSERT_EQ(a.outcome(6, 6), 0u);
  EXPECT_EQ(std::memcmp(a.data.data(), b.data.data() + 512, 4096), 0);
  EXPECT_EQ(*b.word(5000), 77u);
  EXPECT_EQ(*a.word(9000), 41u);
  EXPECT_EQ(*a.word(9008), 44u);
  EXPECT_EQ(*b.word(8192), 9u);
  EXPECT_EQ(std::memcmp(a.data.data(), a.data.data() + 16384, 64), 0);
  EXPECT_EQ(two.model.failures(), "");
}

// One mistake each; the words that the failure must have. The entry comes back as one that the queue cannot carry out.
TEST(NicModel, MistakesAreNoticed) {
  const auto broken = [](const char* expected, const std::function<void(End&, End&)>& mistake) {
    Two two({.seed = 3});
    mistake(two.a, two.b);
    EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return !two.model.failures().empty(); })) << expected;
    EXPECT_THAT(two.model.failures(), HasSubstr(expected));
    EXPECT_THAT(two.model.failures(), HasSubstr("seed 3"));
  };
  const auto changed = [&](const char* expected, int unit, int word, uint32_t bits) {
    broken(expected, [&](End& a, End& b) {
      Entry entry = ibgda::add_entry(a.heading(), b.remote(0), 1, a.local(0));
      entry.units[unit].words[word] ^= bits;
      a.put(entry);
      a.ring();
    });
  };
  changed("opmod", 0, 0, 1u);
  changed("index", 0, 0, big_endian(1u << 8));
  changed("queue", 0, 1, big_endian(1u << 31));
  changed("opcode", 0, 1, big_endian(1u));
  changed("signature", 0, 2, 1u);
  changed("signature or stream channel", 0, 2, 1u << 16);
  changed("flags", 0, 2, 1u << 24);
  changed("fence", 0, 2, 5u << 29);
  changed("immediate", 0, 3, 1u);
  changed("reserved", 1, 3, 1u);
  changed("compare", 2, 2, 1u);
  changed("31 bits", 3, 0, big_endian(1u << 31));
  changed("atomic of", 3, 0, big_endian(1u));
  broken("padding", [](End& a, End& b) {
    Entry entry = ibgda::value_entry(a.heading(), b.remote(0), 1);
    entry.units[2].words[3] = 1;
    a.put(entry);
    a.ring();
  });
  broken("before its record", [](End& a, End& b) {
    a.put(ibgda::value_entry(a.heading(), b.remote(0), 1));
    store_register(a.at.doorbell, ibgda::doorbell_word(1, a.at.number));
  });
  broken("doorbell", [](End& a, End& b) {
    a.put(ibgda::value_entry(a.heading(), b.remote(0), 1));
    store_release(a.at.record + 1, ibgda::record_word(1));
    store_register(a.at.doorbell, ibgda::doorbell_word(1, b.at.number));
  });
  broken("the ring has", [](End& a, End& b) {
    for (int i = 0; i < 9; ++i) a.put(ibgda::value_entry(a.heading(), b.remote(0), 1));
    a.ring();
  });
  broken("record of receives", [](End& a, End& b) {
    store_release(a.at.record, 1u);
    a.put(ibgda::value_entry(a.heading(), b.remote(0), 1));
    a.ring();
  });
}

#if !defined(__SANITIZE_THREAD__)  // which sees these as the races that they are
TEST(NicModel, AnEntryThatChangesIsNoticed) {
  Two two({.seed = 5});
  two.model.hold(true);
  two.a.put(ibgda::value_entry(two.a.heading(), two.b.remote(0), 1));
  two.a.ring();
  ASSERT_TRUE(wait_until(Deadline::after_s(10), [&] { return two.model.doorbells() == 1; }));
  store_relaxed(reinterpret_cast<uint64_t*>(two.a.at.ring) + 6, uint64_t{1});  // beyond what the entry uses
  two.model.hold(false);
  ASSERT_TRUE(two.a.wait(0, 0));
  EXPECT_THAT(two.model.failures(), HasSubstr("entry 0 changed"));
}

// A write may pass while this thread does not run, so that nothing changes: one of some is caught.
TEST(NicModel, ASourceThatChangesIsNoticed) {
  Two two({.seed = 5, .passes = 0.99, .keeps_sources = true});
  const Deadline deadline = Deadline::after_s(20);
  for (uint64_t round = 0; two.model.failures().empty() && !deadline.passed(); ++round) {
    two.a.put(ibgda::write_entry(two.a.heading(), two.b.remote(0), two.a.local(0), 32768));
    two.a.ring();
    ASSERT_TRUE(wait_until(deadline, [&] {
      for (uint64_t at = 0; at < 32768; at += 8) ++*two.a.word(at);
      return two.a.is_done(round, round);
    }));
  }
  EXPECT_THAT(two.model.failures(), HasSubstr("source changed"));
}

// Whoever polls the last bytes of a put sees them before others.
TEST(NicModel, BytesOfAPutComeInAnyOrder) {
  Two two({.seed = 9, .passes = 0.8});
  End &a = two.a, &b = two.b;
  constexpr uint64_t kBytes = 8192;
  uint64_t early = 0;
  for (uint64_t round = 1; round <= 400; ++round) {
    std::memset(a.data.data(), static_cast<int>(round), kBytes);
    a.put(ibgda::write_entry(a.heading(), b.remote(0), a.local(0), kBytes));
    a.ring();
    const uint64_t want = 0x0101010101010101u * (round & 255);
    ASSERT_TRUE(wait_until(Deadline::after_s(10), [&] { return load_relaxed(b.word(kBytes - 8)) == want; }));
    early += load_relaxed(b.word(0)) != want;
    ASSERT_TRUE(a.wait(round - 1, round - 1));
  }
  EXPECT_GT(early, 10u);
  EXPECT_EQ(two.model.failures(), "");
}

// A read's bytes are looked at when it is answered, which may be after a write behind it; a fence keeps that back.
TEST(NicModel, ReadsAreOvertakenButForFences) {
  for (const bool is_fenced : {false, true}) {
    Two two({.seed = 4, .passes = 0.7});
    End &a = two.a, &b = two.b;
    uint64_t overtaken = 0;
    for (uint64_t round = 0; round < 200; ++round) {
      *b.word(0) = 1;
      a.put(units_of(a.heading(), Opcode::kRead, {remote_of(b.remote(0)), data_of(a.local(64), 8)}));
      a.put(ibgda::value_entry(a.heading(kSignalled | (is_fenced ? ibgda::kFenced : 0)), b.remote(0), 2));
      a.ring();
      ASSERT_TRUE(a.wait(2 * round + 1, 2 * round + 1));
      overtaken += *a.word(64) == 2;
    }
    EXPECT_EQ(overtaken > 0, !is_fenced) << overtaken;
    EXPECT_EQ(two.model.failures(), "");
  }
}
#endif

TEST(NicModel, KeysBoundsAndAlignmentAreChecked) {
  struct Wrong {
    Syndrome expected;
    std::function<Entry(End&, End&)> entry;
  };
  const Wrong all[] = {
      {Syndrome::kLocalProtection,
       [](End& a, End& b) { return ibgda::write_entry(a.heading(), b.remote(0), b.remote(0), 64); }},
      {Syndrome::kLocalProtection,
       [](End& a, End& b) {
         return ibgda::write_entry(a.heading(), b.remote(0), a.local(kMemory - 48), 64);
       }},
      {Syndrome::kLocalLength,  // 0 bytes are 2^31
       [](End& a, End& b) { return ibgda::write_entry(a.heading(), b.remote(0), a.local(0), 0); }},
      {Syndrome::kRemoteAccess,
       [](End& a, End& b) { return ibgda::write_entry(a.heading(), b.local(0), a.local(0), 64); }},
      {Syndrome::kLocalProtection,
       [](End& a, End& b) { return ibgda::write_entry(a.heading(), b.remote(0), a.foreign_local(), 64); }},
      {Syndrome::kRemoteAccess,
       [](End& a, End& b) { return ibgda::write_entry(a.heading(), b.foreign_remote(), a.local(0), 64); }},
      {Syndrome::kRemoteAccess,
       [](End& a, End& b) { return ibgda::value_entry(a.heading(), b.remote(kMemory - 4), 1); }},
      {Syndrome::kRemoteAccess,
       [](End& a, End& b) { return ibgda::value_entry(a.heading(), a.remote(0), 1); }},
      {Syndrome::kRemoteInvalid,
       [](End& a, End& b) { return ibgda::add_entry(a.heading(), b.remote(4), 1, a.local(0)); }},
      {Syndrome::kReceiverNotReady, [](End& a, End& b) {
         return units_of(a.heading(), Opcode::kWriteImmediate,
                         {remote_of(b.remote(0)), data_of(a.local(0), 16)}, 5);
       }}};
  for (const Wrong& wrong : all) {
    Two two;
    std::memset(two.b.data.data(), 0x5a, kMemory);
    two.a.put(wrong.entry(two.a, two.b));
    two.a.put(ibgda::value_entry(two.a.heading(0), two.b.remote(0),
                                 1));  // comes back too, though it did not ask to
    two.a.ring();
    ASSERT_TRUE(two.a.wait(1, 1));
    EXPECT_EQ(two.a.outcome(0, 0), static_cast<uint32_t>(wrong.expected));
    EXPECT_EQ(two.a.outcome(1, 1), static_cast<uint32_t>(Syndrome::kFlushed));
    for (std::byte byte : two.b.data) ASSERT_EQ(byte, std::byte{0x5a});
    EXPECT_EQ(two.model.failures(), "");
  }
}

TEST(NicModel, IndicesWrapAndCompletionsAreSkipped) {
  for (const bool shares : {false, true}) {
    constexpr uint64_t kTimes = (1 << 16) + 500;
    Two two({.seed = 8, .passes = 0.1, .shares_completion = shares}, 32, shares ? 1 : 32);
    End &a = two.a, &b = two.b;
    uint64_t looks = 0;
    uint32_t before = 0;
    while (a.next < kTimes) {
      for (int i = 0; i < 16; ++i) a.put(ibgda::add_entry(a.heading(), b.remote(64), 1, a.local(0)));
      a.ring();
      const auto is_done = [&] {
        const uint32_t last = load_acquire(&a.completion(a.next - 1).last);
        looks += std::exchange(before, ibgda::index_of(last)) != ibgda::index_of(last);
        return ibgda::opcode_of(last) == ibgda::kCompleted &&
               ibgda::index_of(last) == ((a.next - 1) & 0xffff);
      };
      ASSERT_TRUE(wait_until(Deadline::after_s(10), is_done)) << a.next;
    }
    EXPECT_EQ(load_acquire(b.word(64)), a.next);
    EXPECT_EQ(two.model.failures(), "");
    EXPECT_TRUE(!shares || looks < kTimes) << looks;
  }
}

TEST(NicModel, TooManyCompletionsAreNoticed) {
  Two two({.seed = 2, .ignores_overrun = false}, 8, 2);
  for (int i = 0; i < 2; ++i) two.a.put(ibgda::value_entry(two.a.heading(), two.b.remote(0), 1));
  two.a.ring();
  ASSERT_TRUE(two.a.wait(1, 1));
  EXPECT_EQ(two.model.failures(), "");
  two.model.set_taken(two.a.at.number, 1);
  two.a.put(ibgda::value_entry(two.a.heading(), two.b.remote(0), 1));
  two.a.ring();
  ASSERT_TRUE(two.a.wait(2, 2));
  EXPECT_EQ(two.model.failures(), "");
  two.a.put(ibgda::value_entry(two.a.heading(), two.b.remote(0), 1));
  two.a.ring();
  ASSERT_TRUE(two.a.wait(3, 3));
  EXPECT_THAT(two.model.failures(), HasSubstr("overrun"));
}

TEST(NicModel, ADeadPeerIsAskedForAWhileAndAnOldOneIsNotReached) {
  Two two({.seed = 2, .retry_s = 0.1});
  two.model.kill_nic_of(two.b.at.number);
  const auto start = std::chrono::steady_clock::now();
  two.a.put(ibgda::value_entry(two.a.heading(), two.b.remote(0), 1));
  two.a.ring();
  EXPECT_EQ(two.a.outcome(0, 0), static_cast<uint32_t>(Syndrome::kRetryExceeded));
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(100));

  Two again({.seed = 2});  // begun anew at one end alone
  ASSERT_TRUE(again.b.pair->reset().ok());
  ASSERT_TRUE(again.b.pair->connect(again.a.pair->address()).ok());
  again.a.put(ibgda::value_entry(again.a.heading(), again.b.remote(0), 1));
  again.a.ring();
  EXPECT_EQ(again.a.outcome(0, 0), 0u) << "b still takes what comes from a";
  again.b.put(ibgda::value_entry(again.b.heading(), again.a.remote(0), 1));
  again.b.ring();
  EXPECT_EQ(again.b.outcome(0, 0), static_cast<uint32_t>(Syndrome::kRetryExceeded));
}

// Fetch-adds of several queues of one NIC's memory are whole; what a thread adds by itself meanwhile may be lost.
TEST(NicModel, AddsOfSeveralQueuesAreWhole) {
  NicModel model({.seed = 12, .threads = 3});
  constexpr uint32_t kWriters = 4, kTimes = 200;
  End target(model, 8, 8);
  std::vector<std::unique_ptr<End>> writers;
  std::vector<std::unique_ptr<ibgda::QueuePair>> others;
  for (uint32_t i = 0; i < kWriters; ++i) {
    writers.push_back(std::make_unique<End>(model, 256, 256));
    others.push_back(target.nic->create_queue(8, 8));
    ASSERT_TRUE(others.back()->connect(writers.back()->pair->address()).ok());
    ASSERT_TRUE(writers.back()->pair->connect(others.back()->address()).ok());
  }
  for (auto& writer : writers) {
    for (uint32_t i = 0; i < kTimes; ++i)
      writer->put(ibgda::add_entry(writer->heading(), target.remote(128), 3, writer->local(0)));
    writer->ring();
  }
  for (auto& writer : writers) ASSERT_TRUE(writer->wait(kTimes - 1, kTimes - 1));
  EXPECT_EQ(load_acquire(target.word(128)), 3u * kWriters * kTimes);
  EXPECT_EQ(model.failures(), "");
}

}  // namespace
}  // namespace weft
