// SPDX-License-Identifier: Apache-2.0
#include "memory/range.h"

namespace weft {

Result<std::shared_ptr<MappedRange>> make_vmm_range(const RangeOptions& options) {
  return Status::make(Code::kUnsupported, "{}: this build has no CUDA path", options.device);
}

Result<std::shared_ptr<MappedRange>> make_ipc_range(const RangeOptions& options) {
  return Status::make(Code::kUnsupported, "{}: this build has no CUDA path", options.device);
}

}  // namespace weft
