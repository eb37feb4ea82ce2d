// SPDX-License-Identifier: Apache-2.0
#include "memory/huge_pages.h"

#include <sys/mman.h>

#include <span>

#include "base/config.h"

namespace weft {
namespace {

constexpr uint64_t kPageBytes = uint64_t{2} << 20;
constexpr size_t kMaxSeen = 1024;
constexpr uint32_t kAskAgain = 16;
// Before Linux 6.1 the header lacks it and the kernel refuses it; huge pages then come with time.
constexpr int kCollapse = 25;

// The whole huge pages inside a buffer.
std::span<std::byte> pages_inside(std::byte* address, uint64_t bytes) {
  const uint64_t start = reinterpret_cast<uint64_t>(address);
  const uint64_t first = (start + kPageBytes - 1) / kPageBytes * kPageBytes;
  const uint64_t end = (start + bytes) / kPageBytes * kPageBytes;
  if (end <= first) return {};
  return {reinterpret_cast<std::byte*>(first), end - first};
}

}  // namespace

void prefer_huge_pages(std::byte* address, uint64_t bytes) {
  if (config().huge_pages == 0) return;
  const std::span<std::byte> pages = pages_inside(address, bytes);
  if (!pages.empty()) madvise(pages.data(), pages.size(), MADV_HUGEPAGE);
}

// Counts a use; whether to ask at this one.
bool HugePages::is_due(std::byte* address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (seen_.size() >= kMaxSeen) seen_.clear();
  Seen& seen = seen_[address];
  if (seen.bytes != bytes) seen = {bytes, 0};
  // Again now and then: other memory may lie at the address by then. Of huge pages it costs microseconds.
  return ++seen.uses == 2 || seen.uses % kAskAgain == 0;
}

void HugePages::used(std::byte* address, uint64_t bytes) {
  if (bytes < kPageBytes || config().huge_pages == 0 || !is_due(address, bytes)) return;
  const std::span<std::byte> pages = pages_inside(address, bytes);
  if (pages.empty()) return;
  madvise(pages.data(), pages.size(), MADV_HUGEPAGE);
  madvise(pages.data(), pages.size(), kCollapse);
}

}  // namespace weft
