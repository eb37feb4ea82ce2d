// SPDX-License-Identifier: Apache-2.0
//
// Clocks of CUDA kernels, and how long a loop that waits pauses.
#pragma once

#include "kernels/target/cuda/language.h"

namespace weft {

WEFT_DEVICE uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// For measuring waits: cycles of this multiprocessor.
WEFT_DEVICE uint64_t cycles() {
  return static_cast<uint64_t>(clock64());
}

// About that long, at most 1 ms; for polls that are in no hurry.
WEFT_DEVICE void pause_ns(uint32_t ns) {
  __nanosleep(ns);
}

WEFT_DEVICE void pause(uint32_t polls) {
  // Many warps that poll without a pause slow low-latency combine down severely (seen on H200).
  __nanosleep(polls < 4 ? 50 : 300);
}

}  // namespace weft
