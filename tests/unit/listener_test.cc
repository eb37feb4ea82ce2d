// SPDX-License-Identifier: Apache-2.0
//
// Connections are accepted from clients that know the key, whoever else connects at the same time; and the rendezvous
// behind such a listener.
#include "bootstrap/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

#include "base/config.h"
#include "base/text.h"
#include "bootstrap/tcp_bootstrap.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

std::string hex(const Proof& proof) {
  std::string out;
  for (const uint8_t byte : proof) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

// RFC 4231, test cases 1, 2 and 6: a key of a block and less, and one that is longer.
TEST(Proof, IsHmacSha256) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(
      hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Proof, MeansOneRoleAndOneSentence) {
  const Proof proof = prove("key", "join", {"ab", "c"});
  EXPECT_TRUE(is_same(proof, prove("key", "join", {"ab", "c"})));
  EXPECT_FALSE(is_same(proof, prove("key", "join", {"a", "bc"})));
  EXPECT_FALSE(is_same(proof, prove("key", "welcome", {"ab", "c"})));
  EXPECT_FALSE(is_same(proof, prove("kez", "join", {"ab", "c"})));
  EXPECT_NE(random_nonce(), random_nonce());
}

// Both sides of a connection, before anything is proven.
Stream shaken(FileDescriptor socket, Stream::Side side) {
  ::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
  auto stream = Stream::open(std::move(socket), side, "");
  EXPECT_TRUE(stream.ok());
  EXPECT_TRUE(
      wait_until(Deadline::after_s(10), [&] { return stream->shake_hands() == Stream::Hands::kShaken; }));
  return std::move(*stream);
}

// A listener on a thread, which welcomes everybody who knows the key.
class Gate {
 public:
  explicit Gate(std::string key) : listener_(listener(), std::move(key)) {
    thread_ = std::thread([this] {
      while (!stop_) {
        std::vector<pollfd> entries;
        listener_.add_to(entries);
        ::poll(entries.data(), entries.size(), 5);
        for (Client& client : listener_.serve()) {
          Listener::welcome(client);
          clients_.push_back(std::move(client));
          came_ = clients_.size();
        }
      }
    });
  }
  ~Gate() {
    stop_ = true;
    thread_.join();
  }
  size_t came() const { return came_; }
  const SocketAddress& address() const { return address_; }
  Result<Stream> connect_with(const std::string& key, double limit_s = 20) const {
    return connect_to({{address_}, key, 3, 4, "the gate"}, Deadline::after_s(limit_s));
  }
  FileDescriptor stranger() const {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(socket.get(), &address_.any, sizeof address_.v4), 0);
    return socket;
  }

 private:
  FileDescriptor listener() {
    FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    address_.v4.sin_family = AF_INET;
    address_.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address_.v4;
    EXPECT_EQ(::bind(socket.get(), &address_.any, bytes), 0);
    EXPECT_EQ(::listen(socket.get(), 1024), 0);
    EXPECT_EQ(::getsockname(socket.get(), &address_.any, &bytes), 0);
    return socket;
  }

  SocketAddress address_{};
  Listener listener_;
  std::vector<Client> clients_;
  std::atomic<size_t> came_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

const std::string kKey = "the key of this rendezvous";

TEST(Listener, LetsInWhoKnowsTheKey) {
  Gate gate(kKey);
  const auto socket = gate.connect_with(kKey);
  ASSERT_TRUE(socket.ok()) << socket.status().message();
  EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return gate.came() == 1; }));
}

TEST(Listener, TellsWhoHasAnotherKeyOrNone) {
  Gate gate(kKey);
  for (const char* wrong : {"", "the key of another one"}) {
    const auto socket = gate.connect_with(wrong);
    EXPECT_EQ(socket.status().code(), Code::kInvalid);
    EXPECT_THAT(socket.status().message(), HasSubstr("WEFT_JOB_SECRET"));
  }
  EXPECT_EQ(gate.came(), 0u);
}

