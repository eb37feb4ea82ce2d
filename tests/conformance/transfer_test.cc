// SPDX-License-Identifier: Apache-2.0
//
// What the transfer engine promises, over every provider that is usable here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <array>
#include <atomic>
#include <filesystem>

#include "providers/cuda/cuda.h"
#include "tests/conformance/fake_verbs.h"
#include "tests/conformance/transfer_fixture.h"

namespace weft::transfer::testing {

using ::testing::HasSubstr;

std::vector<Backend> backends() {
  auto loopback = [](auto change) {
    return [change]() -> Result<std::shared_ptr<provider::Provider>> {
      provider::Loopback::Options options;
      change(options);
      return std::shared_ptr<provider::Provider>(std::make_shared<provider::Loopback>(options));
    };
  };
  using O = provider::Loopback::Options;
  std::vector<Backend> all;
  all.push_back({"loopback", loopback([](O&) {})});
  all.push_back({"loopback_ordered", loopback([](O& o) { o.caps.ordered_writes = true; })});
  all.push_back({"loopback_unruly", loopback([](O& o) {
                   o.plan.reorder = 0.5;
                   o.plan.delay = 0.2;
                 }),
                 true});
  all.push_back({"loopback_tight", loopback([](O& o) {
                   o.caps.write_bytes_max = 1000;
                   o.caps.message_bytes_max = 1024;
                   o.caps.tx_depth = 5;
                 })});
  all.push_back({"loopback_no_imm", loopback([](O& o) { o.caps.write_imm = false; })});
  all.push_back({"loopback_by_route", loopback([](O& o) { o.caps.imm_bits = 32; })});
  all.push_back({"loopback_unproven", loopback([](O& o) {
                   o.caps.imm_bits = 32;
                   o.caps.source = provider::Source::kUnknown;
                 })});
  all.push_back({"loopback_packing", loopback([](O& o) { o.caps.packs_small_pages = true; })});
  all.push_back({"loopback_pages", loopback([](O& o) { o.pages_per_post = 100; })});
  all.push_back({"loopback_pages_apart", loopback([](O& o) {
                   o.pages_per_post = 100;
                   o.caps.pages_apart = true;
                 })});
  all.push_back(
      {"verbs_fake", []() -> Result<std::shared_ptr<provider::Provider>> { return make_fake_verbs(); }});
  all.push_back({"cuda_host_only", []() -> Result<std::shared_ptr<provider::Provider>> {
                   return provider::make_cuda({.host_only = true});
                 }});
  std::vector<const char*> names = {"cuda", "fabric:tcp", "fabric:shm"};
  std::error_code error;
  if (!std::filesystem::is_empty("/sys/class/infiniband", error) && !error)
    names.insert(names.end(), {"verbs", "fabric:verbs"});
  for (const char* name : names) {
    std::string label = name;
    std::replace(label.begin(), label.end(), ':', '_');
    all.push_back({label, [name] { return provider::find_provider(name); }});
  }
  return all;
}

class TransferTest : public OnBackend {};

INSTANTIATE_TEST_SUITE_P(All, TransferTest, ::testing::ValuesIn(backends()),
                         [](const auto& info) { return info.param.label; });

// A rail without an engine, with two receives of registered memory.
struct BareRail {
  static constexpr uint64_t kBytes = 1024;
  explicit BareRail(provider::Provider& provider) {
    for (const provider::Nic& nic : provider.probe())
      if (nic.usable() && !rail) rail = std::move(*provider.open(nic, {}));
    registration = *rail->enroll({memory.data(), memory.size()}, kLocal);
    for (size_t i = 0; i < receives.size(); ++i)
      rail->post_recv(&memory[i * kBytes], kBytes, registration.lkey, &receives[i]);
  }
  bool poll() {  // whether a message has come
    std::array<provider::Event, 8> events;
    const size_t count = rail->poll(events.data(), events.size());
    return std::any_of(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(count),
                       [](const auto& event) { return event.kind == provider::EventKind::kReceived; });
  }

