// SPDX-License-Identifier: Apache-2.0
//
// A fake of NVSHMEM's device calls for CPUs: what the library that stands in for NVSHMEM gives device code (HostCalls in
// transports/nvshmem/wire.h). The real ones run in tests/gpu. A thread carries out what was asked for late and in any order
// that NVSHMEM allows: none but across a fence, and sources are read at the end. STAND_IN_QUIET_MS: how long a quiet takes at
// least, as it would for a peer that is slow to answer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

#include "transports/nvshmem/wire.h"

namespace stand_in {

class FakeShmem {
 public:
  explicit FakeShmem(uint32_t seed) : random_(seed + 31) {
    std::thread([this] { carry(); }).detach();  // as long as the process
  }

  struct Asked {
    uint32_t peer = 0;
    std::byte* dst = nullptr;
    const std::byte* src = nullptr;  // null: the value
    uint64_t bytes = 0, value = 0;
    bool is_add = false;
    uint64_t epoch = 0;  // fences before it
  };

  void ask(Asked one) {
    {
      std::lock_guard lock(mutex_);
      one.epoch = fences_;
      asked_.push_back(one);
    }
    changed_.notify_all();
  }
  void fence() {
    std::lock_guard lock(mutex_);
    ++fences_;
  }
  void quiet() {
    if (const char* least_ms = std::getenv("STAND_IN_QUIET_MS"))
      std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(least_ms)));
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return asked_.empty(); });
  }

 private:
  void carry() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !asked_.empty(); });
      if (random_() % 8 == 0) {  // late
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
        lock.lock();
      }
      carry_out(std::min(asked_.size() - 1, static_cast<size_t>(random_() % 4)));
      if (asked_.empty()) changed_.notify_all();
    }
  }

  // Under the lock. What stands before a fence goes first.
  void carry_out(size_t at) {
    const Asked one = asked_[at];
    for (size_t i = 0; i < at; ++i)
      if (asked_[i].peer == one.peer && asked_[i].epoch < one.epoch) return carry_out(i);
    asked_.erase(asked_.begin() + static_cast<std::ptrdiff_t>(at));
    if (one.src) {
      std::memcpy(one.dst, one.src, one.bytes);
      return;
    }
    std::atomic_ref<uint64_t> word(*reinterpret_cast<uint64_t*>(one.dst));
    one.is_add ? void(word.fetch_add(one.value, std::memory_order_release))
               : word.store(one.value, std::memory_order_release);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Asked> asked_;
  std::mt19937 random_;
  uint64_t fences_ = 0;
};

}  // namespace stand_in
