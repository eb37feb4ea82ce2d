// SPDX-License-Identifier: Apache-2.0
#include "memory/heap.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

namespace weft {
namespace {

TEST(Heap, TakesFirstFitAligned) {
  Heap heap(100, 4096);
  EXPECT_EQ(heap.take(1), 256u);
  EXPECT_EQ(heap.take(257), 512u);
  EXPECT_EQ(heap.take(0), 1024u);
  EXPECT_EQ(heap.largest(), 4096u - 1280u);
}

TEST(Heap, NeighboursJoinInAnyOrder) {
  for (const std::vector<int>& order : {std::vector{0, 1, 2}, {2, 1, 0}, {0, 2, 1}, {1, 0, 2}}) {
    Heap heap(0, 3 * 256);
    uint64_t at[3];
    for (uint64_t& offset : at) offset = *heap.take(256);
    EXPECT_FALSE(heap.take(1));
    for (int i : order) EXPECT_TRUE(heap.give(at[i]));
    EXPECT_EQ(heap.largest(), 3u * 256u);
  }
}

TEST(Heap, RefusesWhatIsNotOut) {
  Heap heap(0, 1024);
  const uint64_t at = *heap.take(512);
  EXPECT_FALSE(heap.give(at + 256));
  EXPECT_TRUE(heap.give(at));
  EXPECT_FALSE(heap.give(at));
  EXPECT_EQ(heap.taken_bytes(), 0u);
}

TEST(Heap, TooMuchIsNone) {
  Heap heap(0, 1024);
  EXPECT_FALSE(heap.take(1025));
  EXPECT_FALSE(heap.take(UINT64_MAX));
  EXPECT_FALSE(heap.take(UINT64_MAX - 255));
  EXPECT_TRUE(heap.take(1024));
}

TEST(Heap, EmptyAndInvertedRangesHoldNothing) {
  EXPECT_FALSE(Heap(0, 0).take(1));
  EXPECT_FALSE(Heap(1024, 512).take(1));
  EXPECT_FALSE(Heap(1, 256).take(1));
}

TEST(Heap, ExtensionJoinsTheFreeEnd) {
  Heap heap(0, 512);
  const uint64_t first = *heap.take(256);
  heap.extend(1024);
  EXPECT_EQ(heap.largest(), 768u);
  heap.extend(100);
  EXPECT_EQ(heap.end(), 1024u);
  EXPECT_TRUE(heap.give(first));
  EXPECT_EQ(heap.largest(), 1024u);
}

TEST(Heap, NothingCrossesTheOldEndOfAnExtensionApart) {
  Heap heap(0, 512);
  heap.extend(1024, true);
  EXPECT_EQ(heap.largest(), 512u);
  EXPECT_EQ(*heap.take(256), 0u);
  EXPECT_EQ(*heap.take(256), 256u);
  EXPECT_EQ(*heap.take(256), 512u + Heap::kAlignment);
  heap.give(256);
  heap.give(512 + Heap::kAlignment);
  EXPECT_EQ(heap.largest(), 256u);
  heap.extend(1280, true);  // no more than the gap
  EXPECT_EQ(heap.largest(), 256u);
  EXPECT_EQ(heap.end(), 1280u);
}

TEST(Heap, RandomUseNeverOverlapsAndLosesNothing) {
  constexpr uint64_t kBytes = 64 * 1024;
  Heap heap(0, kBytes);
  std::mt19937 random(1);
  std::vector<std::pair<uint64_t, uint64_t>> out;  // offset, bytes
  std::vector<char> used(kBytes / Heap::kAlignment, 0);
  const auto mark = [&](uint64_t offset, uint64_t bytes, char to) {
    for (uint64_t i = offset / Heap::kAlignment; i * Heap::kAlignment < offset + bytes; ++i) {
      ASSERT_NE(used[i], to);
      used[i] = to;
    }
  };
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 && !out.empty()) {
      const size_t i = random() % out.size();
      mark(out[i].first, out[i].second, 0);
      EXPECT_TRUE(heap.give(out[i].first));
      out.erase(out.begin() + static_cast<long>(i));
    } else if (const uint64_t bytes = 1 + random() % 4096; const auto at = heap.take(bytes)) {
      ASSERT_LE(*at + bytes, kBytes);
      mark(*at, bytes, 1);
      out.emplace_back(*at, bytes);
    }
  }
  for (const auto& [offset, bytes] : out) EXPECT_TRUE(heap.give(offset));
  EXPECT_EQ(heap.largest(), kBytes);
}

TEST(Heap, ThreadsShareIt) {
  Heap heap(0, 1 << 20);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&heap] {
      for (int step = 0; step < 500; ++step)
        if (const auto at = heap.take(1000)) EXPECT_TRUE(heap.give(*at));
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(heap.largest(), 1u << 20);
}

}  // namespace
}  // namespace weft
