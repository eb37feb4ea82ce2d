// SPDX-License-Identifier: Apache-2.0
#include "transports/mapped/range.h"

namespace weft {

Result<std::shared_ptr<MappedRange>> make_range(const RangeOptions& options) {
  switch (options.sharing) {
    case Sharing::kHostMemory:
      return make_host_range(options);
    case Sharing::kCudaVmm:
      return make_vmm_range(options);
    case Sharing::kCudaIpc:
      return make_ipc_range(options);
  }
  return Status::invalid("sharing: unknown");
}

}  // namespace weft
