// SPDX-License-Identifier: Apache-2.0
#include "base/shared_memory.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "base/same_host.h"

namespace weft {
namespace {

constexpr uint64_t kBytes = 8192;

TEST(SharedMemory, IsTheSameBytesUnderItsName) {
  auto made = SharedMemory::create(kBytes);
  ASSERT_TRUE(made.ok()) << made.status().message();
  auto opened = SharedMemory::open(made->name(), kBytes);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  opened->data()[kBytes - 1] = 'x';
  EXPECT_EQ(made->data()[kBytes - 1], 'x');
  const SharedMemory moved = std::move(*opened);
  EXPECT_EQ(opened->data(), nullptr);
  EXPECT_EQ(moved.data()[kBytes - 1], 'x');
}

TEST(SharedMemory, OpensNothingElse) {
  auto made = SharedMemory::create(kBytes);
  ASSERT_TRUE(made.ok());
  EXPECT_FALSE(SharedMemory::open(made->name(), 2 * kBytes).ok());
  SharedMemory::Name name = made->name();
  ++name.key;
  EXPECT_FALSE(SharedMemory::open(name, kBytes).ok());
  name = made->name();
  name.fd = 0;  // open, but no sealed memory
  EXPECT_FALSE(SharedMemory::open(name, kBytes).ok());
  name.fd = 1u << 30;
  EXPECT_FALSE(SharedMemory::open(name, kBytes).ok());
}

}  // namespace

namespace provider {
namespace {

TEST(SameHost, CopiesListsOfDifferentShapesBothWays) {
  const Neighbour self = this_process();
  if (!can_copy_across(self)) GTEST_SKIP() << "this system forbids process_vm_readv";
  char a[100], b[100] = {};
  for (int i = 0; i < 100; ++i) a[i] = static_cast<char>(i);
  iovec here[] = {{a, 0}, {a, 30}, {a + 30, 70}}, there[] = {{b, 99}, {b + 99, 1}};
  EXPECT_EQ(copy_across(Across::kWrite, self.pid, here, 3, there, 2), 0);
  EXPECT_EQ(std::memcmp(a, b, 100), 0);
  std::memset(a, 0, sizeof a);
  iovec back[] = {{a, 100}}, from[] = {{b, 50}, {b + 50, 50}};
  EXPECT_EQ(copy_across(Across::kRead, self.pid, back, 1, from, 2), 0);
  EXPECT_EQ(std::memcmp(a, b, 100), 0);
}

TEST(SameHost, FailsWithTheSystemsReason) {
  Neighbour stranger = this_process();
  ++stranger.witness;
  EXPECT_FALSE(can_copy_across(stranger));
  char byte = 0;
  iovec here{&byte, 1}, there{nullptr, 1};
  EXPECT_NE(copy_across(Across::kWrite, this_process().pid, &here, 1, &there, 1), 0);
}

TEST(SameHost, AKeyIsGrantedUntilItIsTakenBack) {
  const Neighbour self = this_process();
  if (!can_copy_across(self)) GTEST_SKIP() << "this system forbids process_vm_readv";
  constexpr uint64_t kKey = 0x5eed'0000'0000'1234, kSamePlace = kKey + (uint64_t{1} << 32);
  EXPECT_EQ(check_grant(self, kKey), EKEYREVOKED);
  ASSERT_TRUE(grant(kKey));
  EXPECT_FALSE(grant(kSamePlace));
  EXPECT_EQ(check_grant(self, kKey), 0);
  EXPECT_EQ(check_grant(self, kSamePlace), EKEYREVOKED);
  take_back(kSamePlace);  // which has no place
  EXPECT_EQ(check_grant(self, kKey), 0);
  take_back(kKey);
  EXPECT_EQ(check_grant(self, kKey), EKEYREVOKED);
  ASSERT_TRUE(grant(kSamePlace));
  take_back(kSamePlace);
}

}  // namespace
}  // namespace provider
}  // namespace weft