// Somebody in between has heard all of it, and says it again.
TEST(Listener, AClaimThatWasOverheardIsWorthNothing) {
  Gate gate(kKey);
  Challenge first{};
  Claim claim{};
  FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  SocketAddress between{};
  between.v4.sin_family = AF_INET;
  between.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof between.v4;
  ASSERT_EQ(::bind(listener.get(), &between.any, bytes), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), &between.any, &bytes), 0);
  std::thread rank([&] { (void)connect_to({{between}, kKey, 3, 4, "the gate"}, Deadline::after_s(3)); });
  const Deadline soon = Deadline::after_s(10);
  {
    Stream theirs =
        shaken(FileDescriptor(::accept(listener.get(), nullptr, nullptr)), Stream::Side::kListener);
    Stream ours = shaken(gate.stranger(), Stream::Side::kCaller);
    ASSERT_EQ(receive_all(ours, &first, sizeof first, soon), Moved::kAll);
    ASSERT_EQ(send_all(theirs, &first, sizeof first, soon), Moved::kAll);
    ASSERT_EQ(receive_all(theirs, &claim, sizeof claim, soon), Moved::kAll);
  }
  listener.close();
  rank.join();
  Stream again = shaken(gate.stranger(), Stream::Side::kCaller);
  Challenge second{};
  ASSERT_EQ(receive_all(again, &second, sizeof second, soon), Moved::kAll);
  EXPECT_NE(first.nonce, second.nonce);
  ASSERT_EQ(send_all(again, &claim, sizeof claim, soon), Moved::kAll);
  uint32_t head[2] = {7, 7};
  ASSERT_EQ(receive_all(again, head, sizeof head, soon), Moved::kAll);
  EXPECT_EQ(head[0], 0u);
  EXPECT_EQ(gate.came(), 0u);
}

TEST(Listener, IgnoresGarbage) {
  Gate gate(kKey);
  std::mt19937 random(5);
  for (int i = 0; i < 100; ++i) {
    std::string bytes(random() % 200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    const FileDescriptor stranger = gate.stranger();
    (void)!::send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  EXPECT_TRUE(gate.connect_with(kKey).ok());
  EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return gate.came() == 1; }));
}

