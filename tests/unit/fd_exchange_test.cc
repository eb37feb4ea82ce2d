// SPDX-License-Identifier: Apache-2.0
//
// What strangers of this host can do to the sockets over which ranks give each other descriptors: nothing.
#include "bootstrap/fd_exchange.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "support/other_user.h"

namespace weft {
namespace {

using testing::as_another_user;
using testing::can_be_another_user;
using ::testing::HasSubstr;

constexpr uint64_t kFirstCall = 256 + 1;  // what the first all_gather() of the first call is numbered
constexpr double kLong_s = 30;            // a deadline that nobody meets here
constexpr double kShort_s = 0.3;          // ... and one that everybody does

struct Header {  // of fd_exchange.cc
  uint64_t magic = 0x3154464557ull;
  uint64_t key = 0;
  uint64_t sequence = kFirstCall;
  uint32_t sender = 1;
  uint32_t bytes = 0;
};

std::pair<sockaddr_un, socklen_t> name_of(const FdAddress& to) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const size_t chars = std::strlen(to.socket_name);
  std::memcpy(name.sun_path + 1, to.socket_name, chars);
  return {name, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + chars)};
}

// Sends a datagram with descriptors as a stranger would. False where the kernel refuses it.
bool send_to(const FdAddress& to, const std::string& bytes, const std::vector<int>& fds, int flags = 0) {
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  auto [name, length] = name_of(to);
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_name = &name;
  message.msg_namelen = length;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(253 * sizeof(int))] = {};
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  }
  return sendmsg(socket.get(), &message, flags) == static_cast<ssize_t>(bytes.size());
}

std::string forged(const FdAddress& to, std::string_view bytes = {}) {
  Header header;
  header.key = to.key;
  header.bytes = static_cast<uint32_t>(bytes.size());
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + std::string(bytes);
}

size_t open_descriptors() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                           std::filesystem::directory_iterator()));
}

// Two ranks of this process that have met.
class FdExchangeTest : public ::testing::Test {
 protected:
  FdExchangeTest() {
    set_log_sink([this](LogLevel level, const std::string& line) {
      std::lock_guard lock(mutex_);
      if (level == LogLevel::kWarn) warnings_.push_back(line);
    });
    for (int rank = 0; rank < 2; ++rank) ranks_.push_back(std::move(*FdExchange::open(rank)));
    for (auto& rank : ranks_) {
      EXPECT_TRUE(rank->connect({ranks_[0]->address(), ranks_[1]->address()}).ok());
      rank->begin_call();
    }
  }
  ~FdExchangeTest() override { set_log_sink({}); }

  Result<std::vector<FdMessage>> gather(int rank, const FdMessage& mine, double limit_s = kLong_s) {
    return ranks_[rank]->all_gather(mine, "test", Deadline::after_s(limit_s));
  }
  // What rank 0 gets of rank 1 once both have called.
  std::string honest_call() {
    std::thread other([&] { EXPECT_TRUE(gather(1, {"honest", {}}).ok()); });
    const auto all = gather(0, {"mine", {}});
    other.join();
    return all.ok() ? (*all)[1].bytes : all.status().message();
  }
  std::vector<std::string> warnings() {
    std::lock_guard lock(mutex_);
    return warnings_;
  }

  std::vector<std::unique_ptr<FdExchange>> ranks_;
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

TEST_F(FdExchangeTest, AnotherUserWithTheKeyIsNoRank) {
  if (!can_be_another_user()) GTEST_SKIP() << "only root can become another user";
  const FdAddress to = ranks_[0]->address();
  ASSERT_EQ(as_another_user([&] { return send_to(to, forged(to, "forged"), {0, 0}) ? 0 : 1; }), 0);
  const auto alone = gather(0, {"mine", {}}, kShort_s);
  EXPECT_THAT(alone.status().message(), HasSubstr("for rank 1"));
  EXPECT_THAT(warnings(),
              ::testing::ElementsAre(
                  HasSubstr("a datagram of user 65534 with 2 descriptors is refused: another user sent it")));
  ranks_[1]->begin_call();
  ranks_[0]->begin_call();
  EXPECT_EQ(honest_call(), "honest");
}

// A connected socket whose close() waits for an hour: what it has to send is not taken by `reader`.
struct Lingering {
  FileDescriptor socket, reader;