  std::vector<char> memory = std::vector<char>(3 * kBytes);
  std::unique_ptr<provider::Rail> rail;
  provider::Registration registration;
  std::array<provider::Context, 2> receives;
  provider::Context sent;
};

TEST_P(TransferTest, WhatComesBeforeARailStopsReachesNoReleasedRegistration) {
  BareRail from(*provider_), to(*provider_);
  const provider::Route route = *from.rail->resolve(to.rail->address());
  const auto say = [&] {
    return from.rail->post_send(route, &from.memory[2 * BareRail::kBytes], 100, from.registration.lkey,
                                &from.sent) != provider::Posted::kAgain;
  };
  const auto poll_both = [&] { return from.poll(), to.poll(); };
  ASSERT_TRUE(wait_until(soon(), say, [&] { return poll_both(), false; }));
  ASSERT_TRUE(wait_until(soon(), poll_both));
  ASSERT_TRUE(wait_until(soon(), say, [&] { return from.poll(), false; }));
  wait_until(soon(0.2), [&] { return from.poll(), false; });  // it is there, and nobody looks
  mallopt(M_PERTURB, 0x5a);                                   // what is freed becomes garbage
  to.rail->stop();
  to.rail->release(to.registration);
  to.rail.reset();
  mallopt(M_PERTURB, 0);
  from.rail->stop();
  from.rail->release(from.registration);
}

TEST_P(TransferTest, WritesOfEverySizeArriveBeforeTheirImmediate) {
  Pair pair(provider_, 1, 1, 1 << 20);
  uint32_t imm = 0;
  for (uint64_t bytes : {0ull, 1ull, 7ull, 8ull, 64ull, 4095ull, 65537ull, (1ull << 20) - 32}) {
    pair.a.buffer.randomize(static_cast<uint32_t>(bytes));
    std::memset(pair.b.buffer.data(), 0xEE, pair.b.buffer.bytes());
    WriteRequest request = pair.write(3, 17, bytes);
    request.how = with_imm(++imm);
    auto transfer = pair.a.engine->write(request);
    ASSERT_OK(transfer.status());
    ASSERT_OK(pair.wait_imm(imm, 1));
    EXPECT_EQ(std::memcmp(pair.b.buffer.data() + 17, pair.a.buffer.data() + 3, bytes), 0) << bytes;
    EXPECT_EQ(pair.b.buffer.data()[16], 0xEE);
    EXPECT_EQ(pair.b.buffer.data()[17 + bytes], 0xEE);
    ASSERT_OK(pair.a.engine->wait(*transfer, soon()));
    EXPECT_EQ((*transfer)->bytes(), bytes);
  }
  EXPECT_TRUE(pair.b.buffer.guards_hold());
}

TEST_P(TransferTest, RailCountsNeedNotAgree) {
  for (auto [rails_a, rails_b] : {std::pair{2u, 2u}, {1u, 3u}, {3u, 1u}, {3u, 2u}}) {
    Pair pair(provider_, rails_a, rails_b, 300000);
    pair.a.buffer.randomize(rails_a * 10 + rails_b);
    WriteRequest request = pair.write(0, 0, 300000);
    request.how = with_imm(5);
    ASSERT_OK(pair.a.engine->write(request).status());
    ASSERT_OK(pair.wait_imm(5, 1));
    EXPECT_EQ(std::memcmp(pair.b.buffer.data(), pair.a.buffer.data(), 300000), 0)
        << rails_a << " to " << rails_b;
    request.how = with_imm(6, Notify::kEach);
    ASSERT_OK(pair.a.engine->write(request).status());
    ASSERT_OK(pair.wait_imm(6, expected_imms(300000, pair.a.engine->rail_plan())));
    ReadRequest read{pair.a.memory, 0, pair.remote, 100, 299000, {}};
    pair.b.buffer.randomize(99);
    auto transfer = pair.a.engine->read(read);
    ASSERT_OK(transfer.status());
    ASSERT_OK(pair.a.engine->wait(*transfer, soon()));
    EXPECT_EQ(std::memcmp(pair.b.buffer.data() + 100, pair.a.buffer.data(), 299000), 0);
  }
}

TEST_P(TransferTest, PagesLandWhereTheListsSay) {
  constexpr uint64_t kPage = 512, kPages = 300;
  Pair pair(provider_, 2, 1, kPage * kPages * 2);
  pair.a.buffer.randomize(1);
  std::mt19937 random(2);
  Pages src{0, kPage * 2, {}, 0}, dst{kPage, kPage, {}, 0};
  src.indices.resize(kPages);
  std::iota(src.indices.begin(), src.indices.end(), 0u);
  dst.indices = src.indices;
  std::shuffle(src.indices.begin(), src.indices.end(), random);
  std::shuffle(dst.indices.begin(), dst.indices.end(), random);
  uint64_t expected[] = {1, expected_page_imms(kPages, kPage, pair.a.engine->rail_plan())};
  for (Notify notify : {Notify::kOnce, Notify::kEach}) {
    std::memset(pair.b.buffer.data(), 0xEE, pair.b.buffer.bytes());
    const uint32_t imm = 10 + static_cast<uint32_t>(notify);
    auto written =
        pair.a.engine->write_pages({pair.a.memory, src, pair.remote, dst, kPage, with_imm(imm, notify)});
    ASSERT_OK(written.status());
    ASSERT_OK(pair.wait_imm(imm, expected[static_cast<int>(notify)]));
    ASSERT_OK(pair.a.engine->wait(*written, soon()));  // the source is free
    for (uint64_t i = 0; i < kPages; ++i)
      ASSERT_EQ(std::memcmp(pair.b.buffer.data() + dst.at(i), pair.a.buffer.data() + src.at(i), kPage), 0)
          << i;
    EXPECT_EQ(pair.b.buffer.data()[kPage - 1], 0xEE);
    EXPECT_EQ(pair.b.buffer.data()[kPage * (kPages + 1)], 0xEE);
  }
  // The same back, by reading.
  std::memset(pair.a.buffer.data(), 0, pair.a.buffer.bytes());
  auto read = pair.a.engine->read_pages({pair.a.memory, src, pair.remote, dst, kPage, {}});
  ASSERT_OK(read.status());
  ASSERT_OK(pair.a.engine->wait(*read, soon()));
  for (uint64_t i = 0; i < kPages; ++i)
    ASSERT_EQ(std::memcmp(pair.b.buffer.data() + dst.at(i), pair.a.buffer.data() + src.at(i), kPage), 0) << i;
}

TEST_P(TransferTest, ScatterReachesEveryTargetOnce) {
  Side a = Side::open(provider_, 2, 10000), b = Side::open(provider_, 1, 10000),
       c = Side::open(provider_, 2, 10000);
  a.buffer.randomize(3);
  std::vector<ScatterTarget> targets;
  std::vector<Side*> sides = {&b, &c};
  for (Side* side : sides) {
    ASSERT_OK(a.engine->connect(side->engine->address(), soon()).status());
    auto remote = a.engine->attach(side->descriptor(), soon());
    ASSERT_OK(remote.status());
    targets.push_back({*remote, 10, targets.size() * 3000, 2500 + targets.size()});
  }
  auto transfer = a.engine->scatter({a.memory, targets, with_imm(77)});
  ASSERT_OK(transfer.status());
  ASSERT_OK(a.engine->wait(*transfer, soon()));
  for (size_t i = 0; i < sides.size(); ++i) {
    auto peer = sides[i]->engine->connect(a.engine->address(), soon());
    ASSERT_OK(peer.status());
    auto counter = sides[i]->engine->imm_counter(*peer, 77);
    ASSERT_OK(sides[i]->engine->wait_imm(*counter, 1, soon()));
    EXPECT_EQ(std::memcmp(sides[i]->buffer.data() + 10, a.buffer.data() + i * 3000, 2500 + i), 0);
    EXPECT_EQ(sides[i]->buffer.data()[10 + 2500 + i], 0xEE);
    EXPECT_EQ((*counter)->value(), 1u);
  }
  for (Side* side : {&a, &b, &c}) side->engine->close();
}

TEST_P(TransferTest, GatherReadsFromEveryPeer) {
  Side a = Side::open(provider_, 2, 10000), b = Side::open(provider_, 1, 10000),
       c = Side::open(provider_, 2, 10000);
  std::vector<ScatterTarget> sources;
  std::vector<Side*> sides = {&b, &c};
  for (Side* side : sides) {
    side->buffer.randomize(static_cast<uint32_t>(sources.size()));
    ASSERT_OK(a.engine->connect(side->engine->address(), soon()).status());
    auto remote = a.engine->attach(side->descriptor(), soon());
    ASSERT_OK(remote.status());
    sources.push_back({*remote, 7, sources.size() * 3000, 2500 + sources.size()});
  }
  auto transfer = a.engine->gather({a.memory, sources, {}});
  ASSERT_OK(transfer.status());
  ASSERT_OK(a.engine->wait(*transfer, soon()));
  for (size_t i = 0; i < sides.size(); ++i) {
    EXPECT_EQ(std::memcmp(a.buffer.data() + i * 3000, sides[i]->buffer.data() + 7, 2500 + i), 0);
    EXPECT_EQ(a.buffer.data()[i * 3000 + 2500 + i], 0xEE);
  }
  sources[1].bytes = 9999;
  EXPECT_THAT(a.engine->gather({a.memory, sources, {}}).status().message(), HasSubstr("local_offset"));
  EXPECT_THAT(a.engine->gather({a.memory, {sources[0]}, with_imm(1)}).status().message(),
              HasSubstr("none with read"));
  for (Side* side : {&a, &b, &c}) side->engine->close();
}

TEST_P(TransferTest, MessagesArriveInOrderWhateverTheirLength) {
  Pair pair(provider_, 1, 2, 1 << 20);
  pair.a.buffer.randomize(4);
  const std::vector<uint64_t> lengths = {5, 0, 100000, 1, 900, 20000, 64, 65536};
  std::vector<std::shared_ptr<Transfer>> sent, received;
  for (uint64_t bytes : lengths) {
    auto transfer = pair.a.engine->send(pair.b_at_a, pair.a.memory, 11, bytes, {});
    ASSERT_OK(transfer.status());
    sent.push_back(*transfer);
  }
  uint64_t offset = 0;
  for (uint64_t bytes : lengths) {
    auto transfer = pair.b.engine->recv(received.size() % 2 ? pair.a_at_b : nullptr, pair.b.memory, offset,
                                        bytes + 3, {});
    ASSERT_OK(transfer.status());
    ASSERT_OK(pair.b.engine->wait(*transfer, soon()));
    EXPECT_EQ((*transfer)->bytes(), bytes);
    EXPECT_EQ((*transfer)->peer(), pair.a_at_b);
    EXPECT_EQ(std::memcmp(pair.b.buffer.data() + offset, pair.a.buffer.data() + 11, bytes), 0);
    received.push_back(*transfer);
    offset += bytes + 3;
  }
  for (auto& transfer : sent) EXPECT_OK(pair.a.engine->wait(transfer, soon()));
}

TEST_P(TransferTest, MessageLongerThanItsReceiveFails) {
  Pair pair(provider_, 1, 1, 100000);
  for (uint64_t bytes : {100ull, 50000ull}) {
    auto receive = pair.b.engine->recv(nullptr, pair.b.memory, 0, 99, {});
    auto send = pair.a.engine->send(pair.b_at_a, pair.a.memory, 0, bytes, {});
    const Status status = pair.b.engine->wait(*receive, soon());
    EXPECT_EQ(status.code(), Code::kCapacity);
    EXPECT_THAT(status.message(), HasSubstr("allowed: up to 99"));
    EXPECT_EQ(pair.b.buffer.data()[0], 0xEE);
    if (bytes > 10000) {  // a long message learns of it; a short one had left
      EXPECT_EQ(pair.a.engine->wait(*send, soon()).code(), Code::kCapacity);
    }
  }
}

TEST_P(TransferTest, BarrierHoldsUntilAllHaveCome) {
  std::vector<Side> sides;
  for (int i = 0; i < 3; ++i) sides.push_back(Side::open(provider_, 1, 64));
  std::vector<std::vector<std::shared_ptr<Peer>>> groups(3);
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j)
      if (i != j) {
        auto peer = sides[i].engine->connect(sides[j].engine->address(), soon());
        ASSERT_OK(peer.status());
        groups[i].push_back(*peer);
      }
  std::atomic<int> arrived{0};
  const int rounds = 5;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < rounds; ++round) {
        arrived.fetch_add(1);
        EXPECT_OK(sides[i].engine->barrier(groups[i], 9, soon()));
        EXPECT_GE(arrived.load(), 3 * (round + 1));
      }
    });
  for (auto& thread : threads) thread.join();
  for (auto& side : sides) side.engine->close();
}

