// SPDX-License-Identifier: Apache-2.0
//
// Ranks that die or stall while the others create communicators and windows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "comm/window.h"
#include "support/ranks.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_process_ranks;
using testing::run_thread_ranks;

constexpr Device kHost{};

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Ends the process of `rank` when nobody needs it any more for the calls that all have made.
void end_when_all_are_here(Bootstrap& boot, int rank) {
  ASSERT_TRUE(boot.all_gather("", Deadline::after_s(60)).ok());
  if (boot.rank() == rank) _exit(0);
}

TEST(PeerLost, BootstrapNamesTheRankThatNeverComes) {
  run_thread_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    ASSERT_TRUE(boot->all_gather("", Deadline::after_s(60)).ok());  // the others are not late
    if (boot->rank() == 1) return;
    const auto comm = Communicator::create(boot, kHost, 2);
    EXPECT_EQ(comm.status().code(), Code::kPeerLost);
    EXPECT_THAT(comm.status().message(), AllOf(HasSubstr(text("rank {}, bootstrap.all_gather", boot->rank())),
                                               HasSubstr("for rank 1")));
  });
}

TEST(PeerLost, WindowCreationNamesTheRankThatStalls) {
  run_thread_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, kHost, 2);
    const Status status = boot->rank() == 2 ? Status() : Window::create(comm, 4096).status();
    ASSERT_TRUE(boot->all_gather("", Deadline::after_s(60)).ok());  // nobody leaves before all have seen it
    if (boot->rank() == 2) return;
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_THAT(status.message(), AllOf(HasSubstr(text("rank {}, window.create, waited ", boot->rank())),
                                        HasSubstr("s for rank 2")));
  });
}

TEST(PeerLost, ADeadProcessIsNoticedLongBeforeTheDeadline) {
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, kHost, 60);
    end_when_all_are_here(*boot, 2);
    Status status;
    EXPECT_LT(seconds_of([&] { status = Window::create(comm, 4096).status(); }), 30);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("window.create"), HasSubstr("rank 2 (pid "),
                                        HasSubstr(" exited with status 0")));
  });
}

TEST(PeerLost, AProcessThatDiesBeforeGrowingLeavesTheWindowAsItWas) {
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, kHost, 60);
    auto window = std::move(*Window::create(comm, 4096));
    end_when_all_are_here(*boot, 0);
    const Status status = window->grow(1 << 20);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("window.grow"), HasSubstr("rank 0 (pid "),
                                        HasSubstr(" exited with status 0")));
    EXPECT_EQ(window->bytes(), 4096u);
    for (int rank = 0; rank < 3; ++rank) window->base(rank)[4095] = std::byte{1};  // also the dead one's
  });
}

TEST(PeerLost, ABarrierNamesTheRankThatIsGoneAndTheOneThatStalls) {
  run_process_ranks(3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, kHost, 60);
    ASSERT_TRUE(comm->barrier().ok());
    end_when_all_are_here(*boot, 1);
    Status status;
    EXPECT_LT(seconds_of([&] { status = comm->barrier(); }), 30);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_THAT(status.message(),
                AllOf(HasSubstr("barrier"), HasSubstr("rank 1 (pid "), HasSubstr(" exited with status 0")));
  });
  run_thread_ranks(2, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, kHost, 2);
    const Status status = boot->rank() == 1 ? Status() : comm->barrier();
    ASSERT_TRUE(boot->all_gather("", Deadline::after_s(60)).ok());
    if (boot->rank() == 1) return;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("rank 0, barrier, waited "), HasSubstr("for rank 1")));
  });
}

TEST(PeerLost, ALateRankAfterATimeoutDoesNotConfuseTheNextCall) {
  std::atomic<bool> has_given_up{false};
  run_thread_ranks(2, [&](std::shared_ptr<Bootstrap> boot) {
    const auto comm = *Communicator::create(boot, kHost, 2);
    if (boot->rank() == 1)
      EXPECT_TRUE(wait_until(Deadline::after_s(60), [&] { return has_given_up.load(); }));
    EXPECT_FALSE(Window::create(comm, 4096).ok());
    has_given_up = true;
    ASSERT_TRUE(boot->all_gather("", Deadline::after_s(60)).ok());
    const auto window = Window::create(comm, 8192);
    ASSERT_TRUE(window.ok()) << window.status().message();
    EXPECT_EQ((*window)->bytes(), 8192u);
    ASSERT_TRUE(boot->all_gather("", Deadline::after_s(60)).ok());
  });
}

}  // namespace
}  // namespace weft
