// SPDX-License-Identifier: Apache-2.0
//
// routes.cuh: reading the caller's table of chosen experts.
#pragma once

#include "kernels/target/target.h"

namespace weft {

// Element `at` of topk_idx, whose ids have 4 or 8 bytes.
WEFT_DEVICE int64_t expert_at(const void* topk_idx, uint32_t id_bytes, uint64_t at) {
  return id_bytes == 8 ? static_cast<const int64_t*>(topk_idx)[at]
                       : static_cast<const int32_t*>(topk_idx)[at];
}

}  // namespace weft
