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
// What threads that wait do meanwhile, where the mesh that a kernel is compiled with has such work: host threads do the
// same (HostHelp). Defined beside that mesh.
#if defined(WEFT_HELP_WHILE_WAITING)
WEFT_APART void help_while_waiting();
#else
WEFT_DEVICE void help_while_waiting() {}
#endif

WEFT_DEVICE void pause_ns(uint32_t ns) {
  help_while_waiting();
  __nanosleep(ns);
}

WEFT_DEVICE void pause(uint32_t polls) {
  help_while_waiting();
  // Many warps that poll without a pause slow low-latency combine down severely (seen on H200).
  __nanosleep(polls < 4 ? 50 : 300);
}

}  // namespace weft
