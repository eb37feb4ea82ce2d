// SPDX-License-Identifier: Apache-2.0
//
// The host half of ports through NVSHMEM: the kernels' mesh, and the watch on calls that wait inside of NVSHMEM.
//   WEFT_TRY_ASSIGN(auto ports, ShmemPorts::create(device, rank, ranks, timeout_s, calls));
//   ports->set_far(peer);  NvshmemMesh mesh = ports->mesh(view);  WEFT_TRY(ports->status());
// NVSHMEM's calls to a peer that it does not map (a far peer) wait without a deadline, and a kernel cannot be made to
// return from one. So a thread reads how many of them have begun and ended. If none to a peer ended for the whole
// timeout while one was under way, it reports that peer as lost. The kernel stays until NVSHMEM returns.
// Threads: one at a time, but for status() and fault().
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "memory/host_visible.h"
#include "transports/nvshmem/channel.cuh"
#include "transports/transport.h"

namespace weft::nvshmem_link {

class ShmemPorts {
 public:
  // `tell` is called once for a peer that is lost, from the thread.
  static Result<std::unique_ptr<ShmemPorts>> create(Device device, int rank, int ranks, double timeout_s,
                                                    const shmem::HostCalls* calls,
                                                    std::function<void(int, const std::string&)> tell);

  // A port leads to a peer that NVSHMEM does not map: from now on its calls are counted.
  void set_far();
  bool has_far() const { return watcher_.joinable(); }

  NvshmemMesh mesh(const WindowView& view) const;

  // Why a kernel gave up, or is held; ok where none is.
  Status status() const;
  // The same for mistakes in a kernel's calls.
  Status fault() const;

 private:
  ShmemPorts(int rank, int ranks, double timeout_s, const shmem::HostCalls* calls,
             std::function<void(int, const std::string&)> tell);
  void watch(const std::stop_token& stop);

  const uint32_t rank_, ranks_;
  const double timeout_s_;
  const shmem::HostCalls* const calls_;
  const std::function<void(int, const std::string&)> tell_;
  std::unique_ptr<HostVisible> fault_, watch_;
  mutable std::mutex mutex_;
  Status held_;
  std::jthread watcher_;
};

}  // namespace weft::nvshmem_link
