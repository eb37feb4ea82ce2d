// SPDX-License-Identifier: Apache-2.0
//
// Where the windows of a communicator lie: chosen once, by all ranks together
// (docs/decisions/0059-windows-lie-in-gpu-memory-where-a-nic-reaches-it.md).
#include "base/config.h"
#include "base/log.h"
#include "comm/choice.h"
#include "comm/communicator.h"

namespace weft {

// Links are open by now: whether a network reaches a GPU's memory, only a NIC that is open can say.
Status Communicator::choose_windows() {
  if (memory_link_) {
    sharing_ = Sharing::kByTransport;
    return {};
  }
  bool is_pinned = false;
  if (port_link_) {
    WEFT_TRY_ASSIGN(const PortWindows windows, agree_on_port_windows());
    is_pinned = !windows.are_in_device;
    if (!device().is_host())
      log_info("rank {}: windows lie in {}: {}", rank_,
               is_pinned ? text("pinned memory of the host") : text("memory of {}", device()), windows.why);
  }
  WEFT_TRY_ASSIGN(sharing_, choose_sharing(facts_, mapped_ranks_, config().cuda_sharing, is_pinned));
  return {};
}

// All ranks call it where any has a port peer. On the CPU there is nothing to choose, but a rank with a GPU may be there.
Result<PortWindows> Communicator::agree_on_port_windows() {
  const std::string& wanted = config().port_windows;
  const Status tried = wanted == "host" || device().is_host() ? Status() : try_device_memory();
  const std::string refusal = tried.ok() ? "" : tried.message().empty() ? "?" : tried.message();
  WEFT_TRY_ASSIGN(const std::vector<std::string> refusals, bootstrap_->all_gather(refusal, deadline()));
  return choose_port_windows(refusals, wanted);
}

// Tries it with memory as a window would have it after it has grown, where it can grow.
Status Communicator::try_device_memory() {
  if (!port_reaches_gpus_)
    return Status::make(Code::kUnsupported, "threads of the host store signals and small puts there");
  WEFT_TRY_ASSIGN(const Sharing sharing, choose_sharing(facts_, mapped_ranks_, config().cuda_sharing, false));
  RangeOptions options{device(), sharing};
  const uint32_t segments = sharing == Sharing::kCudaVmm ? 2 : 1;
  constexpr uint64_t kMostGranularity = uint64_t{2} << 20;
  options.reserve_bytes = options.least_bytes = segments * kMostGranularity;
  WEFT_TRY_ASSIGN(const auto probe, make_range(options));
  for (uint32_t i = 0; i < segments; ++i) WEFT_TRY(probe->extend(probe->granularity()).status());
  return port_link_->try_device_memory(probe->base(), probe->bytes());
}

}  // namespace weft
