// SPDX-License-Identifier: Apache-2.0
#include "base/owner_process.h"

#include <pthread.h>
#include <unistd.h>

namespace weft {
namespace {

uint64_t mark_of(uint64_t forks) {
  return forks << 32 | static_cast<uint32_t>(getpid());
}

}  // namespace

std::atomic<uint64_t> OwnerProcess::now_{0};

// The number of forks tells a child from a parent with the same id, as in a namespace of its own.
uint64_t OwnerProcess::first_mark() {
  static const int watched = pthread_atfork(nullptr, nullptr, [] {
    now_.store(mark_of((now_.load(std::memory_order_relaxed) >> 32) + 1), std::memory_order_relaxed);
  });
  (void)watched;
  uint64_t unknown = 0;
  now_.compare_exchange_strong(unknown, mark_of(0), std::memory_order_relaxed);
  return now_.load(std::memory_order_relaxed);
}

Status OwnerProcess::refusal(const char* what) const {
  return Status::invalid(
      "{}: got one of process {}, from which this process ({}) was forked, allowed: one that this process "
      "makes",
      what, pid(), getpid());
}

}  // namespace weft
