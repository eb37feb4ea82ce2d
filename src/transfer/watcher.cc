// SPDX-License-Identifier: Apache-2.0
#include "transfer/watcher.h"

#include <algorithm>
#include <cstring>

#include "base/deadline.h"
#include "base/threads.h"

namespace weft::transfer {
namespace {

constexpr uint64_t kPageBytes = 4096;

uint64_t load_acquire(const uint64_t* number) {
  // Of a const type, LLVM's C++ library has the declaration and refuses the load.
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(*number)).load(std::memory_order_acquire);
}

}  // namespace

struct Watcher::State {
  explicit State(Options given) : options(given) {}

  Options options;
  // Guards all that follows, and is held while callbacks run, which may come back here.
  std::recursive_mutex mutex;
  std::vector<std::unique_ptr<PinnedBuffer>> pages;
  std::vector<uint64_t*> free;
  std::vector<std::shared_ptr<Watch>> active;
  std::atomic<bool> is_stopping{false};

  // Also drops the callback, and with it what that holds.
  void end(size_t index) {
    const std::shared_ptr<Watch> watch = active[index];
    active.erase(active.begin() + static_cast<std::ptrdiff_t>(index));
    watch->active_.store(false, std::memory_order_release);
    watch->changed_ = nullptr;
    free.push_back(watch->number_);
  }

  void end_all() {
    while (!active.empty()) end(active.size() - 1);
    free.clear();
    pages.clear();
  }

  // Whether any number has changed.
  bool look() {
    bool any = false;
    for (size_t i = 0; i < active.size() && !is_stopping;) {
      const std::shared_ptr<Watch> watch = active[i];
      const uint64_t is = load_acquire(watch->number_);
      const uint64_t was = watch->last_;
      watch->last_ = is;
      any = any || is != was;
      const bool goes_on = watch->is_released_ ? false : is == was || watch->changed_(was, is);
      if (goes_on && !watch->is_released_)
        ++i;
      else
        end(i);
    }
    return any;
  }
};

Watcher::Watcher(Options options) : state_(std::make_shared<State>(options)) {}

Result<std::shared_ptr<Watch>> Watcher::watch(std::function<bool(uint64_t, uint64_t)> changed) {
  if (!changed)
    return Status::invalid("callback: got nothing, allowed: a function of the old and the new value");
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  if (state.is_stopping) return Status(Code::kClosed, "watcher: is closed");
  if (state.free.empty()) {
    auto page = std::make_unique<PinnedBuffer>();
    WEFT_TRY_ASSIGN(char* base, page->allocate(kPageBytes, state.options.device));
    std::memset(base, 0, kPageBytes);
    for (uint64_t at = kPageBytes; at > 0; at -= sizeof(uint64_t))
      state.free.push_back(reinterpret_cast<uint64_t*>(base + at - sizeof(uint64_t)));
    state.pages.push_back(std::move(page));
  }
  auto made = std::make_shared<Watch>();
  made->number_ = state.free.back();
  state.free.pop_back();
  std::atomic_ref<uint64_t>(*made->number_).store(0, std::memory_order_release);
  made->changed_ = std::move(changed);
  state.active.push_back(made);
  if (!thread_.joinable()) thread_ = std::thread([state = state_] { run(state); });
  return made;
}

void Watcher::release(const std::shared_ptr<Watch>& watch) {
  State& state = *state_;
  std::lock_guard lock(state.mutex);
  const auto found = std::find(state.active.begin(), state.active.end(), watch);
  if (found == state.active.end()) return;
  if (is_own_thread())
    watch->is_released_ = true;  // its callback may be the one that runs
  else
    state.end(static_cast<size_t>(found - state.active.begin()));
}

void Watcher::close() {
  state_->is_stopping = true;
  if (!thread_.joinable()) return;
  if (is_own_thread()) return thread_.detach();  // it ends what is left
  thread_.join();
}

void Watcher::run(const std::shared_ptr<State>& state) {
  if (state->options.cpu >= 0) pin_this_thread(state->options.cpu, "a watcher of the transfer engine");
  for (unsigned idle = 0; !state->is_stopping; ++idle) {
    {
      std::lock_guard lock(state->mutex);
      if (state->look()) idle = 0;
    }
    back_off(idle);
  }
  std::lock_guard lock(state->mutex);
  state->end_all();
}

}  // namespace weft::transfer