TEST_P(TransferTest, BarriersDoNotCountAmongImmediates) {
  Pair pair(provider_, 1, 1, 64);
  ASSERT_OK(pair.a.engine->notify(pair.b_at_a, with_imm(5)).status());
  ASSERT_OK(pair.wait_imm(5, 1));
  EXPECT_THAT(pair.b.engine->barrier({pair.a_at_b}, 5, soon(0.05)).message(),
              HasSubstr("for peer 'a', barrier 5: expected 1, saw 0"));
  EXPECT_OK(pair.a.engine->barrier({pair.b_at_a}, 5, soon()));
  EXPECT_EQ((*pair.b.engine->imm_counter(pair.a_at_b, 5))->value(), 1u);
}

TEST_P(TransferTest, CountersAndCallbacksSeeEveryEndOnce) {
  Pair pair(provider_, 1, 1, 4096);
  auto counter = std::make_shared<Counter>();
  std::atomic<int> calls{0};
  const int writes = GetParam().is_slow ? 20 : 200;
  for (int i = 0; i < writes; ++i) {
    WriteRequest request = pair.write(0, 0, 64);
    request.how.counter = counter;
    request.how.callback = [&](const Status& status) { calls += status.ok(); };
    ASSERT_OK(pair.a.engine->write(request).status());
  }
  ASSERT_OK(pair.a.engine->wait(*counter, static_cast<uint64_t>(writes), soon()));
  EXPECT_TRUE(wait_until(soon(), [&] { return calls.load() == writes; }));
  EXPECT_EQ(counter->failed(), 0u);
  EXPECT_EQ(counter->finished(), static_cast<uint64_t>(writes));
}

