// SPDX-License-Identifier: Apache-2.0
#include "transports/mapped/connection.h"

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

Caps caps(Device device) {
  if (device.is_host()) return host_caps();
  Caps none;
  none.unusable_because = text("{}: this build has no CUDA path", device);
  return none;
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
