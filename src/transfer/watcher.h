// SPDX-License-Identifier: Apache-2.0
//
// Watches numbers that kernels write: a kernel stores how far it is, a callback starts the transfer of what
// is ready.
//   Watcher watcher({.cpu = 3});
//   const auto start = [](uint64_t was, uint64_t is) { start_layers(was, is); return true; };
//   std::shared_ptr<Watch> watch = *watcher.watch(start);
//   kernel<<<...>>>(watch->address());   // stores 1, 2, 3, ... with system-scope release
// Level-triggered: values in between may be skipped, the last one never is; the first value is 0. The
// callback runs on the watcher's thread and ends the watch by returning false. Memory: one page of 512
// numbers per allocation, pinned and mapped when `device` is given. Threads: every method from any, also from
// inside callbacks.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/owner_process.h"
#include "base/status.h"
#include "transfer/copier.h"

namespace weft::transfer {

class Watch {
 public:
  Status check_owner() const { return owner_.check("watch"); }
  // Where the number is, for the host and for kernels alike.
  uint64_t* address() const { return number_; }
  bool is_active() const { return active_.load(std::memory_order_acquire); }

 private:
  friend class Watcher;
  const OwnerProcess owner_;
  uint64_t* number_ = nullptr;
  uint64_t last_ = 0;
  bool is_released_ = false;  // by a callback: ends once the watcher's thread comes by
  std::atomic<bool> active_{true};
  std::function<bool(uint64_t was, uint64_t is)> changed_;
};

class Watcher {
 public:
  struct Options {
    int device = -1;  // kernels of this device write the numbers; -1: the host does
    int cpu = -1;     // pin the thread
  };
  Watcher() : Watcher(Options()) {}
  explicit Watcher(Options options);
  ~Watcher() { close(); }
  Status check_owner() const { return owner_.check("watcher"); }

  // Errors: kSystem and kUnsupported when pinned memory cannot be had.
  Result<std::shared_ptr<Watch>> watch(std::function<bool(uint64_t was, uint64_t is)> changed);
  // After it returns the callback does not run any more (but for the one that this is called from, which
  // returns first), and the number's place may be used again.
  void release(const std::shared_ptr<Watch>& watch);
  void close();

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);
  bool is_own_thread() const { return thread_.get_id() == std::this_thread::get_id(); }

  const OwnerProcess owner_;
  std::shared_ptr<State> state_;  // the thread's, too: it may outlive this object
  std::thread thread_;            // under the state's mutex until close()
};

}  // namespace weft::transfer
