// SPDX-License-Identifier: Apache-2.0
#include "comm/window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "support/ranks.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using testing::RanksAre;
using testing::run_ranks;

constexpr Device kHost{};
constexpr double kTimeout_s = 20;

// A byte that depends on who wrote it where.
std::byte mark(int writer, uint64_t offset) {
  return static_cast<std::byte>(writer * 37 + offset % 251 + 1);
}

std::shared_ptr<Communicator> connect(std::shared_ptr<Bootstrap> boot, double timeout_s = kTimeout_s) {
  auto comm = Communicator::create(std::move(boot), kHost, timeout_s);
  EXPECT_TRUE(comm.ok()) << comm.status().message();
  return comm.ok() ? *comm : nullptr;
}

// Each rank writes `bytes` at `from` into its right neighbour's window, and all check their own.
void write_around(Window& window, uint64_t from, uint64_t bytes) {
  Communicator& comm = *window.communicator();
  const int rank = comm.rank(), ranks = comm.size();
  std::byte* right = window.base((rank + 1) % ranks);
  ASSERT_TRUE(comm.barrier().ok());
  for (uint64_t i = from; i < from + bytes; ++i) right[i] = mark(rank, i);
  ASSERT_TRUE(comm.barrier().ok());
  const int left = (rank + ranks - 1) % ranks;
  for (uint64_t i = from; i < from + bytes; ++i)
    ASSERT_EQ(window.local()[i], mark(left, i)) << "offset " << i;
}

class WindowTest : public ::testing::TestWithParam<RanksAre> {};

TEST_P(WindowTest, EveryByteOfAPeerIsReachable) {
  for (int ranks : {1, 2, 3, 7, 17})
    run_ranks(GetParam(), ranks, [](std::shared_ptr<Bootstrap> boot) {
      const auto comm = connect(boot);
      auto window = Window::create(comm, 5000);
      ASSERT_TRUE(window.ok()) << window.status().message();
      EXPECT_GE((*window)->bytes(), 5000u);
      for (uint64_t i = 0; i < (*window)->bytes(); ++i) ASSERT_EQ((*window)->local()[i], std::byte{0});
      write_around(**window, 0, 100);
      write_around(**window, (*window)->bytes() - 3, 3);
      for (int rank = 0; rank < comm->size(); ++rank)
        EXPECT_EQ((*window)->table()[rank], (*window)->base(rank));
    });
}

TEST_P(WindowTest, GrowingKeepsAddressesAndContents) {
  run_ranks(GetParam(), 3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = connect(boot);
    auto window = Window::create(comm, 4096);
    ASSERT_TRUE(window.ok()) << window.status().message();
    write_around(**window, 0, 4096);
    const std::vector<std::byte*> before((*window)->table(), (*window)->table() + 3);
    for (uint64_t bytes : {4096u, 9000u, 70000u, 100u, 1u << 20}) {
      const uint64_t old_bytes = (*window)->bytes();
      const Status grown = (*window)->grow(bytes);
      ASSERT_TRUE(grown.ok()) << grown.message();
      EXPECT_GE((*window)->bytes(), bytes);
      if (bytes <= old_bytes) EXPECT_EQ((*window)->bytes(), old_bytes);
      for (uint64_t i = old_bytes; i < (*window)->bytes(); ++i)
        ASSERT_EQ((*window)->local()[i], std::byte{0});
      write_around(**window, old_bytes - 50, (*window)->bytes() - old_bytes + 50);
    }
    EXPECT_EQ(before, std::vector<std::byte*>((*window)->table(), (*window)->table() + 3));
    const int left = (comm->rank() + 2) % 3;
    for (uint64_t i = 0; i < 4000; ++i) ASSERT_EQ((*window)->local()[i], mark(left, i));
  });
}

TEST_P(WindowTest, SeveralAtOnceAreApart) {
  run_ranks(GetParam(), 2, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = connect(boot);
    std::vector<std::unique_ptr<Window>> windows;
    for (int i = 0; i < 5; ++i) windows.push_back(std::move(*Window::create(comm, 4096)));
    for (int i = 0; i < 5; ++i) std::memset(windows[i]->base(1 - comm->rank()), i + 1, 4096);
    ASSERT_TRUE(comm->barrier().ok());
    for (int i = 0; i < 5; ++i)
      for (int at : {0, 4095}) EXPECT_EQ(windows[i]->local()[at], static_cast<std::byte>(i + 1));
    ASSERT_TRUE(comm->barrier().ok());
  });
}

TEST_P(WindowTest, OutlivesThePeersThatDestroyTheirs) {
  run_ranks(GetParam(), 2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = connect(boot);
    auto window = std::move(*Window::create(comm, 4096));
    std::memset(window->local(), 7, 4096);
    ASSERT_TRUE(boot->all_gather("", Deadline::after_s(kTimeout_s)).ok());
    if (boot->rank() == 0) {
      window.reset();
      comm.reset();
    }
    ASSERT_TRUE(boot->all_gather("", Deadline::after_s(kTimeout_s)).ok());
    if (boot->rank() == 1) EXPECT_EQ(window->base(0)[4095], std::byte{7});
  });
}

TEST_P(WindowTest, DifferentSizesFailOnEveryRankAndLeaveItUsable) {
  run_ranks(GetParam(), 3, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = connect(boot);
    const Result<std::unique_ptr<Window>> wrong = Window::create(comm, comm->rank() == 1 ? 8192 : 4096);
    EXPECT_EQ(wrong.status().code(), Code::kInvalid);
    EXPECT_THAT(wrong.status().message(), HasSubstr("bytes: got 4096 on rank 0 and 8192 on rank 1"));
    auto window = std::move(*Window::create(comm, 4096));
    EXPECT_EQ(window->grow(comm->rank() == 2 ? 1 << 20 : 100).code(), Code::kInvalid);
    EXPECT_EQ(window->bytes(), 4096u);
    write_around(*window, 0, 4096);
    EXPECT_TRUE(window->grow(8192).ok());
    write_around(*window, 4096, 4096);
  });
}

TEST_P(WindowTest, ZeroAndTooManyBytesAreRefusedOnEveryRank) {
  run_ranks(GetParam(), 2, [](std::shared_ptr<Bootstrap> boot) {
    const auto comm = connect(boot);
    const Status zero = Window::create(comm, comm->rank() == 1 ? 0 : 4096).status();
    EXPECT_EQ(zero.code(), Code::kInvalid);
    EXPECT_THAT(zero.message(), HasSubstr("window.create, on rank 1: bytes: got 0"));
    EXPECT_EQ(Window::create(comm, UINT64_MAX).status().code(), Code::kCapacity);
    auto window = std::move(*Window::create(comm, 4096));
    EXPECT_EQ(window->grow(uint64_t{1} << 45).code(), Code::kCapacity);
    write_around(*window, 0, 4096);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, WindowTest, ::testing::Values(RanksAre::kThreads, RanksAre::kProcesses),
                         [](const auto& info) { return to_string(info.param); });

}  // namespace
}  // namespace weft