TEST_P(TransferTest, BurstsOfSmallWritesArriveWhole) {
  const uint32_t writes = GetParam().is_slow ? 100 : 800;
  constexpr uint64_t kStep = 700;
  Pair pair(provider_, 2, 2, writes * kStep);
  pair.a.buffer.randomize(3);
  std::vector<uint8_t> expected(pair.b.buffer.data(), pair.b.buffer.data() + writes * kStep);
  auto counter = std::make_shared<Counter>();
  uint64_t with_imms = 0;
  for (uint32_t i = 0; i < writes; ++i) {
    const uint64_t bytes = i % 7 == 0 ? 8 : i % (kStep - 1);
    WriteRequest request = pair.write(i * kStep, i * kStep + 1, bytes);
    if (i % 50 == 49) request.how.imm = 4;
    with_imms += i % 50 == 49;
    request.how.counter = counter;
    ASSERT_OK(pair.a.engine->write(request).status());
    std::copy_n(pair.a.buffer.data() + i * kStep, bytes, expected.data() + i * kStep + 1);
  }
  ASSERT_OK(pair.a.engine->wait(*counter, writes, soon()));
  ASSERT_OK(pair.wait_imm(4, with_imms));
  EXPECT_TRUE(wait_until(
      soon(), [&] { return std::memcmp(pair.b.buffer.data(), expected.data(), expected.size()) == 0; }));
  EXPECT_TRUE(pair.b.buffer.guards_hold());
}

