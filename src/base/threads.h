// SPDX-License-Identifier: Apache-2.0
//
// Where threads run.
//   if (cpu >= 0) pin_this_thread(cpu, "the worker");
#pragma once

#include <pthread.h>

#include "base/log.h"

namespace weft {

// Keeps the calling thread on one CPU; a warning when the system does not let it.
inline void pin_this_thread(int cpu, const char* what) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  if (pthread_setaffinity_np(pthread_self(), sizeof cpus, &cpus) != 0)
    log_warn("cannot pin {} to CPU {}", what, cpu);
}

}  // namespace weft
