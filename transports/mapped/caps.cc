// SPDX-License-Identifier: Apache-2.0
#include "transports/mapped/connection.h"

#include "base/cuda_driver.h"

namespace weft {
namespace {

Caps host_caps() {
  Caps caps;
  caps.reach = Reach::kMapped;
  caps.has_atomics = true;
  caps.ordering = Ordering::kSignals;
  caps.max_put_bytes = UINT64_MAX;
  caps.latency_us = 0.6;      // half of a shared-memory spin round trip
  caps.bandwidth_gb_s = 5.8;  // one core's memcpy into shared memory
  return caps;
}

// Latency and bandwidth of one NVLink 4 pair (H200): half a flag ping-pong, one direction of the copy engine.
Caps gpu_caps(Device device) {
  Caps caps;
  caps.reach = Reach::kMapped;
  caps.has_atomics = true;
  caps.ordering = Ordering::kSignals;
  caps.max_put_bytes = UINT64_MAX;
  caps.latency_us = 1.25;
  caps.bandwidth_gb_s = 385;
  const Result<const CudaDriver*> driver = cuda_driver();
  if (!driver.ok()) caps.unusable_because = driver.status().message();
  else if (device.ordinal >= (*driver)->device_count)
    caps.unusable_because = text("{}: this machine has {} GPUs", device, (*driver)->device_count);
  return caps;
}

Caps caps(Device device) {
  if (device.is_host()) return host_caps();
  return gpu_caps(device);
}

std::string refuses(const RankFacts& self, const RankFacts& peer) {
  if (self.host != peer.host) return "the ranks are on different hosts, or in different network namespaces";
  if (self.node != peer.node)
    return "the ranks are on different nodes (WEFT_RANKS_PER_NODE divides the host)";
  if (self.device.kind != peer.device.kind)
    return text("one rank uses {}, the other {}", self.device, peer.device);
  return "";
}

}  // namespace

Transport mapped_transport() {
  return {"mapped", "shared memory on the host; peer memory of GPUs", caps, refuses};
}

}  // namespace weft
