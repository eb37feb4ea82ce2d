// SPDX-License-Identifier: Apache-2.0
//
// Thread groups on the host: a block of threads, and warps of one thread each.
#pragma once

#include <sched.h>

#include <atomic>

#include "kernels/target/host/memory.h"

namespace weft {

// A barrier for the threads of one block. Yields while it waits: blocks may have more threads than there are
// cores.
class BlockBarrier {
 public:
  explicit BlockBarrier(uint32_t threads) : threads_(threads) {}
  void wait() {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    while (generation_.load(std::memory_order_acquire) == generation) sched_yield();
  }

 private:
  const uint32_t threads_;
  std::atomic<uint32_t> arrived_{0};
  std::atomic<uint32_t> generation_{0};
};

// What a thread does while it waits: its ports' work, for which another thread had to be woken otherwise.
struct HostHelp {
  bool (*once)(void* what) = nullptr;  // whether anything came of it; null: nothing to do
  void* what = nullptr;
};

// Where the calling thread stands in its launch. The launcher sets it before it calls the kernel.
struct HostThread {
  uint32_t block = 0;
  uint32_t blocks = 1;
  uint32_t warp = 0;
  uint32_t warps = 1;
  std::byte* shared = nullptr;      // the block's shared memory, 128-byte aligned
  BlockBarrier* barrier = nullptr;  // null where the block has one thread
  HostHelp help;
  uint64_t* waited_ns = nullptr;  // what loops that wait add their pauses to; null: nobody asks
};
inline thread_local HostThread host_thread;

struct Block {
  uint32_t index() const { return host_thread.block; }
  uint32_t count() const { return host_thread.blocks; }
  uint32_t rank() const { return host_thread.warp; }
  uint32_t size() const { return host_thread.warps; }
  uint32_t warps() const { return host_thread.warps; }
  std::byte* shared() const { return host_thread.shared; }
  void sync() const {
    if (!host_thread.barrier) return;
    publish_streaming_stores();  // for those of the others who tell peers
    host_thread.barrier->wait();
  }
};

struct Warp {
  static constexpr uint32_t kMaxSize = 1;
  uint32_t index() const { return host_thread.warp; }  // within its block
  uint32_t rank() const { return 0; }
  uint32_t size() const { return 1; }
  void sync() const {}
  template <class T>
  T broadcast(T value, uint32_t /*from*/ = 0) const {
    return value;
  }
  template <class T>
  T sum(T value) const {
    return value;
  }
  template <class T>
  T max(T value) const {
    return value;
  }
  template <class T>
  T min(T value) const {
    return value;
  }
  // The largest value among each `kLanes` neighbours.
  template <uint32_t kLanes, class T>
  T max_within(T value) const {
    return value;
  }
  // The sum of the values of lower ranks.
  template <class T>
  T scan_exclusive(T /*value*/) const {
    return T{};
  }
  bool any(bool value) const { return value; }
  // Of how many threads, and of how many of lower rank, the value is true.
  uint32_t count(bool value) const { return value ? 1 : 0; }
  uint32_t count_below(bool /*value*/) const { return 0; }
};

}  // namespace weft

#include "kernels/target/cluster_of_one.h"
