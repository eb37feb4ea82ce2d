// SPDX-License-Identifier: Apache-2.0
//
// HugePages asks the system for huge pages under host buffers that are used again and again.
//   pages.used(buffer, bytes);      // before each use; acts at the second one, and at every 16th
// Reading another process's memory, or writing what it gave, costs a look-up per page: with pages of 4 KiB a
// fifth of the time. Only the whole, aligned 2 MiB pieces inside a buffer change, which the buffer fills
// anyway; contents and addresses stay. Where the system refuses, nothing happens. WEFT_HUGE_PAGES=0 turns it
// off. Threads: any.
//
//   window_pages.used(base, bytes);  // WindowHugePages: before each launch on a window of this process
// Pieces of 2 MiB that are mostly in use get huge pages, a few at a time: a launch waits some 20 ms for it at most. The
// system gives memory that processes share no huge pages unless it is asked piece by piece.
//
//   prefer_huge_pages(output, bytes);   // before a large host buffer that may be fresh is written
// The system then clears and maps its pages by 2 MiB: of 4 KiB each they cost more than what is written to
// them. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace weft {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

void prefer_huge_pages(std::byte* address, uint64_t bytes);

class HugePages {
 public:
  void used(std::byte* address, uint64_t bytes);

 private:
  struct Seen {
    uint64_t bytes;
    uint32_t uses;
  };
  bool is_due(std::byte* address, uint64_t bytes);

  std::mutex mutex_;  // sends and receives run beside each other
  std::unordered_map<std::byte*, Seen> seen_;
};

class WindowHugePages {
 public:
  // `base`: a multiple of kHugePageBytes, always the same; `bytes` may grow. Threads: any.
  void used(std::byte* base, uint64_t bytes);

 private:
  bool look(std::byte* base, uint64_t pieces);

  std::mutex mutex_;
  std::vector<bool> done_;  // by piece of kHugePageBytes: it is on a huge page, or cannot be
  uint64_t at_ = 0;         // the piece to look at next
  uint64_t uses_ = 0, next_look_ = 2, gap_ = 8;
};

}  // namespace weft
