// SPDX-License-Identifier: Apache-2.0
//
// Measures how fast kernels of a device push commands to host threads that only pop them:
//   seconds = *measure_fifo(device, 4, 1 << 20, 2048);      // four producers, from the first command to the last
//   trips = *measure_fifo_trips(device, 2000, 2048);        // trips.push_to_pop_us
// Threads: any number of measurements at once.
#pragma once

#include <cstdint>
#include <vector>

#include "base/device.h"
#include "base/status.h"

namespace weft {

// `producers` threads, each of a warp of its own, push `count` commands each. Errors: kInvalid; kSystem when what was
// taken is not what was pushed, in each producer's order; those of a launch.
Result<double> measure_fifo(Device device, uint32_t producers, uint64_t count, uint64_t capacity);

// Of commands that are pushed one at a time.
struct FifoTrips {
  std::vector<double> round_trip_us;   // until the producer has seen the answer
  std::vector<double> push_to_pop_us;  // at most: of a GPU, whose clock is another, see fifo_load.cc
  double look_us = 0;                  // median: one look at memory of the host
};
Result<FifoTrips> measure_fifo_trips(Device device, uint64_t count, uint64_t capacity);

}  // namespace weft
