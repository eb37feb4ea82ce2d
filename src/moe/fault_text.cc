// SPDX-License-Identifier: Apache-2.0
#include "moe/fault_text.h"

#include <cstdio>
#include <iterator>

namespace weft {
namespace {

const char* operation(Site site) {
  switch (site) {
    case Site::kNone: return "nothing";
    case Site::kCounts: return "dispatch.counts";
    case Site::kDispatchReady: return "dispatch.ready";
    case Site::kDispatchRecv: return "dispatch.recv";
    case Site::kDispatchCapacity: return "dispatch.capacity";
    case Site::kCombineReady: return "combine.ready";
    case Site::kCombineRecv: return "combine.recv";
    case Site::kCombineHandle: return "combine.handle";
    case Site::kDispatchHandle: return "dispatch.handle";
    case Site::kLowLatencyDispatchSlot: return "low_latency_dispatch.slot";
    case Site::kLowLatencyDispatchRecv: return "low_latency_dispatch.recv";
    case Site::kLowLatencyCombineSlot: return "low_latency_combine.slot";
    case Site::kLowLatencyCombineRecv: return "low_latency_combine.recv";
    case Site::kLowLatencyCapacity: return "low_latency_dispatch.capacity";
    case Site::kLowLatencyAgree: return "low_latency.agree";
    case Site::kBarrier: return "barrier";
    case Site::kCollective: return "collective";
  }
  return "unknown";
}

// What LowLatencyHello::words hold.
const char* hello_name(uint64_t word) {
  static constexpr const char* kNames[] = {"num_max_dispatch_tokens_per_rank",
                                           "x (bytes per row)",
                                           "topk_idx (top-k)",
                                           "num_experts",
                                           "x (bytes of scales per row)",
                                           "x (form: the call, use_fp8, round_scale, use_ue8m0, use_logfmt)"};
  return word < std::size(kNames) ? kNames[word] : "arguments";
}

std::string seconds(uint64_t ns) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.1f", static_cast<double>(ns) * 1e-9);
  return digits;
}

}  // namespace

Status fault_status(const FaultBox& box) {
  const char* what = operation(box.site);
  if (box.site == Site::kDispatchCapacity)
    return Status::make(Code::kCapacity, "num_worst_tokens: got {}, allowed: at least the {} rows that rank {} received",
                        box.expected, box.seen, box.self);
  if (box.site == Site::kLowLatencyCapacity)
    return Status::invalid("topk_idx: rank {}: {} rows for its expert {}, allowed: {}; tokens that name an expert more than "
                           "once need a larger num_max_dispatch_tokens_per_rank",
                           box.self, box.seen, box.peer, box.expected);
  if (box.site == Site::kLowLatencyAgree)
    return Status::invalid("{}: rank {} was given {}, rank {} {}, allowed: the same on all ranks",
                           hello_name(box.waited_ns), box.self, box.expected, box.peer, box.seen);
  if (box.site == Site::kCombineHandle || box.site == Site::kDispatchHandle)
    return Status::invalid("handle: rank {}, {}: rank {} uses {} {}, this rank {}", box.self, what, box.peer,
                           box.waited_ns ? "rows of bytes" : "the handle of dispatch", box.seen, box.expected);
  return Status::make(Code::kPeerLost, "rank {}, {}, waited {} s for rank {}: expected epoch {}, saw {}", box.self, what,
                      seconds(box.waited_ns), box.peer, box.expected, box.seen);
}

}  // namespace weft
