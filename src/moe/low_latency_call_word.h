// SPDX-License-Identifier: Apache-2.0
//
// The last word of a low-latency handshake: which call this is, and with which options. Ranks whose words differ refuse
// the call.
//   handshake.words[5] = combine_word(row_options, has_weights, goes_once_per_domain);
//   const WordDifference what = word_difference(mine, theirs);  // for an error: "topk_weights (1: given)", 1, 0
#pragma once

#include <cstdint>

#include "kernels/moe/payload.h"

namespace weft {

// `rows`: of a dispatch its payload, of a combine the types of rows and sums and the kind of reply; below 8, and below
// 16.
constexpr uint32_t kCombineBit = 64, kOncePerDomainBit = 128;
static_assert(kPayloads <= 8);
constexpr uint32_t dispatch_word(uint32_t rows, bool has_weights, bool goes_once_per_domain) {
  return rows * 2 + (has_weights ? 1 : 0) + (goes_once_per_domain ? kOncePerDomainBit : 0);
}
constexpr uint32_t combine_word(uint32_t rows, bool has_weights, bool goes_once_per_domain) {
  return kCombineBit + dispatch_word(rows, has_weights, goes_once_per_domain);
}

// The first thing in which two such words differ, and what each has of it.
struct WordDifference {
  const char* argument;
  uint64_t mine, theirs;
};
constexpr WordDifference word_difference(uint64_t mine, uint64_t theirs) {
  const auto differ_in = [&](uint64_t bit) { return ((mine ^ theirs) & bit) != 0; };
  const auto has = [](uint64_t word, uint64_t bit) { return uint64_t{(word & bit) != 0}; };
  if (differ_in(kCombineBit))
    return {"the call (0: a dispatch, 1: a combine)", has(mine, kCombineBit), has(theirs, kCombineBit)};
  if (differ_in(kOncePerDomainBit))
    return {"enable_shrink or WEFT_LOW_LATENCY_FANOUT (1: tokens go once to a node)",
            has(mine, kOncePerDomainBit), has(theirs, kOncePerDomainBit)};
  if (differ_in(1)) return {"topk_weights (1: given)", has(mine, 1), has(theirs, 1)};
  const uint64_t rows = kCombineBit - 2;
  return {has(mine, kCombineBit) != 0 ? "x (options: types of rows and sums, exact, use_logfmt)"
                                      : "x (options: use_fp8, round_scale, use_ue8m0, NVFP4)",
          (mine & rows) / 2, (theirs & rows) / 2};
}

}  // namespace weft