TEST_P(TransferTest, ImmediatesThatComeEarlyAreKept) {
  Pair pair(provider_, 1, 1, 64);
  for (int i = 0; i < 3; ++i) ASSERT_OK(pair.a.engine->notify(pair.b_at_a, with_imm(kImmIdMax)).status());
  ASSERT_OK(pair.wait_imm(kImmIdMax, 3));
  std::atomic<bool> called{false};
  auto counter = *pair.b.engine->imm_counter(pair.a_at_b, kImmIdMax);
  ASSERT_OK(pair.b.engine->on_imm(counter, 4, [&](const Status& status) { called = status.ok(); }));
  EXPECT_FALSE(called);
  ASSERT_OK(pair.a.engine->notify(pair.b_at_a, with_imm(kImmIdMax)).status());
  EXPECT_TRUE(wait_until(soon(), [&] { return called.load(); }));
}

TEST_P(TransferTest, WaitThatPassesItsDeadlineTellsTheStory) {
  Pair pair(provider_, 1, 1, 64);
  const Status status = pair.wait_imm(8, 2, 0.05);
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_THAT(status.message(), HasSubstr("for peer 'a', immediate 8: expected 2, saw 0"));
}

TEST_P(TransferTest, MistakesAreNamedAndWriteNothing) {
  Pair pair(provider_, 1, 1, 1000);
  auto expect_invalid = [&](WriteRequest request, const char* part) {
    const Status status = pair.a.engine->write(std::move(request)).status();
    EXPECT_EQ(status.code(), Code::kInvalid) << part;
    EXPECT_THAT(status.message(), HasSubstr(part));
  };
  expect_invalid(pair.write(1, 0, 1000), "src_offset: got 1000 bytes at offset 1");
  expect_invalid(pair.write(0, 1, 1000), "dst_offset: got 1000 bytes at offset 1");
  expect_invalid(pair.write(UINT64_MAX, 0, 2), "src_offset");
  expect_invalid(pair.write(0, UINT64_MAX - 1, 10), "dst_offset");
  WriteRequest request = pair.write(0, 0, 10);
  request.how = with_imm(kImmIdMax + 1);
  expect_invalid(request, "imm: got 1048576");
  request = pair.write(0, 0, 10);
  request.how.rail = 1;
  expect_invalid(request, "rail: got 1, allowed: 0 to 0");
  request = pair.write(0, 0, 10);
  request.dst = nullptr;
  expect_invalid(request, "dst");
  EXPECT_EQ(
      pair.a.engine->write_pages({pair.a.memory, {0, 10, {0, 1}, 0}, pair.remote, {0, 10, {0}, 0}, 10, {}})
          .status()
          .code(),
      Code::kInvalid);
  EXPECT_EQ(
      pair.a.engine->write_pages({pair.a.memory, {0, 10, {100}, 0}, pair.remote, {0, 10, {0}, 0}, 10, {}})
          .status()
          .code(),
      Code::kInvalid);
  EXPECT_THAT(pair.a.engine->attach("nonsense", soon()).status().message(),
              HasSubstr("not a Weft descriptor"));
  EXPECT_THAT(pair.a.engine->connect("nonsense", soon()).status().message(), HasSubstr("not a Weft address"));
  std::string newer = pair.b.engine->address();
  newer[4] = 99;
  EXPECT_THAT(pair.a.engine->connect(newer, soon()).status().message(),
              HasSubstr(text("wire version 99, allowed: {} ", kWireVersion)));
  for (size_t i = 0; i < 1000; ++i) ASSERT_EQ(pair.b.buffer.data()[i], 0xEE);
}

