// SPDX-License-Identifier: Apache-2.0
#include "memory/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

namespace weft {
namespace {

constexpr uint64_t kPageBytes = uint64_t{2} << 20;
constexpr uint64_t kBytes = 4 * kPageBytes;

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
  prefer_huge_pages(memory.at(), kPageBytes - 1);
  prefer_huge_pages(nullptr, 0);
  for (uint64_t at = 0; at < kBytes; at += kPageBytes / 2) EXPECT_FALSE(is_asked_for(memory.at() + at));
}

}  // namespace
}  // namespace weft
