// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/page_streams.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "base/deadline.h"

namespace weft::provider {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kKey = 0x1234567, kBase = 1 << 20;

struct End {
  std::unique_ptr<PageStreams> streams =
      std::move(*PageStreams::listen({htonl(INADDR_LOOPBACK)}, "a secret of this test"));
  std::vector<char> memory;
  std::deque<Event> events;

  explicit End(size_t bytes) : memory(bytes, 'e') { lend(kRemoteWrite); }
  void join_another_job() {
    streams = std::move(*PageStreams::listen({htonl(INADDR_LOOPBACK)}, "another secret"));
  }
  Registration registration() const { return {nullptr, nullptr, kBase, kKey}; }
  void lend(uint32_t access) { streams->allow(registration(), {memory.data(), memory.size()}, access); }
};

struct Ends {
  End a, b;
  size_t to;
  Context contexts[64];

  explicit Ends(size_t bytes) : a(bytes), b(bytes) {
    to = a.streams->open({htonl(INADDR_LOOPBACK)}, b.streams->port());
    for (size_t i = 0; i < bytes; ++i) a.memory[i] = static_cast<char>(i * 7 + i / 251);
  }
  bool wait(size_t events) {
    return wait_until(Deadline::after_s(20), [&] {
      b.streams->progress(b.events);
      a.streams->progress(a.events);
      return a.events.size() >= events;
    });
  }
  Piece piece(uint64_t from, uint64_t into, uint64_t bytes, uint64_t key = kKey) {
    return {a.memory.data() + from, nullptr, kBase + into, key, bytes};
  }
};

TEST(PageStreams, FramesPlaceEveryPageAndEndInOrder) {
  constexpr uint64_t kPage = 3001, kPages = 1000;
  Ends ends(kPage * kPages);
  std::vector<Piece> pieces;
  for (uint64_t i = 0; i < kPages; ++i)
    pieces.push_back(ends.piece(i * kPage, (kPages - 1 - i) * kPage, kPage));
  pieces[5].bytes = 0;
  for (Context& context : ends.contexts)
    ends.a.streams->post(ends.to, pieces.data(), static_cast<uint32_t>(kPages), &context);
  ASSERT_TRUE(ends.wait(64));
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(ends.a.events[i].kind, EventKind::kDone) << ends.a.events[i].text;
    EXPECT_EQ(ends.a.events[i].context, &ends.contexts[i]);
  }
  for (uint64_t i = 0; i < kPages; ++i) {
    const char* at = ends.b.memory.data() + (kPages - 1 - i) * kPage;
    if (i == 5)
      EXPECT_EQ(std::string(at, kPage), std::string(kPage, 'e'));
    else
      ASSERT_EQ(std::memcmp(at, ends.a.memory.data() + i * kPage, kPage), 0) << i;
  }
}