TEST_P(TransferTest, DescriptorNeedsItsKeyAndItsAccess) {
  Pair pair(provider_, 1, 1, 1000);
  Buffer other(500);
  auto read_only = *pair.b.engine->enroll({other.data(), 500}, kRemoteRead);
  auto local = *pair.b.engine->enroll({other.data(), 500}, kLocal);
  EXPECT_EQ(pair.b.engine->describe(*local).status().code(), Code::kInvalid);
  auto remote = pair.a.engine->attach(*pair.b.engine->describe(*read_only), soon());
  ASSERT_OK(remote.status());
  EXPECT_THAT(pair.a.engine->write({pair.a.memory, 0, *remote, 0, 10, {}}).status().message(),
              HasSubstr("without remote write access"));
  Descriptor forged = *parse_descriptor(*pair.b.engine->describe(*read_only));
  forged.secret[3] ^= 1;
  EXPECT_THAT(pair.a.engine->attach(to_bytes(forged), soon()).status().message(),
              HasSubstr("its key is wrong"));  // also of memory that is attached already
  ASSERT_OK(pair.a.engine->disconnect(pair.b_at_a));
  pair.connect();
  EXPECT_THAT(pair.a.engine->attach(to_bytes(forged), soon()).status().message(),
              HasSubstr("its key is wrong"));
}

TEST_P(TransferTest, HandlesOfOtherEnginesAreRefused) {
  Pair pair(provider_, 1, 1, 1000);
  Engine& a = *pair.a.engine;
  auto expect_refused = [](const Status& status) {
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_THAT(status.message(), HasSubstr("got one of another engine, allowed: one that engine 'a' made"));
  };
  expect_refused(a.write({pair.b.memory, 0, pair.remote, 0, 10, {}}).status());
  expect_refused(a.describe(*pair.b.memory).status());
  expect_refused(a.unregister(pair.b.memory, soon()));
  expect_refused(a.notify(pair.a_at_b, with_imm(1)).status());
  expect_refused(a.send(pair.a_at_b, pair.a.memory, 0, 10, {}).status());
  expect_refused(a.recv(pair.a_at_b, pair.a.memory, 0, 10, {}).status());
  expect_refused(a.imm_counter(pair.a_at_b, 1).status());
  expect_refused(a.barrier({pair.a_at_b}, 1, soon()));
  expect_refused(a.disconnect(pair.a_at_b));
  expect_refused(a.wait_imm(*pair.b.engine->imm_counter(pair.a_at_b, 1), 1, soon()));
  auto theirs = *pair.b.engine->recv(nullptr, pair.b.memory, 0, 10, {});
  expect_refused(a.wait(theirs, soon()));
  EXPECT_EQ(a.cancel(theirs), theirs->phase());
  EXPECT_FALSE(theirs->is_finished());
  auto back = pair.b.engine->attach(*a.describe(*pair.a.memory), soon());
  ASSERT_OK(back.status());
  expect_refused(a.write({pair.a.memory, 0, *back, 0, 10, {}}).status());
}

TEST_P(TransferTest, AttachedTwiceAtOnceIsTakenBackFromBoth) {
  Pair pair(provider_, 1, 1, 1000);
  Buffer source(500);
  auto memory = *pair.b.engine->enroll({source.data(), 500}, kRemoteWrite);
  const std::string descriptor = *pair.b.engine->describe(*memory);
  std::vector<std::shared_ptr<Remote>> remotes(4);
  std::vector<std::thread> threads;
  for (auto& remote : remotes)
    threads.emplace_back([&] { remote = *pair.a.engine->attach(descriptor, soon()); });
  for (auto& thread : threads) thread.join();
  ASSERT_OK(pair.b.engine->unregister(memory, soon()));
  for (auto& remote : remotes) {
    EXPECT_TRUE(remote->is_revoked());
    EXPECT_EQ(pair.a.engine->write({pair.a.memory, 0, remote, 0, 10, {}}).status().code(), Code::kInvalid);
  }
}

