// SPDX-License-Identifier: Apache-2.0
//
// Where the windows of a communicator lie: chosen once, by all ranks together
// (docs/decisions/0059-windows-lie-in-gpu-memory-where-a-nic-reaches-it.md).
#include "base/config.h"
#include "base/log.h"
#include "comm/communicator.h"
#include "comm/transport_choice.h"

namespace weft {

namespace {

std::string placement(const PortWindows& windows, Device device) {
  const std::string own = text("memory of {}", device);
  if (!windows.have_host_part) return windows.are_in_device ? own : "pinned memory of the host";
  return text("{}, words of ports in memory of the host, their payload in {}", own,
              windows.are_in_device ? own : "memory of the host");
}

// A range as a window would have it after it has grown, where it can grow.
Result<std::shared_ptr<MappedRange>> make_probe(Device device, Sharing sharing, bool has_host_part) {
  RangeOptions options{device, sharing};
  options.reserve_bytes = options.least_bytes = 2 * kPartMultiple;
  options.host_bytes = has_host_part ? kPartMultiple : 0;
  WEFT_TRY_ASSIGN(auto probe, make_range(options));
  if (has_host_part) WEFT_TRY(probe->extend(kPartMultiple).status());
  const int segments = sharing == Sharing::kCudaVmm ? 2 : 1;
  for (int i = 0; i < segments; ++i) WEFT_TRY(probe->extend(probe->granularity()).status());
  return probe;
}

std::string why_not(const Status& tried) {
  return tried.ok() ? "" : tried.message().empty() ? "?" : tried.message();
}

}  // namespace

// Links are open by now: whether a network reaches a GPU's memory, only a NIC that is open can say.
Status Communicator::choose_windows() {
  if (memory_link_) {
    sharing_ = Sharing::kByTransport;
    return {};
  }
  bool is_pinned = false;
  if (port_link_) {
    WEFT_TRY_ASSIGN(port_windows_, agree_on_port_windows());
    is_pinned = !port_windows_.are_in_device || port_windows_.have_host_part;
    if (!device().is_host())
      log_info("rank {}: windows lie in {}: {}", rank_, placement(port_windows_, device()),
               port_windows_.why);
  }
  WEFT_TRY_ASSIGN(sharing_, choose_sharing(facts_, mapped_ranks_, config().cuda_sharing, is_pinned));
  near_sharing_ = sharing_;
  if (port_windows_.have_host_part) {
    WEFT_TRY_ASSIGN(near_sharing_, choose_sharing(facts_, mapped_ranks_, config().cuda_sharing, false));
  }
  return {};
}

std::string Communicator::port_placement() const {
  if (!port_link_ || device().is_host()) return "";
  return text("{}: {}", placement(port_windows_, device()), port_windows_.why);
}

// All ranks call it where any has a port peer. On the CPU the parts are mappings of their own, and a rank with a GPU may be
// there.
Result<PortWindows> Communicator::agree_on_port_windows() {
  const std::string& wanted = config().port_windows;
  const bool tries = wanted != "host" && !device().is_host();
  const Status divided = tries && port_stores_words_ ? try_host_part() : Status();
  Status reached = tries && divided.ok() ? try_device_memory() : Status();
  if (device().is_host() && wanted == "auto")
    reached = Status::make(Code::kUnsupported, "on the CPU where WEFT_PORT_WINDOWS=device asks for it");
  const auto all = [&](const Status& tried) { return bootstrap_->all_gather(why_not(tried), deadline()); };
  WEFT_TRY_ASSIGN(const std::vector<std::string> undivided, all(divided));
  WEFT_TRY_ASSIGN(const std::vector<std::string> refusals, all(reached));
  return choose_port_windows(refusals, undivided, port_stores_words_, wanted);
}

Status Communicator::try_host_part() {
  WEFT_TRY_ASSIGN(const Sharing sharing, choose_sharing(facts_, mapped_ranks_, config().cuda_sharing, false));
  return make_probe(device(), sharing, true).status();
}

Status Communicator::try_device_memory() {
  if (!port_reaches_gpus_ && !port_stores_words_)
    return Status::make(Code::kUnsupported, "threads of the host store signals and small puts there");
  WEFT_TRY_ASSIGN(const Sharing sharing, choose_sharing(facts_, mapped_ranks_, config().cuda_sharing, false));
  WEFT_TRY_ASSIGN(const auto probe, make_probe(device(), sharing, false));
  return port_link_->try_device_memory(probe->base(), probe->bytes());
}

}  // namespace weft
