// SPDX-License-Identifier: Apache-2.0
#include "memory/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <span>
#include <string>

#include "memory/range.h"

namespace weft {
namespace {

constexpr uint64_t kBytes = 4 * kHugePageBytes;

// Fresh memory of this process.
class Fresh {
 public:
  Fresh() : at_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Fresh() { munmap(at_, kBytes); }
  std::byte* at() const { return static_cast<std::byte*>(at_); }

 private:
  void* at_;
};

// Whether huge pages are asked for under an address: flag "hg" of its mapping in /proc/self/smaps.
bool is_asked_for(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<uint64_t>(address);
  bool is_here = false;
  for (std::string line; std::getline(maps, line);) {
    uint64_t first = 0, end = 0;
    if (sscanf(line.c_str(), "%lx-%lx ", &first, &end) == 2) is_here = first <= wanted && wanted < end;
    if (is_here && line.starts_with("VmFlags:")) return line.find(" hg") != std::string::npos;
  }
  return false;
}

bool has_huge_pages() {
  return std::filesystem::exists("/sys/kernel/mm/transparent_hugepage/enabled");
}

// KiB of huge pages under an address, as this process maps them.
uint64_t huge_kib(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<uint64_t>(address);
  bool is_here = false;
  for (std::string line; std::getline(maps, line);) {
    uint64_t first = 0, end = 0, kib = 0;
    if (sscanf(line.c_str(), "%lx-%lx ", &first, &end) == 2) is_here = first <= wanted && wanted < end;
    if (is_here && sscanf(line.c_str(), "ShmemPmdMapped: %lu kB", &kib) == 1) return kib;
  }
  return 0;
}

// Whether the system gives shared memory huge pages when asked.
bool can_collapse() {
  constexpr int kCollapse = 25;
  void* at = mmap(nullptr, 2 * kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const uint64_t past = reinterpret_cast<uint64_t>(at) % kHugePageBytes;
  void* piece = static_cast<std::byte*>(at) + (past ? kHugePageBytes - past : 0);
  piece = mmap(piece, kHugePageBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  std::fill_n(static_cast<std::byte*>(piece), kHugePageBytes, std::byte{1});
  const bool can = madvise(piece, kHugePageBytes, kCollapse) == 0;
  munmap(at, 2 * kHugePageBytes);
  return can;
}

std::span<uint64_t> words_of(const MappedRange& range) {
  return {reinterpret_cast<uint64_t*>(range.base()), range.bytes() / sizeof(uint64_t)};
}

// A window that has grown, and what another process would make of it.
TEST(HugePages, AreUnderWhatIsInUseOfAWindow) {
  if (!can_collapse()) GTEST_SKIP() << "this kernel gives shared memory no huge pages";
  const RangeOptions options{.device = {}, .reserve_bytes = 64 << 20, .least_bytes = 64 << 20};
  auto own = make_range(options), seen = make_range(options);
  ASSERT_TRUE(own.ok() && seen.ok());
  const uint64_t page = (*own)->granularity();
  for (const uint64_t bytes : {5 * page, kBytes, kBytes}) {
    auto offer = (*own)->extend(bytes);
    ASSERT_TRUE(offer.ok()) << offer.status().message();
    const Status seen_status = (*seen)->import(*offer, bytes);
    ASSERT_TRUE(seen_status.ok()) << seen_status.message();
  }
  const std::span<uint64_t> words = words_of(**own).first((5 * page + kBytes) / sizeof(uint64_t));
  std::iota(words.begin(), words.end(), 1);
  for (int launch = 0; launch < 100; ++launch) (*own)->used();
  EXPECT_GE(huge_kib((*own)->base() + 5 * page), (kBytes - 2 * kHugePageBytes) >> 10);
  EXPECT_EQ(huge_kib((*own)->base() + 5 * page + kBytes), 0) << "nobody has touched the last segment";
  for (const auto& range : {*own, *seen}) {
    const std::span<uint64_t> all = words_of(*range);
    for (uint64_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i < words.size() ? i + 1 : 0);
  }
  EXPECT_GE(huge_kib((*seen)->base() + 5 * page), (kBytes - 2 * kHugePageBytes) >> 10);
}

TEST(HugePages, AreAskedForInsideFreshMemoryOnly) {
  if (!has_huge_pages()) GTEST_SKIP() << "this kernel has no transparent huge pages";
  const Fresh memory;
  prefer_huge_pages(memory.at() + 64, kBytes - 128);
  EXPECT_TRUE(is_asked_for(memory.at() + kBytes / 2));
  EXPECT_FALSE(is_asked_for(memory.at()));
  EXPECT_FALSE(is_asked_for(memory.at() + kBytes - 1));
  EXPECT_TRUE(std::all_of(memory.at(), memory.at() + kBytes, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(HugePages, AreNotAskedForUnderLessThanOne) {
  const Fresh memory;
  prefer_huge_pages(memory.at(), kHugePageBytes - 1);
  prefer_huge_pages(nullptr, 0);
  for (uint64_t at = 0; at < kBytes; at += kHugePageBytes / 2) EXPECT_FALSE(is_asked_for(memory.at() + at));
}

}  // namespace
}  // namespace weft
