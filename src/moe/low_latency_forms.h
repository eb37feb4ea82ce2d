// SPDX-License-Identifier: Apache-2.0
//
// The last word of a low-latency handshake: which call this is, and in what form. Ranks whose words differ refuse the call.
//   handshake.words[5] = combine_form(row_form, has_weights, goes_once_per_node);
//   const FormDifference what = form_difference(mine, theirs);  // for an error: "topk_weights (1: given)", 1, 0
#pragma once

#include <cstdint>

#include "kernels/moe/payload.h"

namespace weft {

// `rows`: of a dispatch its payload, of a combine the types of rows and sums and the kind of reply; below 8, and below 16.
constexpr uint32_t kCombineForm = 64, kOncePerNodeForm = 128;
static_assert(kPayloads <= 8);
constexpr uint32_t dispatch_form(uint32_t rows, bool has_weights, bool goes_once_per_node) {
  return rows * 2 + (has_weights ? 1 : 0) + (goes_once_per_node ? kOncePerNodeForm : 0);
}
constexpr uint32_t combine_form(uint32_t rows, bool has_weights, bool goes_once_per_node) {
  return kCombineForm + dispatch_form(rows, has_weights, goes_once_per_node);
}

// The first thing in which two forms differ, and what each has of it.
struct FormDifference {
  const char* argument;
  uint64_t mine, theirs;
};
constexpr FormDifference form_difference(uint64_t mine, uint64_t theirs) {
  const auto differ_in = [&](uint64_t bit) { return ((mine ^ theirs) & bit) != 0; };
  const auto has = [](uint64_t form, uint64_t bit) { return uint64_t{(form & bit) != 0}; };
  if (differ_in(kCombineForm))
    return {"the call (0: a dispatch, 1: a combine)", has(mine, kCombineForm), has(theirs, kCombineForm)};
  if (differ_in(kOncePerNodeForm))
    return {"enable_shrink or WEFT_LOW_LATENCY_FANOUT (1: tokens go once to a node)",
            has(mine, kOncePerNodeForm), has(theirs, kOncePerNodeForm)};
  if (differ_in(1)) return {"topk_weights (1: given)", has(mine, 1), has(theirs, 1)};
  const uint64_t rows = kCombineForm - 2;
  return {has(mine, kCombineForm) != 0 ? "x (form: types of rows and sums, exact, use_logfmt)"
                                       : "x (form: use_fp8, round_scale, use_ue8m0, NVFP4)",
          (mine & rows) / 2, (theirs & rows) / 2};
}

}  // namespace weft
