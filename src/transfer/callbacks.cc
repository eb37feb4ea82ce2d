// SPDX-License-Identifier: Apache-2.0
#include "transfer/callbacks.h"

#include <exception>

#include "base/log.h"

namespace weft::transfer {

void Callbacks::post(std::function<void()> call) {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  calls_.push_back(std::move(call));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  posted_.notify_one();
}

void Callbacks::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    posted_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void Callbacks::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    posted_.wait(lock, [this] { return stopping_ || !calls_.empty(); });
    if (calls_.empty()) return;
    std::function<void()> call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    try {
      call();
    } catch (const std::exception& error) {  // the user's own; the engine goes on
      log_warn("transfer: a completion callback failed: {}", error.what());
    }
    call = nullptr;  // what it captured goes away without the lock
    lock.lock();
  }
}

}  // namespace weft::transfer
