// SPDX-License-Identifier: Apache-2.0
#include "transports/nvshmem/session.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "base/cuda_driver.h"
#include "base/log.h"

namespace weft::nvshmem_link {
namespace {

constexpr size_t kAlignment = size_t{2} << 20;

// The CUDA context is a thread's own.
Status on_device(Device device, const std::function<Status()>& run) {
  if (device.is_host()) return run();
  WEFT_TRY_ASSIGN(const CudaContext current, CudaContext::enter(device.ordinal));
  return run();
}

}  // namespace

Session& Session::of_process() {
  static Session* const session = new Session;  // threads that NVSHMEM keeps outlive static destruction
  return *session;
}

bool Session::is_running() const {
  std::lock_guard lock(mutex_);
  return library_ != nullptr && broken_.ok();
}

Status Session::start(const Group& group, const Library& library, const UniqueId& id) {
  const int ranks = static_cast<int>(group.facts->size());
  const Device device = (*group.facts)[static_cast<size_t>(group.rank)].device;
  WEFT_TRY(broken_);
  if (library_) {
    if (library_ == &library && rank_ == group.rank && ranks_ == ranks && device_ == device) return {};
    return Status::invalid(
        "nvshmem: got rank {} of {} on {}, allowed: rank {} of {} on {}, as NVSHMEM runs in this process "
        "already",
        group.rank, ranks, device, rank_, ranks_, device_);
  }
  device_ = device;
  rank_ = group.rank;
  ranks_ = ranks;
  if (library.nvshmemx_init_status() >= kIsInitialized) {
    // Somebody else, as PyTorch, has started it: its ranks must be ours.
    if (library.nvshmem_my_pe() != rank_ || library.nvshmem_n_pes() != ranks_)
      return Status::invalid(
          "nvshmem: got rank {} of {}, allowed: {} of {}, as this process has started NVSHMEM with", rank_,
          ranks_, library.nvshmem_my_pe(), library.nvshmem_n_pes());
    library_ = &library;
    return {};
  }
  // The thread may outlive this call: it owns what it uses.
  struct Start {
    UniqueId id;
    InitAttributes attributes;
  };
  auto start = std::make_shared<Start>();
  start->id = id;
  WEFT_TRY(within(
      group.timeout_s, "nvshmemx_hostlib_init_attr", [start, &library, rank = rank_, ranks]() -> Status {
        int result = library.nvshmemx_set_attr_uniqueid_args(rank, ranks, &start->id, &start->attributes);
        if (result == 0) result = library.nvshmemx_hostlib_init_attr(kInitWithUniqueId, &start->attributes);
        if (result == 0) return {};
        return Status::make(
            Code::kSystem,
            "rank {}, nvshmem: NVSHMEM {} did not start: error {} (NVSHMEM_DEBUG=INFO says more)", rank,
            library.version, result);
      }));
  library_ = &library;
  return {};
}

Result<int> Session::take(uint64_t bytes, const Exchange& exchange, double timeout_s) {
  WEFT_TRY(broken_);
  WEFT_TRY_ASSIGN(const std::vector<std::string> all, exchange(free_blocks()));
  std::unique_lock lock(mutex_);
  if (const int block = common_free_block(all, bytes); block >= 0) {
    blocks_[static_cast<size_t>(block)].is_free = false;
    return block;
  }
  lock.unlock();
  auto at = std::make_shared<void*>(nullptr);
  const Library& library = *library_;
  WEFT_TRY(within(timeout_s, "nvshmem_align", [at, bytes, &library] {
    *at = library.nvshmem_align(kAlignment, bytes);
    return Status();
  }));
  // It has failed on all ranks then: NVSHMEM's heap is as large everywhere.
  if (!*at)
    return Status::make(
        Code::kCapacity,
        "rank {}, nvshmem_align: no room for {} bytes in NVSHMEM's heap (NVSHMEM_SYMMETRIC_SIZE)", rank_,
        bytes);
  lock.lock();
  blocks_.push_back({*at, bytes, false});
  return static_cast<int>(blocks_.size()) - 1;
}

void Session::give(int block) {
  std::lock_guard lock(mutex_);
  blocks_[static_cast<size_t>(block)].is_free = true;
}

std::byte* Session::part(int block, int peer) const {
  std::lock_guard lock(mutex_);
  void* const own = blocks_[static_cast<size_t>(block)].at;
  return static_cast<std::byte*>(peer == rank_ ? own : library_->nvshmem_ptr(own, peer));
}

Status Session::meet(double timeout_s) {
  WEFT_TRY(broken_);
  return within(timeout_s, "nvshmem_barrier_all", [&library = *library_] {
    library.nvshmem_barrier_all();
    return Status();
  });
}

// Which blocks this rank could use again, one character each.
std::string Session::free_blocks() const {
  std::lock_guard lock(mutex_);
  std::string flags;
  for (const Block& block : blocks_) flags += block.is_free ? '1' : '0';
  return flags;
}

// The smallest that every rank has free; -1 for none. Every rank finds the same. Under the lock.
int Session::common_free_block(const std::vector<std::string>& all, uint64_t bytes) const {
  int found = -1;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const auto has = [&](const std::string& flags) { return i < flags.size() && flags[i] == '1'; };
    if (blocks_[i].bytes < bytes || !std::ranges::all_of(all, has)) continue;
    if (found < 0 || blocks_[i].bytes < blocks_[static_cast<size_t>(found)].bytes)
      found = static_cast<int>(i);
  }
  return found;
}

Status Session::within(double timeout_s, const char* call, std::function<Status()> run) {
  struct Outcome {
    std::atomic<bool> is_there{false};
    Status status;
  };
  auto outcome = std::make_shared<Outcome>();
  std::thread([outcome, device = device_, run = std::move(run)] {
    outcome->status = on_device(device, run);
    outcome->is_there.store(true, std::memory_order_release);
  }).detach();
  const auto is_there = [&] { return outcome->is_there.load(std::memory_order_acquire); };
  Status status =
      wait_until(Deadline::after_s(timeout_s), is_there)
          ? outcome->status
          : Status::make(Code::kPeerLost,
                         "rank {}, {}: waited {} s for the other {} ranks: expected an answer, saw none",
                         rank_, call, timeout_s, ranks_ - 1);
  if (!status.ok()) broken_ = status;
  return status;
}

}  // namespace weft::nvshmem_link
