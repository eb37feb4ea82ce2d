// SPDX-License-Identifier: Apache-2.0
//
// What a FIFO carries by itself: threads of the host target that push, one that takes, and nothing behind it.
//   WEFT_TRY_ASSIGN(const FifoRun run, measure_fifo(4, 1 << 20, 2048));   // run.seconds for all of them
// Threads: any number of runs at once.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace weft::proxy {

struct FifoRun {
  double seconds = 0;                  // from the first push to the last command taken
  std::vector<double> push_to_pop_us;  // of each command, where they were pushed one at a time
};

// `producers` threads push `count` commands each as fast as they can. Errors: kInvalid; kSystem when what was
// taken is not what was pushed, in each producer's order.
Result<FifoRun> measure_fifo(uint32_t producers, uint64_t count, uint64_t capacity);
// One thread pushes `count` commands, each once the one before has been taken.
Result<FifoRun> measure_push_to_pop(uint64_t count, uint64_t capacity);

}  // namespace weft::proxy
