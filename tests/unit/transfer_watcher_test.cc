// SPDX-License-Identifier: Apache-2.0
//
// The watcher of numbers that kernels write; here the host writes them.
#include "transfer/watcher.h"

#include <gtest/gtest.h>

#include "base/deadline.h"

namespace weft::transfer {
namespace {

void store(const Watch& watch, uint64_t value) {
  std::atomic_ref<uint64_t>(*watch.address()).store(value, std::memory_order_release);
}

bool comes(const std::atomic<uint64_t>& seen, uint64_t value) {
  return wait_until(Deadline::after_s(10), [&] { return seen.load() == value; });
}

TEST(Watcher, TheLastValueIsNeverSkipped) {
  Watcher watcher;
  std::atomic<uint64_t> seen{0};
  auto watch = *watcher.watch([&](uint64_t was, uint64_t is) {
    EXPECT_EQ(was, seen.load());
    seen = is;
    return true;
  });
  for (uint64_t value = 1; value <= 1000; ++value) store(*watch, value);
  EXPECT_TRUE(comes(seen, 1000));
}

TEST(Watcher, EndsWhenItsCallbackSaysSo) {
  Watcher watcher;
  std::atomic<uint64_t> calls{0};
  auto watch = *watcher.watch([&](uint64_t, uint64_t) { return ++calls < 2; });
  store(*watch, 1);
  EXPECT_TRUE(comes(calls, 1));
  store(*watch, 2);
  EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return !watch->is_active(); }));
  EXPECT_EQ(calls.load(), 2u);
}

TEST(Watcher, NumbersHaveRoomForManyAndAreUsedAgain) {
  Watcher watcher;
  std::vector<std::shared_ptr<Watch>> watches;
  std::atomic<uint64_t> sum{0};
  for (int i = 0; i < 1000; ++i)  // two pages
    watches.push_back(*watcher.watch([&](uint64_t was, uint64_t is) { return sum += is - was, true; }));
  for (auto& watch : watches) store(*watch, 3);
  EXPECT_TRUE(comes(sum, 3000));
  uint64_t* const place = watches[0]->address();
  watcher.release(watches[0]);
  auto again = *watcher.watch([](uint64_t, uint64_t) { return true; });
  EXPECT_EQ(again->address(), place);
  EXPECT_EQ(*again->address(), 0u);
}

TEST(Watcher, CallbackMayReleaseItselfAndOthersAndWatchMore) {
  Watcher watcher;
  std::atomic<uint64_t> calls{0}, of_other{0}, of_new{0};
  auto other = *watcher.watch([&](uint64_t, uint64_t) { return ++of_other, true; });
  std::shared_ptr<Watch> self, made;
  self = *watcher.watch([&](uint64_t, uint64_t) {
    watcher.release(self);
    watcher.release(other);
    made = *watcher.watch([&](uint64_t, uint64_t is) { return of_new = is, true; });
    ++calls;
    return true;
  });
  store(*self, 1);
  EXPECT_TRUE(comes(calls, 1));
  EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return !self->is_active() && !other->is_active(); }));
  EXPECT_EQ(of_other.load(), 0u);
  store(*made, 9);
  EXPECT_TRUE(comes(of_new, 9));
  EXPECT_EQ(calls.load(), 1u);
}

TEST(Watcher, CallbackMayCloseAndDropIt) {
  auto watcher = std::make_unique<Watcher>();
  std::atomic<uint64_t> calls{0};
  auto watch = *watcher->watch([&](uint64_t, uint64_t) {
    watcher.reset();
    ++calls;
    return true;
  });
  store(*watch, 1);
  EXPECT_TRUE(comes(calls, 1));
  EXPECT_TRUE(wait_until(Deadline::after_s(10), [&] { return !watch->is_active(); }));
}

}  // namespace
}  // namespace weft::transfer
