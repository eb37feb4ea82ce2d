// SPDX-License-Identifier: Apache-2.0
//
// Clocks of HIP kernels, and how long a loop that waits pauses.
#pragma once

#include "kernels/target/hip/language.h"

namespace weft {

// The constant clock counts at 100 MHz.
WEFT_DEVICE uint64_t now_ns() {
  return __builtin_amdgcn_s_memrealtime() * 10;
}

// For measuring waits: cycles of this compute unit.
WEFT_DEVICE uint64_t cycles() {
  return __builtin_readcyclecounter();
}

// About that long, at most 1 ms; for polls that are in no hurry.
WEFT_DEVICE void pause_ns(uint32_t ns) {
  // 8 * 64 cycles, about 256 ns at 2 GHz; the instruction takes only a constant.
  for (uint32_t slept = 0; slept < ns; slept += 256) __builtin_amdgcn_s_sleep(8);
}

WEFT_DEVICE void pause(uint32_t polls) {
  if (polls > 1024) __builtin_amdgcn_s_sleep(2);
}

}  // namespace weft
