// SPDX-License-Identifier: Apache-2.0
//
// Runs host kernels: blocks x warps threads, all at the same time, since they may wait for one another.
//   WEFT_TRY(run_on_host({.blocks = 2, .warps = 1, .shared_bytes = 1024}, [&] { row->run(args, mesh, shape);
//   }));
// The calling thread runs warp 0 of block 0; the others come from a pool that keeps its threads and grows
// when several launches (ranks as threads) run at once. A launch of one thread is a plain call. Threads: any.
// A forked child gets a pool of its own.
#pragma once

#include <cstdint>
#include <functional>

#include "base/status.h"

namespace weft {

struct HostGrid {
  uint32_t blocks = 1;
  uint32_t warps = 1;         // threads per block
  uint32_t shared_bytes = 0;  // per block, 128-byte aligned, not cleared
};

// Returns when `body` has returned on every thread; what the threads wrote is visible to the caller.
// Errors: kSystem when the system refuses a thread; then `body` has run on none.
Status run_on_host(const HostGrid& grid, const std::function<void()>& body);

// Processor time that the calling thread has spent in its launches, since it first asked. The rest of a
// call's time is host time, as on a GPU the time until the kernel is enqueued.
uint64_t host_kernel_ns();

}  // namespace weft
