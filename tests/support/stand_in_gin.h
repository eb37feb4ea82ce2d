// SPDX-License-Identifier: Apache-2.0
//
// A fake of NCCL's GIN for CPUs: what the library that stands in for NCCL gives device code for a device communicator
// (HostGin in transports/nccl/wire.h). The real one runs in tests/gpu. A thread carries out what was asked for late and in
// any order that GIN allows: puts in none, sources read at the end, a strong signal behind everything before it of its
// context and peer. What is under way when the communicator ends is lost, as NCCL loses it.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/stand_in.h"
#include "transports/nccl/wire.h"

namespace stand_in {

class FakeGin {
 public:
  // Where a window's part of a rank lies in this process.
  using PlaceOf = std::function<std::byte*(void* window, uint32_t rank)>;

  FakeGin(const std::string& name, uint32_t rank, uint32_t ranks, uint32_t contexts, uint32_t signals,
          uint32_t counters, PlaceOf place_of)
      : name_(name + "-gin"),
        rank_(rank),
        ranks_(ranks),
        contexts_(contexts),
        signals_(signals),
        counters_(counters),
        place_of_(std::move(place_of)),
        counted_(contexts * counters),
        posted_(contexts * ranks),
        random_(rank + 17) {
    words_ = static_cast<uint64_t*>(map_shared(name_, bytes()));
    worker_ = std::thread([this] { carry(); });
  }
  ~FakeGin() {
    {
      std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    worker_.join();
    munmap(words_, bytes());
    shm_unlink(name_.c_str());
  }
  FakeGin(const FakeGin&) = delete;

  weft::nccl_gin::HostGin handle() {
    weft::nccl_gin::HostGin gin{};
    gin.self = this;
    gin.contexts = contexts_;
    gin.ranks = ranks_;
    gin.rank = rank_;
    gin.put = [](void* self, uint32_t context, uint32_t peer, void* dst_window, uint64_t dst,
                 void* src_window, uint64_t src, uint64_t bytes, uint32_t counter) {
      auto* gin = static_cast<FakeGin*>(self);
      gin->ask({.context = context,
                .peer = peer,
                .dst = gin->place_of_(dst_window, peer) + dst,
                .src = gin->place_of_(src_window, gin->rank_) + src,
                .bytes = bytes,
                .counter = counter});
    };
    gin.put_value = [](void* self, uint32_t context, uint32_t peer, void* window, uint64_t dst,
                       uint64_t value, int64_t strong_signal) {
      auto* gin = static_cast<FakeGin*>(self);
      gin->ask({.context = context,
                .peer = peer,
                .dst = gin->place_of_(window, peer) + dst,
                .bytes = 8,
                .value = value,
                .signal = strong_signal,
                .add = 1,
                .is_strong = strong_signal >= 0});
    };
    gin.signal_add = [](void* self, uint32_t context, uint32_t peer, uint32_t signal, uint64_t n) {
      static_cast<FakeGin*>(self)->ask({.context = context, .peer = peer, .signal = signal, .add = n});
    };
    gin.get = [](void* self, uint32_t context, uint32_t peer, void* window, uint64_t dst, uint64_t src,
                 uint64_t bytes) {
      auto* gin = static_cast<FakeGin*>(self);
      gin->ask({.context = context,
                .peer = peer,
                .dst = gin->place_of_(window, gin->rank_) + dst,
                .src = gin->place_of_(window, peer) + src,
                .bytes = bytes});
    };
    gin.queue_room = kQueueRoom;
    gin.queue_done = [](void* self, uint32_t context, uint32_t peer) {
      return static_cast<FakeGin*>(self)->queue_done(context, peer);
    };
    gin.read_signal = [](void* self, uint32_t context, uint32_t signal) {
      auto* gin = static_cast<FakeGin*>(self);
      return gin->word(gin->rank_, context, signal).load(std::memory_order_acquire);
    };
    gin.read_counter = [](void* self, uint32_t context, uint32_t counter) {
      auto* gin = static_cast<FakeGin*>(self);
      return gin->counted_[context * gin->counters_ + counter].load(std::memory_order_acquire);
    };
    return gin;
  }

 private:
  struct Asked {
    uint32_t context = 0, peer = 0;
    std::byte* dst = nullptr;
    const std::byte* src = nullptr;  // null: the value
    uint64_t bytes = 0, value = 0;
    int64_t signal = -1;
    uint64_t add = 0;
    bool is_strong = false;
    int64_t counter = -1;
    uint32_t number = 0;  // of its descriptor
  };
  static constexpr uint32_t kQueueRoom = 32;

  size_t bytes() const { return size_t{8} * ranks_ * contexts_ * signals_; }
  std::atomic_ref<uint64_t> word(uint32_t rank, uint32_t context, uint64_t signal) {
    return std::atomic_ref<uint64_t>(words_[(size_t{rank} * contexts_ + context) * signals_ + signal]);
  }

  // NCCL would wait here for a place in its queue, without an end: callers see to it that there is one.
  void ask(Asked one) {
    {
      std::lock_guard lock(mutex_);
      uint32_t& posted = posted_[one.context * ranks_ + one.peer];
      one.number = posted++;
      asked_.push_back(one);
      if (posted - done_to(one.context, one.peer) > kQueueRoom) {
        std::fprintf(stderr, "a call of GIN found its queue full: it would hang\n");
        std::abort();
      }
    }
    changed_.notify_one();
  }
  uint32_t queue_done(uint32_t context, uint32_t peer) {
    std::lock_guard lock(mutex_);
    return done_to(context, peer);
  }
  // Under the lock.
  uint32_t done_to(uint32_t context, uint32_t peer) const {
    for (const Asked& one : asked_)  // in the order of their numbers
      if (one.context == context && one.peer == peer) return one.number;
    return posted_[context * ranks_ + peer];
  }

  void carry() {
    std::unique_lock lock(mutex_);
    while (!is_over_) {
      if (asked_.empty()) {
        changed_.wait(lock);
        continue;
      }
      if (random_() % 8 == 0) {  // late
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
        lock.lock();
      }
      carry_out(std::min(asked_.size() - 1, static_cast<size_t>(random_() % 4)));
    }
  }

  // Under the lock: positions before `at` may be of the same context and peer.
  void carry_out(size_t at) {
    const Asked one = asked_[at];
    if (one.is_strong)
      for (size_t i = at; i-- > 0;)  // the latest first
        if (asked_[i].context == one.context && asked_[i].peer == one.peer) {
          carry_out(i);
          return;  // positions have moved; this one's turn comes again
        }
    asked_.erase(asked_.begin() + static_cast<std::ptrdiff_t>(at));
    if (one.bytes > 0)
      std::memcpy(one.dst, one.src ? one.src : reinterpret_cast<const std::byte*>(&one.value), one.bytes);
    if (one.signal >= 0)
      word(one.peer, one.context, static_cast<uint64_t>(one.signal))
          .fetch_add(one.add, std::memory_order_release);
    if (one.counter >= 0)
      counted_[one.context * counters_ + static_cast<uint64_t>(one.counter)].fetch_add(
          1, std::memory_order_release);
  }

  const std::string name_;
  const uint32_t rank_, ranks_, contexts_, signals_, counters_;
  const PlaceOf place_of_;
  uint64_t* words_ = nullptr;  // [ranks, contexts, signals]
  std::vector<std::atomic<uint64_t>> counted_;
  std::vector<uint32_t> posted_;  // [contexts, ranks]
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Asked> asked_;
  std::mt19937 random_;
  bool is_over_ = false;
  std::thread worker_;
};

}  // namespace stand_in
