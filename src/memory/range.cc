// SPDX-License-Identifier: Apache-2.0
#include "memory/range.h"

#include <algorithm>

namespace weft {

Result<std::shared_ptr<MappedRange>> make_range(const RangeOptions& options) {
  switch (options.sharing) {
    case Sharing::kHostMemory:
    case Sharing::kCudaPinned:
      return make_host_range(options);
    case Sharing::kCudaVmm:
      return make_vmm_range(options);
    case Sharing::kCudaIpc:
      return make_ipc_range(options);
    case Sharing::kByTransport:
      break;
  }
  return Status::invalid("sharing: no range of memory is shared that way");
}

Status check_room(const MappedRange& range, uint64_t more, uint64_t reserved_bytes) {
  if (more <= reserved_bytes - range.bytes()) return {};
  return Status::make(Code::kCapacity,
                      "window: got {} bytes, allowed: at most the {} bytes of reserved addresses",
                      range.bytes() + more, reserved_bytes);
}

Result<Sharing> choose_sharing(const std::vector<RankFacts>& facts, const std::vector<int>& members,
                               std::string_view wanted, bool is_pinned) {
  if (wanted != "auto" && wanted != "vmm" && wanted != "ipc")
    return Status::invalid("WEFT_CUDA_SHARING: got '{}', allowed: auto, vmm, ipc", wanted);
  if (members.empty() || facts[members[0]].device.is_host()) return Sharing::kHostMemory;
  if (is_pinned) return Sharing::kCudaPinned;
  const auto first_without = [&](bool RankFacts::* ability) {
    const auto lacks = [&](int rank) { return !(facts[rank].*ability); };
    const auto found = std::find_if(members.begin(), members.end(), lacks);
    return found == members.end() ? -1 : *found;
  };
  const int without_vmm = first_without(&RankFacts::can_share_vmm);
  const int without_ipc = first_without(&RankFacts::can_share_ipc);
  if (wanted != "ipc" && without_vmm < 0) return Sharing::kCudaVmm;
  if (wanted != "vmm" && without_ipc < 0) return Sharing::kCudaIpc;
  return Status::make(Code::kUnsupported, "mapped: rank {}'s GPU {} cannot share memory by {}",
                      wanted == "ipc" ? without_ipc : without_vmm,
                      facts[wanted == "ipc" ? without_ipc : without_vmm].gpu,
                      wanted == "auto" ? "vmm or ipc" : wanted);
}

}  // namespace weft
