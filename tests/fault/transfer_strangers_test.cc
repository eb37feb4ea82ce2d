// SPDX-License-Identifier: Apache-2.0
//
// What strangers on the network can do to engines: who knows an address, who has overheard keys and messages, and a
// peer of the job that speaks for another. Every attack ends with honest peers that get right results.
#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <future>
#include <random>

#include "base/log.h"
#include "providers/fabric/address.h"
#include "providers/fabric/fabric.h"
#include "tests/conformance/transfer_fixture.h"
#include "tests/support/stranger.h"

namespace weft::transfer::testing {
namespace {

constexpr const char* kSecret = "the secret of an honest job";

Options with_secret() {
  Options options;
  options.secret = kSecret;
  return options;
}

// Counts the warnings that come while it lives.
class CountedWarnings {
 public:
  CountedWarnings() {
    set_log_sink([this](LogLevel level, const std::string&) { count_ += level == LogLevel::kWarn; });
  }
  ~CountedWarnings() { set_log_sink({}); }
  // One a second, of each of two engines.
  int allowed() const {
    const auto seconds = std::chrono::steady_clock::now() - began_;
    return 2 * (2 + static_cast<int>(std::chrono::duration_cast<std::chrono::seconds>(seconds).count()));
  }
  int count() const { return count_; }

 private:
  std::atomic<int> count_{0};
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

size_t open_files() {
  size_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

class Strangers : public OnBackend {
 protected:
  void SetUp() override {
    OnBackend::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) honest();
  }
  // The properties are the columns of docs/security.md: what an attack costs the honest side.
  void TearDown() override {
    if (!pair_) return;
    RecordProperty("open_files_after", static_cast<int>(open_files()));
    RecordProperty("honest_ms_after", timed_ms([&] { expect_honest(); }));
    EXPECT_LE(warnings_->count(), warnings_->allowed());
    pair_.reset();
    warnings_.reset();
  }
  void honest() {
    warnings_ = std::make_unique<CountedWarnings>();
    pair_ = std::make_unique<Pair>(provider_, 1, 1, 1 << 16, with_secret());
    victim_ = parse_address(pair_->b.engine->address())->rails[0];
    seven_ = *pair_->b.engine->imm_counter(pair_->a_at_b, 7);
    expect_honest();  // the first time also connects
    RecordProperty("open_files_before", static_cast<int>(open_files()));
    RecordProperty("honest_ms_before", timed_ms([&] { expect_honest(); }));
  }
  static int timed_ms(const std::function<void()>& what) {
    const auto began = std::chrono::steady_clock::now();
    what();
    const auto took = std::chrono::steady_clock::now() - began;
    return static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(took).count());
  }

  // Writes, messages and barriers between peers that do nothing wrong: more of them than an engine has buffers.
  void expect_honest() {
    Engine &a = *pair_->a.engine, &b = *pair_->b.engine;
    EXPECT_TRUE(pair_->a_at_b->is_alive()) << pair_->a_at_b->why().message();
    EXPECT_TRUE(pair_->b_at_a->is_alive()) << pair_->b_at_a->why().message();
    for (uint32_t i = 0; i < 70 && !HasFatalFailure(); ++i) {
      pair_->a.buffer.randomize(++seed_);
      WriteRequest request = pair_->write(0, 0, 5000);
      request.how = with_imm(9);
      ASSERT_OK(a.write(request).status());
      ASSERT_OK(pair_->wait_imm(9, ++writes_));
      ASSERT_EQ(std::memcmp(pair_->a.buffer.data(), pair_->b.buffer.data(), 5000), 0);
      auto receive = *b.recv(pair_->a_at_b, pair_->b.memory, 8192, 1000, {});
      auto send = *a.send(pair_->b_at_a, pair_->a.memory, 100, 1000, {});
      ASSERT_OK(a.wait(send, soon()));
      ASSERT_OK(b.wait(receive, soon()));
      ASSERT_EQ(receive->bytes(), 1000u);
      ASSERT_EQ(std::memcmp(pair_->a.buffer.data() + 100, pair_->b.buffer.data() + 8192, 1000), 0);
    }
    auto other = std::async(std::launch::async, [&] { return a.barrier({pair_->b_at_a}, 3, soon()); });
    EXPECT_OK(b.barrier({pair_->a_at_b}, 3, soon()));
    EXPECT_OK(other.get());
    EXPECT_EQ(seven_->value(), 0u);
    EXPECT_EQ(b.peers().size(), peers_);
  }
  EngineId id_of_a() const { return parse_address(pair_->a.engine->address())->engine; }
  // Where b takes immediates, which its peers know.
  RailKey inbox_of_b() {
    Insider insider(provider_, kSecret);
    EXPECT_TRUE(insider.connect(pair_->b.engine->address()));
    const RailKey inbox = insider.inbox_there();
    EXPECT_TRUE(insider.say(insider.message(MessageType::kBye, text_body(""))));
    insider.settle();
    EXPECT_TRUE(wait_until(soon(), [&] { return pair_->b.engine->peers().size() == 1; }));
    return inbox;
  }

