// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "base/config.h"
#include "comm/window.h"
#include "support/ranks.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::run_thread_ranks;

constexpr double kTimeout_s = 20;

// Sets an environment variable for the length of a test.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) {
    setenv(name, value, 1);
    config_reload();
  }
  ~Setting() {
    unsetenv(name_);
    config_reload();
  }

 private:
  const char* name_;
};

TEST(Communicator, KnowsRanksNodesAndTransports) {
  run_thread_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = Communicator::create(boot, Device{}, kTimeout_s);
    ASSERT_TRUE(comm.ok()) << comm.status().message();
    EXPECT_EQ((*comm)->size(), 3);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ((*comm)->facts()[rank].rank, rank);
      EXPECT_EQ((*comm)->facts()[rank].node, 0);
      EXPECT_EQ((*comm)->transport_to(rank) == nullptr, rank == boot->rank());
    }
    EXPECT_TRUE((*comm)->barrier().ok());
  });
}

TEST(Communicator, TakesItsTimeoutFromTheSettings) {
  const Setting timeout("WEFT_TIMEOUT_S", "12.5");
  run_thread_ranks(1, [](std::shared_ptr<Bootstrap> boot) {
    EXPECT_EQ((*Communicator::create(boot, Device{}))->timeout_s(), 12.5);
    EXPECT_EQ((*Communicator::create(boot, Device{}, 3))->timeout_s(), 3);
  });
}

TEST(Communicator, NodesThatNoTransportJoinsFailOnEveryRankWithTheReason) {
  const Setting nodes("WEFT_RANKS_PER_NODE", "2");
  run_thread_ranks(4, [](std::shared_ptr<Bootstrap> boot) {
    const Status status = Communicator::create(boot, Device{}, kTimeout_s, "mapped").status();
    EXPECT_EQ(status.code(), Code::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr("transport 'mapped': rank 0 cannot reach rank 2 (mapped: "));
    EXPECT_THAT(status.message(), HasSubstr("WEFT_RANKS_PER_NODE"));
  });
}

TEST(Communicator, AnUnknownTransportFailsOnEveryRank) {
  const Setting transport("WEFT_TRANSPORT", "pigeon");
  run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const Status status = Communicator::create(boot, Device{}, kTimeout_s).status();
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_THAT(status.message(), HasSubstr("transport: got 'pigeon', allowed: auto, mapped"));
  });
}

TEST(Communicator, DisagreementIsToldOnEveryRank) {
  run_thread_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = Communicator::create(boot, Device{}, kTimeout_s, boot->rank() == 2 ? "mapped" : "auto");
    EXPECT_EQ(comm.status().code(), Code::kInvalid);
    EXPECT_EQ(comm.status().message(),
              "transport: got 'auto' on rank 0 and 'mapped' on rank 2, allowed: the same on all ranks");
  });
}

// A bootstrap that changes what rank 1 says.
class Tampering : public Bootstrap {
 public:
  Tampering(std::shared_ptr<Bootstrap> real, std::function<void(std::string&)> change)
      : real_(std::move(real)), change_(std::move(change)) {}
  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) override {
    auto all = real_->all_gather(mine, until);
    if (all.ok() && all->size() > 1) change_((*all)[1]);
    return all;
  }

 private:
  std::shared_ptr<Bootstrap> real_;
  std::function<void(std::string&)> change_;
};

TEST(Communicator, AnotherVersionOfWeftIsNamed) {
  const std::vector<std::function<void(std::string&)>> changes = {
      [](std::string& bytes) { bytes.resize(bytes.size() - 1); }, [](std::string& bytes) { bytes.clear(); },
      [](std::string& bytes) { bytes[0] = 99; }};
  for (const auto& change : changes)
    run_thread_ranks(2, [&](std::shared_ptr<Bootstrap> boot) {
      const auto comm = Communicator::create(std::make_shared<Tampering>(boot, change), Device{}, kTimeout_s);
      EXPECT_EQ(comm.status().message(), "rank 1 runs another version of Weft");
    });
}

void send_to(const FdAddress& to, const std::string& bytes) {
  const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const size_t chars = std::strlen(to.socket_name);
  std::memcpy(name.sun_path + 1, to.socket_name, chars);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + chars);
  EXPECT_EQ(sendto(socket, bytes.data(), bytes.size(), 0, reinterpret_cast<sockaddr*>(&name), length),
            static_cast<ssize_t>(bytes.size()));
  close(socket);
}

TEST(Communicator, StrangersAtItsSocketChangeNothing) {
  run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, Device{}, kTimeout_s);
    for (const std::string& junk :
         {std::string(), std::string("x"), std::string(32, '\0'), std::string(900, '\xff')})
      send_to(comm->fd_exchange().address(), junk);
    const auto window = Window::create(comm, 4096);
    EXPECT_TRUE(window.ok()) << window.status().message();
    EXPECT_TRUE(comm->barrier().ok());
  });
}

TEST(Communicator, FdMessagesThatAreTooLongAreRefused) {
  run_thread_ranks(1, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, Device{}, kTimeout_s);
    const FdMessage message{std::string(FdExchange::kMaxBytes + 1, 'x'), {}};
    EXPECT_EQ(comm->fd_exchange().all_gather(message, "test", comm->deadline()).status().code(),
              Code::kInvalid);
  });
}

TEST(Communicator, AGpuThatIsNotThereIsRefusedWithTheReason) {
  run_thread_ranks(1, [](std::shared_ptr<Bootstrap> boot) {
    const Status status = Communicator::create(boot, {Device::Kind::kCuda, 4711}, kTimeout_s).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(status.message(),
                ::testing::AnyOf(HasSubstr("no CUDA driver"), HasSubstr("no usable CUDA device"),
                                 HasSubstr("device: got cuda:4711")));
  });
}

}  // namespace
}  // namespace weft
