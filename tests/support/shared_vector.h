// SPDX-License-Identifier: Apache-2.0
//
// Vectors that kernels may use where they are: plain memory on the CPU; pinned memory, for all GPUs, while SharedOnGpus lives.
//   const SharedOnGpus gpus;  Shared<float> x(100);  launch(x.data());
// Threads: any. Vectors must not outlive the SharedOnGpus under which they were made.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>
#include <vector>

#include "base/cuda_driver.h"

namespace weft::testing {

class SharedOnGpus {
 public:
  SharedOnGpus() { is_on().store(true); }
  ~SharedOnGpus() { is_on().store(false); }
  SharedOnGpus(const SharedOnGpus&) = delete;
  static std::atomic<bool>& is_on() {
    static std::atomic<bool> on{false};
    return on;
  }
};

template <class T>
struct SharedAllocator {
  using value_type = T;
  SharedAllocator() = default;
  template <class U>
  SharedAllocator(const SharedAllocator<U>&) {}  // NOLINT(google-explicit-constructor): as std::allocator

  T* allocate(size_t count) {
    if (!SharedOnGpus::is_on().load()) return static_cast<T*>(::operator new(count * sizeof(T)));
    void* made = nullptr;
    auto current = CudaContext::enter(0);
    if (!current.ok() ||
        current->driver().cuMemHostAlloc(&made, count * sizeof(T),
                                         CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) != 0)
      throw std::bad_alloc();
    return static_cast<T*>(made);
  }
  void deallocate(T* at, size_t) {
    if (!SharedOnGpus::is_on().load()) return ::operator delete(at);
    auto current = CudaContext::enter(0);
    if (current.ok()) current->driver().cuMemFreeHost(at);
  }
  friend bool operator==(const SharedAllocator&, const SharedAllocator&) { return true; }
};

template <class T>
using Shared = std::vector<T, SharedAllocator<T>>;

}  // namespace weft::testing