  std::unique_ptr<CountedWarnings> warnings_;
  std::unique_ptr<Pair> pair_;
  std::string victim_;
  std::shared_ptr<ImmCounter> seven_;
  uint64_t writes_ = 0;
  uint32_t seed_ = 0;
  size_t peers_ = 1;
};

TEST_P(Strangers, ImmediatesOfNobodyCountNothing) {
  const RailKey inbox = inbox_of_b();
  Stranger stranger(provider_, "another secret");
  std::mt19937_64 random(1);
  const auto forge = [&](ImmClass kind, uint32_t slot, uint32_t id) {
    return stranger.write_imm(with_token(encode_imm(kind, slot, id), static_cast<uint32_t>(random())), inbox,
                              victim_, 0.5);
  };
  bool is_let_in = true;  // to the rail
  for (uint32_t slot = 0; slot < kPeersMax && is_let_in; ++slot) is_let_in = forge(ImmClass::kCount, slot, 7);
  for (uint32_t slot = 0; slot < kPeersMax && is_let_in; ++slot)
    is_let_in = forge(slot % 2 ? ImmClass::kBarrier : ImmClass::kStage, slot, slot % 2 ? 3 : 0);
  stranger.settle();
}

// A peer of the job knows the secret, but no key of others.
TEST_P(Strangers, APeerCountsForItselfAlone) {
  Insider insider(provider_, kSecret);
  ASSERT_TRUE(insider.connect(pair_->b.engine->address()));
  peers_ = 2;
  auto its = [&]() -> std::shared_ptr<Peer> {
    for (const auto& peer : pair_->b.engine->peers())
      if (peer->name() == "an insider") return peer;
    return nullptr;
  }();
  ASSERT_TRUE(its);
  auto counter = *pair_->b.engine->imm_counter(its, 7);
  for (uint32_t slot = 0; slot < kPeersMax; ++slot)
    ASSERT_TRUE(insider.write_imm(with_token(encode_imm(ImmClass::kCount, slot, 7), insider.keys().token)));
  // Where nothing proves them, peers send none, and none count.
  const provider::Caps& caps = insider.rail().caps();
  const uint64_t its_own = caps.write_imm && provider::proves_imm(caps);
  EXPECT_TRUE(wait_until(soon(), [&] {
    insider.poll();
    return counter->value() == its_own;
  }));
  insider.settle();
  ASSERT_TRUE(insider.say(insider.message(MessageType::kBye, text_body(""))));
  insider.settle();
  EXPECT_TRUE(wait_until(soon(), [&] { return pair_->b.engine->peers().size() == 1; }));
  EXPECT_EQ(counter->value(), its_own);
  peers_ = 1;
}

TEST_P(Strangers, MessagesThatNameAPeerAreNotHeard) {
  Stranger stranger(provider_, "another secret");
  std::mt19937_64 random(2);
  auto receive = *pair_->b.engine->recv(pair_->a_at_b, pair_->b.memory, 8192, 1000, {});
  const std::string bodies[] = {"forged",
                                text_body(""),
                                number_body(1),
                                to_body(Notified{7, 1}),
                                to_body(Attach{1, 1, {}}),
                                to_body(Outcome{1, 0, ""}),
                                to_body(Offer{1, 100, {{1, 1}}})};
  const auto forge = [&](MessageType type, const std::string& body, uint32_t sequence) {
    std::string message = to_bytes({type, id_of_a(), 1, sequence, 0}, body);
    seal(message, {random(), random()});
    return stranger.say(message, victim_, 0.5);
  };
  bool is_let_in = true;  // to the rail
  for (auto type = static_cast<uint32_t>(MessageType::kHeartbeat);
       type <= static_cast<uint32_t>(MessageType::kLast); ++type)
    for (const std::string& body : bodies)
      for (uint32_t sequence : {1u, 101u, 102u, 301u})
        is_let_in = is_let_in && forge(static_cast<MessageType>(type), body, sequence);
  stranger.settle();
  EXPECT_FALSE(receive->is_finished());
  auto send = *pair_->a.engine->send(pair_->b_at_a, pair_->a.memory, 3, 77, {});
  ASSERT_OK(pair_->b.engine->wait(receive, soon()));
  EXPECT_EQ(receive->bytes(), 77u);
  ASSERT_OK(pair_->a.engine->wait(send, soon()));
}

TEST_P(Strangers, WhatWasOverheardSaysNothingAgain) {
  Insider insider(provider_, kSecret);
  ASSERT_TRUE(insider.connect(pair_->b.engine->address()));
  peers_ = 2;
  auto its = [&]() -> std::shared_ptr<Peer> {
    for (const auto& peer : pair_->b.engine->peers())
      if (peer->name() == "an insider") return peer;
    return nullptr;
  };
  auto counter = *pair_->b.engine->imm_counter(its(), 7);
  const std::string notice = insider.message(MessageType::kNotify, to_body(Notified{7, 1}));
  const std::string words = insider.message(MessageType::kEager, "once");
  Stranger stranger(provider_, kSecret);  // on the way between them
  for (int i = 0; i < 5; ++i)
    for (const std::string& message : {notice, words}) ASSERT_TRUE(stranger.say(message, victim_));
  auto take = [&] { return *pair_->b.engine->recv(its(), pair_->b.memory, 8192, 100, {}); };
  auto first = take();
  ASSERT_OK(pair_->b.engine->wait(first, soon()));
  auto second = take();
  const std::string bye = insider.message(MessageType::kBye, text_body(""));
  ASSERT_TRUE(insider.say(insider.message(MessageType::kEager, "twice!")));
  insider.settle();
  ASSERT_OK(pair_->b.engine->wait(second, soon()));
  EXPECT_EQ(second->bytes(), 6u);
  EXPECT_EQ(counter->value(), 1u);
  // Another life of the same connection has other keys.
  ASSERT_TRUE(insider.say(bye));
  EXPECT_TRUE(wait_until(soon(), [&] { return pair_->b.engine->peers().size() == 1; }));
  ASSERT_TRUE(insider.connect(pair_->b.engine->address()));
  counter = *pair_->b.engine->imm_counter(its(), 7);
  for (const std::string& message : {notice, words, bye}) ASSERT_TRUE(stranger.say(message, victim_));
  stranger.settle();
  ASSERT_TRUE(insider.say(insider.message(MessageType::kHeartbeat, "")));
  insider.settle();
  expect_honest();
  EXPECT_EQ(counter->value(), 0u);
  ASSERT_TRUE(insider.say(insider.message(MessageType::kBye, text_body(""))));
  insider.settle();
  EXPECT_TRUE(wait_until(soon(), [&] { return pair_->b.engine->peers().size() == 1; }));
  peers_ = 1;
}

TEST_P(Strangers, GarbageOfEverySizeCostsNoBuffer) {
  Stranger stranger(provider_, "another secret");
  std::mt19937 random(3);
  for (int i = 0; i < 400; ++i) {
    std::string bytes(random() % 4096, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (i % 2 && bytes.size() > kHeadBytes)
      bytes.replace(0, kHeadBytes,
                    to_bytes({MessageType::kEager, id_of_a(), 1, 1, 0}, "").substr(0, kHeadBytes));
    if (!stranger.say(bytes, victim_, 0.5)) return;
  }
  stranger.settle();
}

TEST_P(Strangers, HellosWithoutTheSecretMakeNoPeers) {
  for (int i = 0; i < 4; ++i) {
    Stranger outsider(provider_, "another secret");
    const EngineId victim = parse_address(pair_->b.engine->address())->engine;
    for (int k = 0; k < 50; ++k) {
      Hello hello;
      hello.address = {
          random_id(), "x", provider_->name(), {}, this_process_name(), {outsider.rail().address()}};
      hello.inbox = {outsider.inbox()};
      hello.nonce = random_nonce();
      const MessageHead head{MessageType::kHello, hello.address.engine, 1, 0, 0};
      hello.proof = prove_hello("another secret", head, hello, victim);
      if (!outsider.say(to_bytes(head, to_body(hello)), victim_, 0.5)) return;
    }
    outsider.settle(1);
  }
}

// libfabric's messages can carry data as immediates do. They use up a receive, which must come back.
TEST_P(Strangers, MessagesWithDataCountNothingAndCostNoBuffer) {
  Stranger stranger(provider_, "another secret");
  if (!provider::fabric_objects(stranger.rail()).endpoint) GTEST_SKIP() << "not libfabric";
  for (uint32_t i = 0; i < 2000; ++i)
    ASSERT_TRUE(stranger.say_with_data(encode_imm(ImmClass::kCount, i % kPeersMax, 7), victim_, 20));
  stranger.settle();
}

TEST_P(Strangers, LeaveNoDescriptorsBehind) {
  const size_t before = open_files();
  for (int i = 0; i < 10; ++i) {
    Stranger stranger(provider_, "another secret");
    if (!stranger.say("hello", victim_, 0.5)) break;
    stranger.settle(1);
  }
  EXPECT_TRUE(wait_until(soon(), [&] { return open_files() <= before; }))
      << before << " were open, now " << open_files();
}

// Another process that opens connections to an address and keeps them until it is let go.
class Caller {
 public:
  Caller(sockaddr_in to, int connections, bool says_something) {
    int ready[2], end[2];
    if (pipe(ready) != 0 || pipe(end) != 0) throw std::runtime_error("no pipe");
    pid_ = fork();
    if (pid_ == 0) {
      rlimit most{};
      getrlimit(RLIMIT_NOFILE, &most);
      most.rlim_cur = most.rlim_max;
      setrlimit(RLIMIT_NOFILE, &most);
      close(end[1]);
      for (int i = 0; i < connections; ++i) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0 && says_something)
          (void)!send(fd, "?", 1, MSG_NOSIGNAL);
      }
      char byte = 0;
      (void)!write(ready[1], &byte, 1);
      (void)!read(end[0], &byte, 1);  // until the other end is closed
      _exit(0);
    }
    close(ready[1]);
    close(end[0]);
    char byte = 0;
    (void)!read(ready[0], &byte, 1);
    close(ready[0]);
    end_ = end[1];
  }
  ~Caller() {
    close(end_);
    waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_ = -1;
  int end_ = -1;
};

// Lets this process open few more files than it has.
class FewFiles {
 public:
  explicit FewFiles(rlim_t more) {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit few = before_;
    few.rlim_cur = open_files() + more;
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

class SilentCallers : public Strangers {
 protected:
  // libfabric's own listener.
  sockaddr_in listener() const {
    sockaddr_in address{};
    std::memcpy(&address, victim_.data() + sizeof(provider::AddressHead), sizeof address);
    return address;
  }
  bool can_open_a_file() {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) close(fd);
    return fd >= 0;
  }
};

// Connections that say nothing are the kernel's affair.
TEST_P(SilentCallers, TakeNoDescriptors) {
  const FewFiles few(200);
  const size_t before = open_files();
  const Caller caller(listener(), 300, false);
  for (int i = 0; i < 5; ++i) {
    expect_honest();
    EXPECT_LT(open_files(), before + 20);
  }
  EXPECT_TRUE(can_open_a_file());
}

// Those that say a word and no more are shut down.
TEST_P(SilentCallers, WhoStopInTheMiddleGetLost) {
  const size_t before = open_files();
  const FewFiles few(200);
  const Caller caller(listener(), 150, true);
  EXPECT_TRUE(wait_until(soon(60), [&] { return open_files() < before + 20; }))
      << open_files() << " of " << before;
  expect_honest();
  EXPECT_TRUE(can_open_a_file());
}

// More of them than there is room for.
TEST_P(SilentCallers, WhoFillTheTableAreShutDownToo) {
  const size_t before = open_files();
  const FewFiles few(200);
  const Caller caller(listener(), 300, true);
  EXPECT_TRUE(wait_until(soon(60), [&] { return open_files() < before + 20; }))
      << open_files() << " of " << before;
  expect_honest();
  EXPECT_TRUE(can_open_a_file());
}

INSTANTIATE_TEST_SUITE_P(Tcp, SilentCallers, ::testing::ValuesIn([] {
                           std::vector<Backend> some;
                           for (Backend& backend : backends())
                             if (backend.label == "fabric_tcp") some.push_back(std::move(backend));
                           return some;
                         }()),
                         [](const auto& info) { return info.param.label; });

INSTANTIATE_TEST_SUITE_P(All, Strangers, ::testing::ValuesIn([] {
                           std::vector<Backend> some;
                           for (Backend& backend : backends())
                             if (backend.label.find("loopback_") == std::string::npos ||
                                 backend.label == "loopback_no_imm" || backend.label == "loopback_by_route" ||
                                 backend.label == "loopback_unproven")
                               some.push_back(std::move(backend));
                           return some;
                         }()),
                         [](const auto& info) { return info.param.label; });

}  // namespace
}  // namespace weft::transfer::testing
