// SPDX-License-Identifier: Apache-2.0
#include "memory/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <span>

#include "base/config.h"

namespace weft {
namespace {

constexpr size_t kMaxSeen = 1024;
constexpr uint32_t kAskAgain = 16;
// Before Linux 6.1 the header lacks it and the kernel refuses it; huge pages then come with time.
constexpr int kCollapse = 25;
// Of a window: a look takes no longer than about this, and huge pages go to pieces of which so much is in use.
constexpr auto kLookMost = std::chrono::milliseconds(20);
constexpr uint64_t kInUsePercent = 75;
constexpr uint64_t kMostGap = 4096;  // launches between two looks that found nothing

// The whole huge pages inside a buffer.
std::span<std::byte> pages_inside(std::byte* address, uint64_t bytes) {
  const uint64_t start = reinterpret_cast<uint64_t>(address);
  const uint64_t first = (start + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uint64_t end = (start + bytes) / kHugePageBytes * kHugePageBytes;
  if (end <= first) return {};
  return {reinterpret_cast<std::byte*>(first), end - first};
}

bool is_in_use(std::byte* piece) {
  static const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  unsigned char resident[kHugePageBytes / 4096];
  const uint64_t pages = kHugePageBytes / page_bytes;
  if (mincore(piece, kHugePageBytes, resident) != 0) return false;
  const auto used = std::count_if(resident, resident + pages, [](unsigned char page) { return page & 1; });
  return static_cast<uint64_t>(used) * 100 >= pages * kInUsePercent;
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
  if (bytes < kHugePageBytes || config().huge_pages == 0 || !is_due(address, bytes)) return;
  const std::span<std::byte> pages = pages_inside(address, bytes);
  if (pages.empty()) return;
  madvise(pages.data(), pages.size(), MADV_HUGEPAGE);
  madvise(pages.data(), pages.size(), kCollapse);
}

void WindowHugePages::used(std::byte* base, uint64_t bytes) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || ++uses_ < next_look_ || config().huge_pages == 0) return;
  if (!look(base, bytes / kHugePageBytes)) gap_ = std::min(2 * gap_, kMostGap);
  next_look_ = uses_ + gap_;
}

// From where the last look stopped. Returns whether anything changed.
bool WindowHugePages::look(std::byte* base, uint64_t pieces) {
  const auto until = std::chrono::steady_clock::now() + kLookMost;
  done_.resize(pieces);
  if (at_ >= pieces) at_ = 0;
  bool found = false;
  for (; at_ < pieces && std::chrono::steady_clock::now() < until; ++at_) {
    std::byte* const piece = base + at_ * kHugePageBytes;
    if (done_[at_] || !is_in_use(piece)) continue;
    const bool is_huge = madvise(piece, kHugePageBytes, kCollapse) == 0;
    // EAGAIN: a page is held by a copy that is under way. Other refusals last: an old system, a piece of two segments.
    done_[at_] = is_huge || errno != EAGAIN;
    found = found || is_huge;
  }
  return found;
}

}  // namespace weft
