// SPDX-License-Identifier: Apache-2.0
#include "transports/mapped_peers.h"

#include "topology/gpus.h"

namespace weft {
namespace {

// Estimates: one NVLink 4 link carries 26.6 GB/s each way, of which kernels reach three quarters; PCIe 4.0
// x16 carries 32.
constexpr double kNvlinkGbPerS = 20, kPcieGbPerS = 25;
constexpr double kNvlinkLatencyUs = 1.3, kPcieLatencyUs = 2.5;

Caps common_caps() {
  Caps caps;
  caps.reach = Reach::kMapped;
  caps.has_atomics = true;
  caps.ordering = Ordering::kSignals;
  caps.max_put_bytes = UINT64_MAX;
  return caps;
}

Caps host_caps() {
  Caps caps = common_caps();
  caps.latency_us = 0.6;      // half of a round trip through shared memory
  caps.bandwidth_gb_s = 5.8;  // one core's memcpy into shared memory
  return caps;
}

Caps gpu_caps(Device device) {
  Caps caps = common_caps();
  const Result<GpuFacts> gpu = gpu_facts(device.ordinal);
  if (!gpu.ok()) {
    caps.unusable_because = gpu.status().message();
    return caps;
  }
  const bool has_nvlink = gpu->nvlinks > 0;
  caps.latency_us = has_nvlink ? kNvlinkLatencyUs : kPcieLatencyUs;
  caps.bandwidth_gb_s = has_nvlink ? gpu->nvlinks * kNvlinkGbPerS : kPcieGbPerS;
  return caps;
}

}  // namespace

Caps mapped_caps(Device device) {
  return device.is_host() ? host_caps() : gpu_caps(device);
}

std::string why_not_mapped(const RankFacts& self, const RankFacts& peer) {
  if (self.host != peer.host) return "the ranks are on different hosts, or in different network namespaces";
  if (self.node != peer.node)
    return "the ranks are on different nodes (WEFT_RANKS_PER_NODE divides the host)";
  if (self.device.kind != peer.device.kind)
    return text("one rank uses {}, the other {}", self.device, peer.device);
  if (!peer.gpu.empty() && self.gpus_beyond.find(peer.gpu + ",") != std::string::npos)
    return text("GPU {} has no peer access to GPU {}", self.gpu, peer.gpu);
  return "";
}

}  // namespace weft
