// SPDX-License-Identifier: Apache-2.0
//
// Copies between host memory and memory of either kind, for memory that no NIC can reach.
//   WEFT_TRY(copy_to_host(buffer, gpu_pointer, bytes, range));          // done when it returns
//   CopyQueue queue(range.device);                                      // or: several copies, asked for later
//   queue.copy(a, b, n); queue.copy(c, d, m); queue.seal(); ... if (*queue.is_done()) ...
// On the host a queue copies at once. Device copies run on a stream of their own, in no order with the user's
// streams. Threads: one per queue.
#pragma once

#include <memory>

#include "providers/provider.h"

namespace weft::transfer {

// `range` says what kind of memory the other pointer is in.
Status copy_to_host(void* host, const void* from, uint64_t bytes, const provider::Range& range);
Status copy_from_host(void* to, const void* host, uint64_t bytes, const provider::Range& range);

class CopyQueue {
 public:
  explicit CopyQueue(int device = -1);  // -1: host
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  Status copy(void* to, const void* from, uint64_t bytes);
  Status seal();  // no more copies before is_done()
  Result<bool> is_done();
  Status finish();

 private:
  int device_;
  void* event_ = nullptr;  // CUevent
  bool is_pending_ = false;
};

// Host memory; pinned for `device` unless that is -1.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer() { release(); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  Result<char*> allocate(uint64_t bytes, int device);
  void release();

 private:
  std::unique_ptr<char[]> plain_;
  void* pinned_ = nullptr;
};

}  // namespace weft::transfer