TEST(PageStreams, SleepsWhilePagesAreUnderWayAndWakesWhenTheyCanGoOn) {
  constexpr uint64_t kBytes = 64 << 20, kLongest_ns = 999'000'000;
  Ends ends(kBytes);
  EXPECT_FALSE(ends.a.streams->sleep(kLongest_ns));
  EXPECT_FALSE(ends.b.streams->sleep(kLongest_ns));
  const Piece all = ends.piece(0, 0, kBytes);
  ends.a.streams->post(ends.to, &all, 1, &ends.contexts[0]);
  EXPECT_TRUE(ends.a.streams->sleep(1'000));
  std::atomic<bool> is_done{false};
  std::thread receiver([&] {
    while (!is_done.load()) {
      ends.b.streams->progress(ends.b.events);
      ends.b.streams->sleep(kLongest_ns);
    }
  });
  // Through socket buffers it takes a dozen rounds, and who is not woken loses a second in each.
  const bool came = wait_until(Deadline::after_s(6), [&] {
    ends.a.streams->progress(ends.a.events);
    if (ends.a.events.empty()) ends.a.streams->sleep(kLongest_ns);
    return !ends.a.events.empty();
  });
  is_done.store(true);
  receiver.join();
  ASSERT_TRUE(came);
  EXPECT_EQ(ends.a.events[0].kind, EventKind::kDone) << ends.a.events[0].text;
  EXPECT_EQ(ends.b.memory, ends.a.memory);
  EXPECT_FALSE(ends.a.streams->sleep(kLongest_ns));
}

TEST(PageStreams, FrameWithOneWrongPageWritesNothingAndTheNextIsFine) {
  Ends ends(300000);
  ends.b.lend(kRemoteWrite);
  const Piece fine = ends.piece(0, 0, 100000);
  for (const Piece& wrong : {ends.piece(0, 0, 100, kKey + 1), ends.piece(0, 299901, 100),
                             ends.piece(0, UINT64_MAX - kBase - 10, 100)}) {
    Piece pieces[] = {fine, wrong};
    ends.a.events.clear();
    ends.a.streams->post(ends.to, pieces, 2, &ends.contexts[0]);
    ASSERT_TRUE(ends.wait(1));
    EXPECT_EQ(ends.a.events[0].kind, EventKind::kFailed);
    EXPECT_FALSE(ends.a.events[0].peer_gone);
    EXPECT_THAT(ends.a.events[0].text, HasSubstr("does not let this memory be written"));
  }
  EXPECT_EQ(ends.b.memory, std::vector<char>(300000, 'e'));
  ends.b.lend(kRemoteRead);
  ends.a.streams->post(ends.to, &fine, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(2));
  EXPECT_EQ(ends.a.events[1].kind, EventKind::kFailed);
  ends.b.lend(kRemoteWrite);
  ends.a.streams->post(ends.to, &fine, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(3));
  EXPECT_EQ(ends.a.events[2].kind, EventKind::kDone);
  EXPECT_EQ(ends.b.memory[0], ends.a.memory[0]);
}

TEST(PageStreams, ForbiddenMemoryIsNotTouchedAnyMore) {
  Ends ends(32 << 20);
  const Piece all = ends.piece(0, 0, 32 << 20);
  ends.a.streams->post(ends.to, &all, 1, &ends.contexts[0]);
  const bool began = wait_until(Deadline::after_s(20), [&] {
    ends.b.streams->progress(ends.b.events);
    ends.a.streams->progress(ends.a.events);  // which proves that it belongs here
    return ends.b.memory[0] != 'e' || ends.b.memory[1] != 'e';
  });
  ASSERT_TRUE(began);
  ends.b.streams->forbid(ends.b.registration());
  std::memset(ends.b.memory.data(), 'f', ends.b.memory.size());
  ASSERT_TRUE(ends.wait(1));
  EXPECT_EQ(ends.a.events[0].kind, EventKind::kFailed);
  EXPECT_EQ(ends.b.memory, std::vector<char>(32 << 20, 'f'));
}

// Other keys may name the same memory: a frame to one of them is not touched by the end of another.
TEST(PageStreams, TheRestOfAForbiddenFrameIsDroppedAndTheStreamGoesOn) {
  constexpr size_t kBytes = 32 << 20;
  constexpr uint64_t kOtherKey = kKey + 1;
  for (const uint64_t forbidden : {kKey, kOtherKey}) {
    Ends ends(kBytes);
    const Registration other{nullptr, nullptr, kBase, kOtherKey};
    ends.b.streams->allow(other, {ends.b.memory.data(), kBytes}, kRemoteWrite);
    const Piece all = ends.piece(0, 0, kBytes);
    ends.a.streams->post(ends.to, &all, 1, &ends.contexts[0], 41, true);
    ASSERT_TRUE(wait_until(Deadline::after_s(20), [&] {
      ends.b.streams->progress(ends.b.events);
      ends.a.streams->progress(ends.a.events);
      return ends.b.memory[1] != 'e';
    }));
    ends.b.streams->forbid(forbidden == kKey ? ends.b.registration() : other);
    if (forbidden == kKey) std::memset(ends.b.memory.data(), 'f', kBytes);
    const Piece next = ends.piece(0, 0, 1000, kKey + kOtherKey - forbidden);
    ASSERT_TRUE(ends.wait(1));
    EXPECT_EQ(ends.a.events[0].kind, forbidden == kKey ? EventKind::kFailed : EventKind::kDone);
    EXPECT_EQ(ends.a.events[0].key_refused, forbidden == kKey);
    EXPECT_FALSE(ends.a.events[0].peer_gone);
    EXPECT_EQ(ends.b.events.size(), forbidden == kKey ? 0u : 1u);  // the immediate
    EXPECT_EQ(ends.b.memory, forbidden == kKey ? std::vector<char>(kBytes, 'f') : ends.a.memory);
    ends.a.streams->post(ends.to, &next, 1, &ends.contexts[1], 42, true);
    ASSERT_TRUE(ends.wait(2));
    EXPECT_EQ(ends.a.events[1].kind, EventKind::kDone);
    ASSERT_FALSE(ends.b.events.empty());
    EXPECT_EQ(ends.b.events.back().kind, EventKind::kImm);
    EXPECT_EQ(ends.b.events.back().imm, 42u);
    EXPECT_EQ(std::memcmp(ends.b.memory.data(), ends.a.memory.data(), 1000), 0);
  }
}

TEST(PageStreams, ReleasedSourceEndsItsFrame) {
  Ends ends(32 << 20);
  const Piece all = ends.piece(0, 0, 32 << 20);
  ends.a.streams->post(ends.to, &all, 1, &ends.contexts[0]);
  ends.a.streams->forbid(ends.a.registration());
  ends.a.streams->progress(ends.a.events);
  ASSERT_EQ(ends.a.events.size(), 1u);
  EXPECT_EQ(ends.a.events[0].kind, EventKind::kFailed);
  EXPECT_FALSE(ends.a.events[0].peer_gone);
}

TEST(PageStreams, LostPeerFailsWhatItHasNotAnswered) {
  Ends ends(1000);
  const Piece piece = ends.piece(0, 0, 1000);
  ends.a.streams->post(ends.to, &piece, 1, &ends.contexts[0]);
  ends.a.streams->post(ends.to, &piece, 1, &ends.contexts[1]);
  ends.b.streams.reset();
  const bool ended = wait_until(Deadline::after_s(20), [&] {
    ends.a.streams->progress(ends.a.events);
    return ends.a.events.size() >= 2;
  });
  ASSERT_TRUE(ended);
  for (const Event& event : ends.a.events) {
    EXPECT_EQ(event.kind, EventKind::kFailed);
    EXPECT_TRUE(event.peer_gone);
  }
  ends.a.events.clear();
  ends.a.streams->post(ends.to, &piece, 1, &ends.contexts[2]);  // nobody listens there any more
  ASSERT_TRUE(wait_until(Deadline::after_s(20), [&] {
    ends.a.streams->progress(ends.a.events);
    return !ends.a.events.empty();
  }));
  EXPECT_TRUE(ends.a.events[0].peer_gone);
}

TEST(PageStreams, AnotherJobsPagesAreRefusedAndItIsTold) {
  Ends ends(1000);
  ends.a.join_another_job();
  ends.to = ends.a.streams->open({htonl(INADDR_LOOPBACK)}, ends.b.streams->port());
  const Piece piece = ends.piece(0, 0, 1000);
  ends.a.streams->post(ends.to, &piece, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(1));
  EXPECT_EQ(ends.a.events[0].kind, EventKind::kFailed);
  EXPECT_TRUE(ends.a.events[0].peer_gone);
  EXPECT_THAT(ends.a.events[0].text, HasSubstr("another secret"));
  EXPECT_EQ(ends.b.memory, std::vector<char>(1000, 'e'));
}

// Strangers may connect and send anything.
TEST(PageStreams, GarbageWritesNothing) {
  Ends ends(4096);
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    std::string bytes(random() % 400, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    FrameHead head;
    head.pages = i % 3 ? static_cast<uint32_t>(random() % 8) : static_cast<uint32_t>(random());
    if (i % 2) bytes.insert(0, reinterpret_cast<const char*>(&head), sizeof head);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(ends.b.streams->port());
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    for (int k = 0; k < 20; ++k) ends.b.streams->progress(ends.b.events);
    ::close(fd);
  }
  EXPECT_EQ(ends.b.memory, std::vector<char>(4096, 'e'));
  const Piece piece = ends.piece(0, 0, 4096);
  ends.a.streams->post(ends.to, &piece, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(1));
  EXPECT_EQ(ends.b.memory, ends.a.memory);
}

}  // namespace
}  // namespace weft::provider
