// SPDX-License-Identifier: Apache-2.0
//
// Checks that the layout of a dispatch belongs to its routes. Another layout is a silent error: rows travel by the
// layout, and arrive at ranks that have none of their experts.
#pragma once

#include "base/status.h"
#include "kernels/moe/high_throughput_args.h"

namespace weft {

// kInvalid where token_in_rank is not what layout() makes of topk_idx; names the first token and rank. All but counts and
// sum_place is filled in; memory of the host.
Status check_layout(const LayoutArgs& routes);
// kInvalid with the first of counts [experts], in host memory, that is not 0 to `most` slots.
Status check_slot_counts(const int32_t* counts, uint32_t experts, uint64_t most);

}  // namespace weft