TEST(Listener, DropsWhoSaysNothing) {
  Gate gate(kKey);
  const std::vector<std::string> words = {"", "?"};
  for (const std::string& word : words) {
    const FileDescriptor silent = gate.stranger();
    (void)!::send(silent.get(), word.data(), word.size(), MSG_NOSIGNAL);
    const timeval most{static_cast<time_t>(Listener::kSilence_s) + 20, 0};
    setsockopt(silent.get(), SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
    char bytes[sizeof(Opening) + 1];
    ssize_t got = 1;
    while (got > 0) got = ::recv(silent.get(), bytes, sizeof bytes, 0);
    EXPECT_TRUE(got == 0 || errno == ECONNRESET) << std::strerror(errno);
  }
  Stream silent = shaken(gate.stranger(), Stream::Side::kCaller);
  char bytes[sizeof(Challenge) + 1];
  const Deadline until = Deadline::after_s(Listener::kSilence_s + 20);
  EXPECT_EQ(receive_all(silent, bytes, sizeof bytes, until), Moved::kGone);
}

TEST(Listener, AFloodOfSilentAndWrongConnectionsKeepsNobodyOut) {
  Gate gate(kKey);
  std::atomic<bool> stop = false;
  std::atomic<int> came = 0;
  std::thread flood([&] {
    std::vector<FileDescriptor> strangers;
    while (!stop) {
      strangers.push_back(gate.stranger());
      ++came;
      if (strangers.size() > 400) strangers.erase(strangers.begin());
      if (strangers.size() % 3 == 0) (void)!::send(strangers.back().get(), "no", 2, MSG_NOSIGNAL);
    }
  });
  wait_until(Deadline::after_s(20), [&] { return came > 300; });
  for (int i = 0; i < 4; ++i) {
    const auto socket = gate.connect_with(kKey, 60);
    EXPECT_TRUE(socket.ok()) << socket.status().message();
  }
  stop = true;
  flood.join();
}

// ---- rendezvous, which stand behind such a listener

TEST(Rendezvous, RefusesAnotherJobsSecretAndTakesTheRightOne) {
  setenv("WEFT_JOB_SECRET", "the secret of one job", 1);
  config_reload();
  const auto unique_id = open_rendezvous("lo");
  ASSERT_TRUE(unique_id.ok()) << unique_id.status().message();
  setenv("WEFT_JOB_SECRET", "the secret of another", 1);
  config_reload();
  const auto wrong = join_rendezvous(*unique_id, 0, 1, Deadline::after_s(10));
  EXPECT_EQ(wrong.status().code(), Code::kInvalid);
  EXPECT_THAT(wrong.status().message(), HasSubstr("WEFT_JOB_SECRET"));
  setenv("WEFT_JOB_SECRET", "the secret of one job", 1);
  config_reload();
  const auto right = join_rendezvous(*unique_id, 0, 1, Deadline::after_s(10));
  unsetenv("WEFT_JOB_SECRET");
  config_reload();
  ASSERT_TRUE(right.ok()) << right.status().message();
  const auto all = (*right)->all_gather("here", Deadline::after_s(10));
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_EQ((*all)[0], "here");
}

TEST(Rendezvous, AnotherIdsKeyIsRefused) {
  const auto unique_id = open_rendezvous("lo");
  ASSERT_TRUE(unique_id.ok());
  UniqueId forged = *unique_id;
  forged.key[1] ^= 1;
  EXPECT_EQ(join_rendezvous(forged, 0, 1, Deadline::after_s(10)).status().code(), Code::kInvalid);
  EXPECT_TRUE(join_rendezvous(*unique_id, 0, 1, Deadline::after_s(10)).ok());
}

// What a rank of a rendezvous hears of others.
struct Member {
  std::mutex mutex;
  std::vector<std::string> heard;
  std::shared_ptr<RendezvousBootstrap> rendezvous;  // goes first: its thread tells until then

  Member(const UniqueId& unique_id, int rank, int size) {
    auto joined = join_rendezvous(unique_id, rank, size, Deadline::after_s(10));
    if (!joined.ok()) throw std::runtime_error(joined.status().message());
    rendezvous = *joined;
    rendezvous->on_lost([this](int peer, const std::string& how) {
      std::lock_guard lock(mutex);
      heard.push_back(text("rank {} {}", peer, how));
    });
  }
  std::string all() {
    std::lock_guard lock(mutex);
    std::string words;
    for (const std::string& one : heard) words += one + ";";
    return words;
  }
  bool hears(const std::string& words) {
    wait_until(Deadline::after_s(10), [&] { return !all().empty(); });
    return all() == words;
  }
};

// A rank without a thread, which may end as it likes.
Stream plain_rank(const UniqueId& unique_id, int rank, int size) {
  SocketAddress address{};
  address.v4.sin_family = AF_INET;
  address.v4.sin_port = htons(unique_id.port);
  std::memcpy(&address.v4.sin_addr, unique_id.address, 4);
  const std::string key(reinterpret_cast<const char*>(unique_id.key), sizeof unique_id.key);
  auto stream = connect_to({{address}, key, rank, size, "the rendezvous"}, Deadline::after_s(10));
  return stream.ok() ? std::move(*stream) : Stream();
}

TEST(Rendezvous, TellsEverybodyWhoIsLost) {
  const UniqueId unique_id = *open_rendezvous("lo");
  Member zero(unique_id, 0, 3), one(unique_id, 1, 3);
  Stream two = plain_rank(unique_id, 2, 3);
  ASSERT_TRUE(two.is_open());
  two.close();
  EXPECT_TRUE(zero.hears("rank 2 closed its connection;")) << zero.all();
  EXPECT_TRUE(one.hears("rank 2 closed its connection;")) << one.all();
  const auto all = zero.rendezvous->all_gather("mine", Deadline::after_s(60));
  EXPECT_EQ(all.status().code(), Code::kPeerLost);
  EXPECT_THAT(all.status().message(), HasSubstr("rank 2 (which closed its connection)"));
}

TEST(Rendezvous, WhoKnowsHowItDiedIsHeardBeforeWhoMissesIt) {
  const UniqueId unique_id = *open_rendezvous("lo");
  Member zero(unique_id, 0, 3), one(unique_id, 1, 3);
  Stream two = plain_rank(unique_id, 2, 3);
  zero.rendezvous->report(2, "is lost: silent for 10 s", false);
  two.close();
  one.rendezvous->report(2, "was killed by signal 9", true);
  EXPECT_TRUE(zero.hears("rank 2 was killed by signal 9;")) << zero.all();
  EXPECT_TRUE(one.hears("rank 2 was killed by signal 9;")) << one.all();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(zero.all(), "rank 2 was killed by signal 9;");
}

TEST(Rendezvous, ARankThatWasGivenUpIsTold) {
  const UniqueId unique_id = *open_rendezvous("lo");
  Member zero(unique_id, 0, 2), one(unique_id, 1, 2);
  zero.rendezvous->report(1, "is lost: silent for 10 s", false);
  EXPECT_TRUE(one.hears("rank 1 is lost: silent for 10 s;")) << one.all();
}

TEST(Rendezvous, WhoLeavesIsNotLost) {
  const UniqueId unique_id = *open_rendezvous("lo");
  Member zero(unique_id, 0, 3), one(unique_id, 1, 3);
  {
    Member two(unique_id, 2, 3);
  }
  const auto all = one.rendezvous->all_gather("mine", Deadline::after_s(60));
  EXPECT_THAT(all.status().message(), HasSubstr("rank 2 (which has left)"));
  zero.rendezvous.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(one.all(), "");
}

}  // namespace
}  // namespace weft
