// SPDX-License-Identifier: Apache-2.0
#include "moe/low_latency_call_word.h"

#include <gtest/gtest.h>

#include <string>

#include "base/text.h"

namespace weft {
namespace {

std::string difference(uint32_t mine, uint32_t theirs) {
  const WordDifference what = word_difference(mine, theirs);
  return text("{} {} {}", what.argument, what.mine, what.theirs);
}

TEST(LowLatencyCallWord, WhatDiffersFirstIsNamed) {
  EXPECT_EQ(difference(dispatch_word(3, true, false), combine_word(3, true, false)),
            "the call (0: a dispatch, 1: a combine) 0 1");
  EXPECT_EQ(difference(combine_word(15, true, true), combine_word(15, true, false)),
            "enable_shrink or WEFT_LOW_LATENCY_FANOUT (1: tokens go once to a node) 1 0");
  EXPECT_EQ(difference(combine_word(15, false, false), combine_word(15, true, false)),
            "topk_weights (1: given) 0 1");
  EXPECT_EQ(difference(dispatch_word(6, true, true), dispatch_word(1, true, true)),
            "x (options: use_fp8, round_scale, use_ue8m0, NVFP4) 6 1");
  EXPECT_EQ(difference(combine_word(15, true, false), combine_word(2, true, false)),
            "x (options: types of rows and sums, exact, use_logfmt) 15 2");
}

TEST(LowLatencyCallWord, CallsThatDifferHaveOtherWords) {
  EXPECT_NE(dispatch_word(7, true, false), combine_word(0, false, false));
  EXPECT_NE(combine_word(15, true, false), combine_word(0, false, true));
  EXPECT_NE(dispatch_word(0, true, false), dispatch_word(1, false, false));
}

}  // namespace
}  // namespace weft