TEST_P(TransferTest, MemoryTakenBackIsNeverTouchedAgain) {
  Pair pair(provider_, 1, 1, 1000);
  const std::string descriptor = pair.b.descriptor();
  ASSERT_OK(pair.b.engine->unregister(pair.b.memory, soon()));
  const Status status = pair.a.engine->write(pair.write(0, 0, 10)).status();
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_THAT(status.message(), HasSubstr("peer 'b' has taken back"));
  EXPECT_THAT(pair.a.engine->attach(descriptor, soon()).status().message(), HasSubstr("taken it back"));
  EXPECT_EQ(pair.b.buffer.data()[0], 0xEE);
  ASSERT_OK(pair.a.engine->unregister(pair.a.memory, soon()));
  EXPECT_EQ(pair.a.engine->write(pair.write(0, 0, 10)).status().code(), Code::kInvalid);
}

// ... also where a write is in the middle, and without a word to the peer, which stays one.
TEST_P(TransferTest, ATemporaryRegistrationIsNotTouchedOnceItIsOver) {
  constexpr uint64_t kBytes = 4 << 20;
  Pair pair(provider_, 1, 1, 1000);
  if (!pair.a.engine->rails()[0]->caps().takes_temporary) GTEST_SKIP() << "takes no registrations";
  std::vector<char> from(kBytes, 'a'), into(kBytes, 'i');
  auto mine = *pair.a.engine->enroll({from.data(), kBytes}, kRemoteWrite | kTemporary);
  uint32_t in_time = 0, late = 0;
  for (uint32_t turn = 1; turn <= 40; ++turn) {
    auto theirs = *pair.b.engine->enroll({into.data(), kBytes}, kRemoteWrite | kTemporary);
    auto remote = *pair.a.engine->adopt(pair.b_at_a, *pair.b.engine->keys(*theirs));
    auto transfer = *pair.a.engine->write({mine, 0, remote, 0, kBytes, with_imm(turn)});
    if (turn % 2 == 0) ASSERT_OK(pair.wait_imm(turn, 1));
    if (turn % 2 == 0) EXPECT_EQ(into, from);
    if (turn % 4 == 1) std::this_thread::sleep_for(std::chrono::microseconds(50 * turn));
    ASSERT_OK(pair.b.engine->unregister(theirs, soon()));
    std::memset(into.data(), 'i', kBytes);
    const Status ended = pair.a.engine->wait(transfer, soon());
    EXPECT_EQ(ended.ok(), !remote->is_revoked()) << ended.message();
    ++(ended.ok() ? in_time : late);
    EXPECT_EQ(static_cast<uint64_t>(std::count(into.begin(), into.end(), 'i')), kBytes);
    EXPECT_TRUE(pair.b_at_a->is_alive());
  }
  EXPECT_GE(in_time, 20u);
  EXPECT_EQ(pair.a.engine->keys(*pair.a.memory).status().code(), Code::kInvalid);
  ASSERT_OK(pair.a.engine->unregister(mine, soon()));
}

// The sender may use its memory again once it has given up: a receiver that comes late must not take that for the message.
TEST_P(TransferTest, AnOfferThatWasGivenUpIsNotRead) {
  constexpr uint64_t kBytes = 300'000;
  Pair pair(provider_, 1, 1, kBytes);
  How briefly;
  briefly.timeout_s = 0.2;
  auto send = pair.a.engine->send(pair.b_at_a, pair.a.memory, 0, kBytes, briefly);
  ASSERT_OK(send.status());
  EXPECT_FALSE(pair.a.engine->wait(*send, soon()).ok());
  std::memset(pair.a.buffer.data(), 0xDD, kBytes);
  briefly.timeout_s = 1;
  auto receive = pair.b.engine->recv(nullptr, pair.b.memory, 0, kBytes, briefly);
  ASSERT_OK(receive.status());
  EXPECT_FALSE(pair.b.engine->wait(*receive, soon()).ok());
}

