// SPDX-License-Identifier: Apache-2.0
#include "base/tally.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace weft {
namespace {

TallySnapshot snapshot() {
  const TallyPage& page = tally_page();
  Result<TallySnapshot> read = read_tally({reinterpret_cast<const char*>(&page), sizeof page});
  EXPECT_TRUE(read.ok()) << read.status().message();
  return *read;
}

const TallySnapshot::Operation& named(const TallySnapshot& all, const std::string& name) {
  for (const auto& operation : all.operations)
    if (operation.name == name) return operation;
  throw std::out_of_range(name);
}

TEST(Tally, ACallIsCountedWithItsBytesTimeAndOutcome) {
  CallTally tally("test", {7, 1, 3, "cpu", {"mapped", "", "proxy"}});
  TallyOperation& operation = tally.operation("counted");
  EXPECT_TRUE(tally.count(operation, {100, 25, 0}, [] { return Status(); }).ok());
  const Result<int> kept = tally.count(operation, {100, 25, 0}, [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    return Result<int>(5);
  });
  EXPECT_EQ(*kept, 5);
  EXPECT_FALSE(tally.count(operation, {10, 1, 0}, [] { return Status::invalid("no"); }).ok());
  const TallySnapshot seen = snapshot();
  const auto& counted = named(seen, "counted");
  EXPECT_EQ(counted.transport, "mapped+proxy");
  EXPECT_EQ(counted.calls, 3u);
  EXPECT_EQ(counted.bytes, 210u);
  EXPECT_EQ(counted.errors, 1u);
  EXPECT_GE(counted.busy_ns, 3'000'000u);
  uint64_t all = 0, slow = 0;
  for (size_t bucket = 0; bucket < counted.took.size(); ++bucket) {
    all += counted.took[bucket];
    if (bucket >= 12) slow += counted.took[bucket];  // 2^11 * 1.024 us are 2.1 ms
  }
  EXPECT_EQ(all, 3u);
  EXPECT_GE(slow, 1u);
}

TEST(Tally, AnotherThreadSeesACallUnderWay) {
  CallTally tally("stuck", {8, 0, 2, "cpu", {"", "mapped"}});
  const Status done = tally.count(tally.operation("stuck_call"), {}, [] {
    for (const auto& group : snapshot().groups) {
      if (group.what != "stuck") continue;
      EXPECT_EQ(group.calls, 1u);
      EXPECT_EQ(group.operation, "stuck_call");
      EXPECT_GT(group.began_ns, group.ended_ns);
      EXPECT_EQ(snapshot().calls.back().ended_ns, 0u);
    }
    return Status();
  });
  EXPECT_TRUE(done.ok());
  EXPECT_GT(snapshot().calls.back().ended_ns, 0u);
}

TEST(Tally, ALostPeerIsCountedOnceForEachObject) {
  CallTally tally("losing", {9, 0, 2, "cpu", {"", "lossy"}});
  tally.lost(1);
  tally.lost(1);
  tally.lost(17);
  uint64_t faults = 0;
  for (const auto& peer : snapshot().peers) {
    if (peer.transport != "lossy") continue;  // of other tests in this process
    EXPECT_EQ(peer.faults, peer.name == "1" ? 1u : 0u) << peer.name;
    faults += peer.faults;
  }
  EXPECT_EQ(faults, 1u);
}

TEST(Tally, TheLastCallsAreKeptInOrder) {
  CallTally tally("many", {10, 0, 1, "cpu", {""}});
  TallyOperation& operation = tally.operation("many_calls");
  for (uint64_t i = 0; i < TallyPage::kCalls + 5; ++i)
    EXPECT_TRUE(tally.count(operation, {i, i}, [] { return Status(); }).ok());
  const TallySnapshot seen = snapshot();
  ASSERT_EQ(seen.calls.size(), size_t{TallyPage::kCalls});
  EXPECT_EQ(seen.calls.back().bytes, TallyPage::kCalls + 4);
  EXPECT_EQ(seen.calls.front().number + TallyPage::kCalls - 1, seen.calls.back().number);
}

TEST(Tally, APlaceThatIsGivenUpServesTheNextObject) {
  const size_t before = snapshot().groups.size();
  for (int i = 0; i < 300; ++i) CallTally("short", {11, 0, 1, "cpu", {""}});
  EXPECT_LE(snapshot().groups.size(), before + 1);
}

TEST(Tally, NamesThatDoNotFitShareTheLastPlace) {
  for (uint32_t i = 0; i < 2 * TallyPage::kOperations; ++i)
    count_up(tally_operation("name" + std::to_string(i), "t").calls, 1);
  const TallySnapshot seen = snapshot();
  ASSERT_EQ(seen.operations.size(), size_t{TallyPage::kOperations});
  EXPECT_EQ(seen.operations.back().name, "others");
  EXPECT_GE(seen.operations.back().calls, uint64_t{TallyPage::kOperations});
}

TEST(Tally, WhatIsNoPageIsRefused) {
  EXPECT_EQ(read_tally("short").status().code(), Code::kInvalid);
  const std::string zeroes(sizeof(TallyPage), '\0');
  EXPECT_THAT(read_tally(zeroes).status().message(), testing::HasSubstr("another version"));
}

}  // namespace
}  // namespace weft
