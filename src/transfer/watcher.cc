// SPDX-License-Identifier: Apache-2.0
#include "transfer/watcher.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "base/deadline.h"
#include "base/log.h"

namespace weft::transfer {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint64_t load_acquire(const uint64_t* number) {
  return std::atomic_ref<const uint64_t>(*number).load(std::memory_order_acquire);
}

}  // namespace

Result<std::shared_ptr<Watch>> Watcher::watch(std::function<bool(uint64_t, uint64_t)> changed) {
  if (!changed)
    return Status::invalid("callback: got nothing, allowed: a function of the old and the new value");
  std::lock_guard lock(mutex_);
  if (stopping_) return Status(Code::kClosed, "watcher: is closed");
  if (free_.empty()) {
    auto page = std::make_unique<PinnedBuffer>();
    WEFT_TRY_ASSIGN(char* base, page->allocate(kPageBytes, options_.device));
    std::memset(base, 0, kPageBytes);
    for (uint64_t at = kPageBytes; at > 0; at -= sizeof(uint64_t))
      free_.push_back(reinterpret_cast<uint64_t*>(base + at - sizeof(uint64_t)));
    pages_.push_back(std::move(page));
  }
  auto made = std::make_shared<Watch>();
  made->number_ = free_.back();
  free_.pop_back();
  std::atomic_ref<uint64_t>(*made->number_).store(0, std::memory_order_release);
  made->changed_ = std::move(changed);
  active_.push_back(made);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  return made;
}

void Watcher::release(const std::shared_ptr<Watch>& watch) {
  std::lock_guard lock(mutex_);
  const auto found = std::find(active_.begin(), active_.end(), watch);
  if (found == active_.end()) return;
  end(*watch);
  active_.erase(found);
}

// Also drops the callback, and with it what that holds.
void Watcher::end(Watch& watch) {
  watch.active_.store(false, std::memory_order_release);
  watch.changed_ = nullptr;
  free_.push_back(watch.number_);
}

void Watcher::close() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(mutex_);
  for (auto& watch : active_) end(*watch);
  active_.clear();
  free_.clear();
  pages_.clear();
}

void Watcher::run() {
  if (options_.cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(options_.cpu, &cpus);
    if (pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus) != 0)
      log_warn("transfer: cannot pin the watcher to CPU {}", options_.cpu);
  }
  for (unsigned idle = 0; !stopping_; ++idle) {
    {
      std::lock_guard lock(mutex_);
      for (size_t i = 0; i < active_.size();) {
        Watch& watch = *active_[i];
        const uint64_t is = load_acquire(watch.number_);
        const uint64_t was = watch.last_;
        watch.last_ = is;
        if (is != was) idle = 0;
        if (is == was || watch.changed_(was, is)) {
          ++i;
          continue;
        }
        end(watch);
        active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    back_off(idle);
  }
}

}  // namespace weft::transfer
