// SPDX-License-Identifier: Apache-2.0
#include "jit/host_launch.h"

#include <atomic>
#include <ctime>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/log.h"
#include "base/owner_process.h"
#include "base/tally.h"
#include "kernels/target/host.h"

namespace weft {
namespace {

constexpr size_t kSharedAlignment = 128;

// One launch, as its threads see it.
struct Work {
  const std::function<void()>* body;
  std::atomic<uint32_t> running;       // workers that have not finished
  std::atomic<uint64_t> waited_ns{0};  // of the one that waited longest

  void note_wait(uint64_t ns) {
    uint64_t longest = waited_ns.load(std::memory_order_relaxed);
    while (ns > longest && !waited_ns.compare_exchange_weak(longest, ns, std::memory_order_relaxed)) {
    }
  }
  void finish_one() {
    // The caller may destroy this object as soon as it sees 0, so the last worker must not touch it
    // afterwards: the caller polls instead of being notified.
    running.fetch_sub(1, std::memory_order_acq_rel);
  }
};

// A thread that sleeps until it is given a piece of work.
class Worker {
 public:
  void give(Work* work, const HostThread& place) {
    place_ = place;
    work_.store(work, std::memory_order_release);
    work_.notify_one();
  }

  template <class WhenIdle>
  void loop(WhenIdle when_idle) {
    for (;;) {
      work_.wait(nullptr, std::memory_order_acquire);
      Work* work = work_.load(std::memory_order_acquire);
      if (!work) continue;
      uint64_t waited_ns = 0;
      host_thread = place_;
      host_thread.waited_ns = &waited_ns;
      (*work->body)();
      work->note_wait(waited_ns);
      work_.store(nullptr, std::memory_order_relaxed);
      when_idle(this);
      work->finish_one();
    }
  }

 private:
  HostThread place_;
  std::atomic<Work*> work_{nullptr};
};

class WorkerPool {
 public:
  // Takes idle workers, making those that are missing. Kept on failure: those made so far, idle.
  Status take(size_t count, std::vector<Worker*>& taken) {
    std::lock_guard lock(mutex_);
    while (idle_.size() < count) WEFT_TRY(add_worker());
    taken.assign(idle_.end() - static_cast<std::ptrdiff_t>(count), idle_.end());
    idle_.resize(idle_.size() - count);
    return Status();
  }

 private:
  Status add_worker() {
    Worker* worker = &workers_.emplace_back();
    try {
      std::thread([this, worker] { worker->loop([this](Worker* done) { give_back(done); }); }).detach();
    } catch (const std::system_error& error) {
      workers_.pop_back();
      return logged(Status::make(Code::kSystem, "host kernels need one more thread than the {} there are: {}",
                                 workers_.size(), error.what()));
    }
    idle_.push_back(worker);
    return Status();
  }
  void give_back(Worker* worker) {
    std::lock_guard lock(mutex_);
    idle_.push_back(worker);
  }

  std::mutex mutex_;
  std::deque<Worker> workers_;  // addresses stay
  std::vector<Worker*> idle_;
};

// The pool of this process. Workers do not survive a fork, so a child starts with an empty one; pools are
// never freed, since their threads may outlive static destruction.
WorkerPool& pool() {
  static OnePerProcess<WorkerPool> pools;
  return pools.get();
}

// Shared memory and barriers of the blocks of one launch.
class Blocks {
 public:
  explicit Blocks(const HostGrid& grid)
      : grid_(grid),
        stride_((grid.shared_bytes + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment) {
    if (stride_ > 0) shared_.reset(new (std::align_val_t{kSharedAlignment}) std::byte[stride_ * grid.blocks]);
    if (grid.warps > 1)
      for (uint32_t block = 0; block < grid.blocks; ++block) barriers_.emplace_back(grid.warps);
  }
  HostThread place(uint32_t thread) {
    const uint32_t block = thread / grid_.warps;
    HostThread place;
    place.block = block;
    place.blocks = grid_.blocks;
    place.warp = thread % grid_.warps;
    place.warps = grid_.warps;
    place.shared = shared_ ? shared_.get() + stride_ * block : nullptr;
    place.barrier = barriers_.empty() ? nullptr : &barriers_[block];
    place.help = help_;
    return place;
  }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { operator delete[](bytes, std::align_val_t{kSharedAlignment}); }
  };
  const HostGrid grid_;
  const size_t stride_;
  const HostHelp help_ = host_thread.help;  // the caller's
  std::unique_ptr<std::byte[], Free> shared_;
  std::deque<BlockBarrier> barriers_;
};

// Of the calling thread. Asking the system for its processor time takes half a microsecond, so launches do it
// only where somebody wants to know.
thread_local bool kernels_are_timed = false;
thread_local uint64_t kernel_ns = 0;

uint64_t thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

class KernelClock {
 public:
  KernelClock() : began_ns_(kernels_are_timed ? thread_ns() : 0) {}
  ~KernelClock() {
    if (kernels_are_timed) kernel_ns += thread_ns() - began_ns_;
  }
  KernelClock(const KernelClock&) = delete;

 private:
  const uint64_t began_ns_;
};

}  // namespace

uint64_t host_kernel_ns() {
  kernels_are_timed = true;
  return kernel_ns;
}

Status run_on_host(const HostGrid& grid, const std::function<void()>& body) {
  const uint64_t threads = uint64_t{grid.blocks} * grid.warps;
  if (threads == 0)
    return Status::invalid("grid: got {} blocks of {} warps, allowed: at least 1 of each", grid.blocks,
                           grid.warps);
  const KernelClock clock;
  std::vector<Worker*> workers;
  if (threads > 1) WEFT_TRY(pool().take(threads - 1, workers));
  Blocks blocks(grid);
  Work work{&body, static_cast<uint32_t>(workers.size())};
  for (uint32_t i = 0; i < workers.size(); ++i) workers[i]->give(&work, blocks.place(i + 1));
  const HostThread outer = std::exchange(host_thread, blocks.place(0));
  uint64_t waited_ns = 0;
  host_thread.waited_ns = &waited_ns;
  body();
  host_thread = outer;
  work.note_wait(waited_ns);
  // No deadline: the workers use this frame, and the kernel's own waits are bounded.
  for (unsigned polls = 0; work.running.load(std::memory_order_acquire) != 0; ++polls) back_off(polls);
  waited_for_peers_ns += work.waited_ns.load(std::memory_order_relaxed);
  return Status();
}

}  // namespace weft
