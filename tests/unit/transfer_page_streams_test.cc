// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/page_streams.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "base/config.h"
#include "base/deadline.h"
#include "base/file_descriptor.h"
#include "base/log.h"

namespace weft::provider {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr uint64_t kKey = 0x1234567, kBase = 1 << 20;

struct End {
  std::unique_ptr<PageStreams> streams =
      std::move(*PageStreams::listen({htonl(INADDR_LOOPBACK)}, "a secret of this test"));
  std::vector<char> memory;
  std::deque<Event> events;

  explicit End(size_t bytes) : memory(bytes, 'e') { allow(kRemoteWrite); }
  void join_another_job() {
    streams = std::move(*PageStreams::listen({htonl(INADDR_LOOPBACK)}, "another secret"));
  }
  Registration registration() const { return {nullptr, nullptr, kBase, kKey}; }
  void allow(uint32_t access) { streams->allow(registration(), {memory.data(), memory.size()}, access); }
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

// Each test on plain TCP and on TLS.
class PagesOver : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { set_tls(GetParam()); }
  void TearDown() override { set_tls(nullptr); }

 private:
  static void set_tls(const char* value) {
    if (value)
      setenv("WEFT_TLS", value, 1);
    else
      unsetenv("WEFT_TLS");
    config_reload();
  }
};
INSTANTIATE_TEST_SUITE_P(All, PagesOver, ::testing::Values("0", "1"),
                         [](const auto& info) { return info.param[0] == '1' ? "Tls" : "Tcp"; });

TEST_P(PagesOver, FramesPlaceEveryPageAndEndInOrder) {
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

TEST_P(PagesOver, SleepsWhilePagesAreUnderWayAndWakesWhenTheyCanGoOn) {
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

TEST_P(PagesOver, FrameWithOneWrongPageWritesNothingAndTheNextIsFine) {
  Ends ends(300000);
  ends.b.allow(kRemoteWrite);
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
  ends.b.allow(kRemoteRead);
  ends.a.streams->post(ends.to, &fine, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(2));
  EXPECT_EQ(ends.a.events[1].kind, EventKind::kFailed);
  ends.b.allow(kRemoteWrite);
  ends.a.streams->post(ends.to, &fine, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(3));
  EXPECT_EQ(ends.a.events[2].kind, EventKind::kDone);
  EXPECT_EQ(ends.b.memory[0], ends.a.memory[0]);
}

TEST_P(PagesOver, ForbiddenMemoryIsNotTouchedAnyMore) {
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
TEST_P(PagesOver, TheRestOfAForbiddenFrameIsDroppedAndTheStreamGoesOn) {
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

TEST_P(PagesOver, ReleasedSourceEndsItsFrame) {
  Ends ends(32 << 20);
  const Piece all = ends.piece(0, 0, 32 << 20);
  ends.a.streams->post(ends.to, &all, 1, &ends.contexts[0]);
  ends.a.streams->forbid(ends.a.registration());
  ends.a.streams->progress(ends.a.events);
  ASSERT_EQ(ends.a.events.size(), 1u);
  EXPECT_EQ(ends.a.events[0].kind, EventKind::kFailed);
  EXPECT_FALSE(ends.a.events[0].peer_gone);
}

TEST_P(PagesOver, LostPeerFailsWhatItHasNotAnswered) {
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

TEST_P(PagesOver, AnotherJobsPagesAreRefusedAndItIsTold) {
  Ends ends(1000);
  ends.a.join_another_job();
  ends.to = ends.a.streams->open({htonl(INADDR_LOOPBACK)}, ends.b.streams->port());
  const Piece piece = ends.piece(0, 0, 1000);
  ends.a.streams->post(ends.to, &piece, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(1));
  EXPECT_EQ(ends.a.events[0].kind, EventKind::kFailed);
  EXPECT_TRUE(ends.a.events[0].peer_gone);
  EXPECT_THAT(ends.a.events[0].text, AnyOf(HasSubstr("another secret"),
                                           HasSubstr("secret: the one given differs from the other side's")));
  EXPECT_EQ(ends.b.memory, std::vector<char>(1000, 'e'));
}

// Strangers may connect and send anything.
TEST_P(PagesOver, GarbageWritesNothing) {
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
    const Opening opening;
    if (i % 4) bytes.insert(0, reinterpret_cast<const char*>(&opening), sizeof opening);
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

// Who stands between two ends: passes everything on, and keeps it.
class Between {
 public:
  explicit Between(uint16_t to) : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in here = loopback(0);
    socklen_t bytes = sizeof here;
    auto* const address = reinterpret_cast<sockaddr*>(&here);
    EXPECT_EQ(bind(listener_.get(), address, bytes), 0);
    EXPECT_EQ(listen(listener_.get(), 4), 0);
    EXPECT_EQ(getsockname(listener_.get(), address, &bytes), 0);
    port = ntohs(here.sin_port);
    thread_ = std::thread([this, to] { pass_on(to); });
  }
  ~Between() {
    over_ = true;
    thread_.join();
  }
  bool heard(std::string_view what) {
    std::lock_guard lock(mutex_);
    return heard_.find(what) != std::string::npos;
  }
  uint16_t port = 0;

 private:
  static sockaddr_in loopback(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    return address;
  }
  void pass_on(uint16_t to) {
    FileDescriptor ends[2];
    while (!over_) {
      pollfd entries[3] = {
          {listener_.get(), POLLIN, 0}, {ends[0].get(), POLLIN, 0}, {ends[1].get(), POLLIN, 0}};
      if (poll(entries, 3, 20) <= 0) continue;
      if (entries[0].revents) {
        const sockaddr_in there = loopback(to);
        ends[0] = FileDescriptor(accept(listener_.get(), nullptr, nullptr));
        ends[1] = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        EXPECT_EQ(connect(ends[1].get(), reinterpret_cast<const sockaddr*>(&there), sizeof there), 0);
      }
      for (int i = 0; i < 2; ++i) {
        char bytes[65536];
        const ssize_t got =
            entries[1 + i].revents ? recv(ends[i].get(), bytes, sizeof bytes, MSG_DONTWAIT) : 0;
        if (got <= 0) continue;
        (void)!send(ends[1 - i].get(), bytes, static_cast<size_t>(got), MSG_NOSIGNAL);
        std::lock_guard lock(mutex_);
        heard_.append(bytes, static_cast<size_t>(got));
      }
    }
  }
  FileDescriptor listener_;
  std::mutex mutex_;
  std::string heard_;
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

TEST_P(PagesOver, WhoStandsBetweenReadsPagesWithoutTlsAlone) {
  Ends ends(4096);
  Between between(ends.b.streams->port());
  const std::string_view page(ends.a.memory.data() + 100, 600);
  const size_t to = ends.a.streams->open({htonl(INADDR_LOOPBACK)}, between.port);
  const Piece piece = ends.piece(0, 0, 4096);
  ends.a.streams->post(to, &piece, 1, &ends.contexts[0]);
  ASSERT_TRUE(ends.wait(1));
  EXPECT_EQ(ends.a.events[0].kind, EventKind::kDone) << ends.a.events[0].text;
  EXPECT_EQ(ends.b.memory, ends.a.memory);
  EXPECT_EQ(between.heard(page), std::string(GetParam()) == "0");
}

// The other side is set otherwise: each says so by name.
TEST_P(PagesOver, AnEndThatIsSetDifferentlyIsRefusedByName) {
  Ends ends(1000);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(ends.b.streams->port());
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
  Opening opening;
  opening.is_tls = std::string(GetParam()) == "0";
  ASSERT_EQ(send(fd, &opening, sizeof opening, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof opening));
  std::string words;
  set_log_sink([&](LogLevel, const std::string& line) { words += line; });
  ASSERT_TRUE(wait_until(Deadline::after_s(20), [&] {
    ends.b.streams->progress(ends.b.events);
    return !words.empty();
  }));
  set_log_sink({});
  EXPECT_THAT(words, HasSubstr(GetParam()[0] == '1' ? "WEFT_TLS: got 1 here and 0 on the other side"
                                                    : "WEFT_TLS: got 0 here and 1 on the other side"));
  ::close(fd);
}

}  // namespace
}  // namespace weft::provider