TEST_P(TransferTest, DisconnectedPeerFailsByNameAndComesBack) {
  Pair pair(provider_, 1, 1, 1000);
  auto receive = pair.b.engine->recv(pair.a_at_b, pair.b.memory, 0, 10, {});
  auto counter = *pair.b.engine->imm_counter(pair.a_at_b, 3);
  ASSERT_OK(pair.a.engine->disconnect(pair.b_at_a));
  const Status status = pair.b.engine->wait(*receive, soon());
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_THAT(status.message(), HasSubstr("peer 'a' is lost"));
  EXPECT_EQ(pair.b.engine->wait_imm(counter, 1, soon()).code(), Code::kPeerLost);
  EXPECT_EQ(pair.a.engine->write(pair.write(0, 0, 10)).status().code(), Code::kPeerLost);
  const std::shared_ptr<Remote> old = pair.remote;
  pair.connect();
  WriteRequest to_old{pair.a.memory, 0, old, 0, 10, {}};
  EXPECT_EQ(pair.a.engine->write(to_old).status().code(), Code::kInvalid);  // attach again
  WriteRequest request = pair.write(0, 0, 10);
  request.how = with_imm(3);
  ASSERT_OK(pair.a.engine->write(request).status());
  EXPECT_OK(pair.wait_imm(3, 1));
}

TEST_P(TransferTest, CancelledReceiveNeverFires) {
  Pair pair(provider_, 1, 1, 1000);
  auto receive = *pair.b.engine->recv(pair.a_at_b, pair.b.memory, 0, 10, {});
  EXPECT_LE(pair.b.engine->cancel(receive), Phase::kPosted);
  EXPECT_EQ(receive->phase(), Phase::kCancelled);
  auto send = pair.a.engine->send(pair.b_at_a, pair.a.memory, 0, 10, {});
  ASSERT_OK(pair.a.engine->wait(*send, soon()));
  auto second = *pair.b.engine->recv(nullptr, pair.b.memory, 100, 10, {});
  ASSERT_OK(pair.b.engine->wait(second, soon()));
  EXPECT_EQ(pair.b.buffer.data()[0], 0xEE);
  EXPECT_EQ(pair.b.engine->cancel(second), Phase::kDone);
}

TEST_P(TransferTest, ManyThreadsMayUseOneEngine) {
  constexpr int kThreads = 4;
  const int rounds = GetParam().is_slow ? 20 : 100;
  Pair pair(provider_, 2, 2, 4096 * kThreads);
  pair.a.buffer.randomize(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < rounds; ++i) {
        WriteRequest request = pair.write(t * 4096ull, t * 4096ull, 4096);
        request.how = with_imm(static_cast<uint32_t>(t));
        auto transfer = pair.a.engine->write(request);
        ASSERT_OK(transfer.status());
        if (i % 3 == 0) ASSERT_OK(pair.a.engine->wait(*transfer, soon()));
      }
      EXPECT_OK(pair.wait_imm(static_cast<uint32_t>(t), static_cast<uint64_t>(rounds)));
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(std::memcmp(pair.a.buffer.data(), pair.b.buffer.data(), pair.a.buffer.bytes()), 0);
}

TEST_P(TransferTest, ClosingFailsWhatIsUnderWay) {
  Options options;  // without heartbeats: one might find b gone before its farewell has come
  options.heartbeat_s = options.peer_dead_s = 10 * kPatience_s;
  Pair pair(provider_, 1, 1, 1000, options);
  auto receive = *pair.b.engine->recv(pair.a_at_b, pair.b.memory, 0, 10, {});
  pair.b.engine->close();
  EXPECT_TRUE(receive->is_finished());
  EXPECT_FALSE(receive->status().ok());
  EXPECT_EQ(pair.b.engine->recv(nullptr, pair.b.memory, 0, 10, {}).status().code(), Code::kClosed);
  EXPECT_TRUE(wait_until(soon(), [&] { return !pair.b_at_a->is_alive(); }));
  EXPECT_THAT(pair.b_at_a->why().message(), HasSubstr("closed its engine"));
}

TEST_P(TransferTest, CallbackMayCloseItsEngine) {
  Pair pair(provider_, 1, 1, 1000);
  std::atomic<bool> is_closed{false};
  WriteRequest request = pair.write(0, 0, 10);
  request.how.callback = [&](const Status&) {
    pair.a.engine->close();
    is_closed = true;
  };
  ASSERT_OK(pair.a.engine->write(request).status());
  EXPECT_TRUE(wait_until(soon(), [&] { return is_closed.load(); }));
  EXPECT_EQ(pair.a.engine->write(pair.write(0, 0, 10)).status().code(), Code::kClosed);
}

}  // namespace weft::transfer::testing
