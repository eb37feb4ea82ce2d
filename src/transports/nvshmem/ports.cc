// SPDX-License-Identifier: Apache-2.0
#include "transports/nvshmem/ports.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/log.h"
#include "transports/port_fault.h"

namespace weft::nvshmem_link {

using Clock = std::chrono::steady_clock;

ShmemPorts::ShmemPorts(int rank, int ranks, double timeout_s, const shmem::HostCalls* calls,
                       std::function<void(int, const std::string&)> tell)
    : rank_(static_cast<uint32_t>(rank)),
      ranks_(static_cast<uint32_t>(ranks)),
      timeout_s_(timeout_s),
      calls_(calls),
      tell_(std::move(tell)) {}

Result<std::unique_ptr<ShmemPorts>> ShmemPorts::create(Device device, int rank, int ranks, double timeout_s,
                                                       const shmem::HostCalls* calls,
                                                       std::function<void(int, const std::string&)> tell) {
  auto ports = std::unique_ptr<ShmemPorts>(new ShmemPorts(rank, ranks, timeout_s, calls, std::move(tell)));
  WEFT_TRY_ASSIGN(ports->fault_, HostVisible::create(device, sizeof(FaultBox)));
  WEFT_TRY_ASSIGN(ports->watch_,
                  HostVisible::create(device, static_cast<uint64_t>(ranks) * sizeof(shmem::Watch)));
  return ports;
}

void ShmemPorts::set_far() {
  if (!has_far()) watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

NvshmemMesh ShmemPorts::mesh(const WindowView& view) const {
  return {calls_,
          has_far() ? watch_->at<shmem::Watch>(0) : nullptr,
          view.local,
          view.bytes,
          fault_->at<FaultBox>(0),
          rank_,
          ranks_};
}

void ShmemPorts::watch(const std::stop_token& stop) {
  struct Seen {
    uint64_t ended = 0;
    Clock::time_point since = Clock::now();
    bool is_lost = false;
  };
  std::vector<Seen> seen(ranks_);
  const auto pause = std::chrono::duration<double>(std::clamp(timeout_s_ / 20, 0.001, 0.5));
  for (; !stop.stop_requested(); std::this_thread::sleep_for(pause)) {
    for (uint32_t peer = 0; peer < ranks_; ++peer) {
      const auto* calls = watch_->at<shmem::Watch>(peer * sizeof(shmem::Watch));
      const uint64_t ended = load_acquire(&calls->ended), began = load_acquire(&calls->began);
      Seen& last = seen[peer];
      if (ended != last.ended || began == ended) {
        last.ended = ended;
        last.since = Clock::now();
        continue;
      }
      const double waited_s = std::chrono::duration<double>(Clock::now() - last.since).count();
      if (waited_s < timeout_s_ || std::exchange(last.is_lost, true)) continue;
      const Status held = Status::make(Code::kPeerLost,
                                       "rank {}, nvshmem: NVSHMEM has held a kernel for {} s in a call for "
                                       "rank {}: expected {} calls done, "
                                       "saw {}; it knows no deadline, and the kernel stays until it returns",
                                       rank_, waited_s, peer, began, ended);
      {
        std::lock_guard lock(mutex_);
        if (held_.ok()) held_ = held;
      }
      log_warn("{}", held.message());
      tell_(static_cast<int>(peer), text("is lost: {}", held.message()));
    }
  }
}

Status ShmemPorts::fault() const {
  const auto* box = fault_->at<FaultBox>(0);
  if (load_acquire(&box->raised) == 0) return {};
  if (box->site != Site::kPortLayout) return outside_window("nvshmem", *box);
  return Status::make(
      Code::kUnsupported,
      "rank {}, nvshmem: a kernel's module was not initialised by NVSHMEM: expected rank {}, saw {}",
      box->self, box->expected, box->seen);
}

Status ShmemPorts::status() const {
  WEFT_TRY(fault());
  std::lock_guard lock(mutex_);
  return held_;
}

}  // namespace weft::nvshmem_link