  Lingering() {
    const FileDescriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof address;
    auto* any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener.get(), any, bytes), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), any, &bytes), 0);
    socket = FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const linger an_hour{1, 3600};
    EXPECT_EQ(setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &an_hour, sizeof an_hour), 0);
    EXPECT_EQ(connect(socket.get(), any, bytes), 0);
    reader = FileDescriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::string much(1 << 20, 'x');
    while (send(socket.get(), much.data(), much.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
  }
};

// The close of a stranger's socket would hold the rank for an hour.
TEST_F(FdExchangeTest, DescriptorsThatTakeLongToCloseHoldNobody) {
  if (!can_be_another_user()) GTEST_SKIP() << "only root can become another user";
  const FdAddress to = ranks_[0]->address();
  const size_t before = open_descriptors();
  {
    Lingering slow;
    ASSERT_EQ(as_another_user([&] {
                const bool with_key = send_to(to, forged(to), {slow.socket.get()});
                const bool without = send_to(to, "no key", {slow.socket.get(), slow.socket.get()});
                return with_key && without ? 0 : 1;
              }),
              0);
    slow.socket =
        FileDescriptor();  // the rank's is the last now; a close of ours would wait, were it the last
    EXPECT_EQ(honest_call(), "honest");
    slow.reader.close();  // resets the connection: the waiting close ends
  }
  EXPECT_TRUE(wait_until(Deadline::after_s(kLong_s), [&] { return open_descriptors() == before; }));
}

TEST_F(FdExchangeTest, RefusedDescriptorsAreAllClosedAndSaidOnce) {
  const size_t before = open_descriptors();
  const FdAddress to = ranks_[0]->address();
  constexpr int kTimes = 20;
  for (int i = 0; i < kTimes; ++i) {
    // Of this user, with the key: two descriptors, as many as there can be, and bytes that are not there.
    EXPECT_TRUE(send_to(to, forged(to), {0, 1}));
    EXPECT_TRUE(send_to(to, forged(to), std::vector<int>(253, 0)));
    EXPECT_TRUE(send_to(to, forged(to, "abc").substr(0, sizeof(Header) + 1), {0}));
    EXPECT_TRUE(send_to(to, forged(to, std::string(5000, 'x')), {0}));
    EXPECT_FALSE(gather(0, {"mine", {}}, 0).ok());
    ranks_[0]->begin_call();
  }
  EXPECT_TRUE(wait_until(Deadline::after_s(kLong_s), [&] { return open_descriptors() == before; }))
      << open_descriptors() << " for " << before;
  EXPECT_LT(warnings().size(), size_t{4 * kTimes});
  EXPECT_THAT(warnings()[0], HasSubstr("is refused: it is not one of this version's (1 so far)"));
}

TEST_F(FdExchangeTest, WhoDoesNotKnowTheKeyDoesNotReachTheQueue) {
  const FdAddress to = ranks_[0]->address();
  std::string almost = forged(to);
  almost[15] ^= 1;               // of the key
  for (int i = 0; i < 100; ++i)  // a queue holds some ten
    for (const std::string& junk : {std::string(), std::string("x"), almost, forged(to).substr(0, 15)})
      ASSERT_TRUE(send_to(to, junk, {}, MSG_DONTWAIT)) << "the queue is full after " << i;
  EXPECT_EQ(honest_call(), "honest");
  EXPECT_THAT(warnings(), ::testing::IsEmpty());
}

TEST_F(FdExchangeTest, WhoTakesTheNameOfADeadRankGetsNothing) {
  const FdAddress of_the_dead = ranks_[1]->address();
  ranks_.pop_back();
  const FileDescriptor heir(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto [name, length] = name_of(of_the_dead);
  ASSERT_EQ(bind(heir.get(), reinterpret_cast<const sockaddr*>(&name), length), 0);
  const auto alone = gather(0, {"memory", FileDescriptor(memfd_create("test", MFD_CLOEXEC))});
  EXPECT_EQ(alone.status().code(), Code::kPeerLost);
  EXPECT_THAT(alone.status().message(), HasSubstr("rank 1 is gone (its socket is closed)"));
  char byte = 0;
  EXPECT_LT(recv(heir.get(), &byte, 1, MSG_DONTWAIT), 0);
}

}  // namespace
}  // namespace weft
