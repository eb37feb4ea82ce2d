// SPDX-License-Identifier: Apache-2.0
#include "transfer/callbacks.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>

#include "base/log.h"

namespace weft::transfer {

struct Callbacks::Queue {
  std::mutex mutex;
  std::condition_variable posted;
  std::deque<std::function<void()>> calls;
  bool is_stopping = false;
};

Callbacks::Callbacks() : queue_(std::make_shared<Queue>()) {}

void Callbacks::post(std::function<void()> call) {
  std::lock_guard lock(queue_->mutex);
  if (queue_->is_stopping) return;
  queue_->calls.push_back(std::move(call));
  if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { run(queue); });
  queue_->posted.notify_one();
}

void Callbacks::stop() {
  {
    std::lock_guard lock(queue_->mutex);
    queue_->is_stopping = true;
    queue_->posted.notify_one();
  }
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();
  else
    thread_.join();
}

void Callbacks::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock lock(queue->mutex);
  while (true) {
    queue->posted.wait(lock, [&] { return queue->is_stopping || !queue->calls.empty(); });
    if (queue->calls.empty()) return;
    std::function<void()> call = std::move(queue->calls.front());
    queue->calls.pop_front();
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
