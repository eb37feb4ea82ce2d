// SPDX-License-Identifier: Apache-2.0
//
// link_delays.h: makes links of the host target slow, so that schedules for unequal links can be measured
// without such a machine. For tests and benchmarks.
//   The data of a message moves as usual. The signal to its receiver is held until it is due:
//     start = max(now, when the link is free)   free = start + bytes * ns_per_byte   due = free + latency_ns
// Only Simple messages have such a signal. One thread per rank reads and writes all of it.
#pragma once

#include "kernels/target/target.h"

namespace weft {

// The link from this rank to one peer.
struct LinkDelay {
  uint64_t latency_ns;
  double ns_per_byte;
  uint64_t free_at_ns;
};

// A value that a word of the peer's window shall have when it is due.
struct HeldSignal {
  uint64_t due_ns;
  uint64_t offset;
  uint64_t value;
  uint32_t peer;
  uint32_t reserved;
};

struct LinkDelays {
  LinkDelay* links;  // [ranks]
  HeldSignal* held;  // [channels * ranks * kRingSlots], in the order in which they were sent
  uint64_t count;
};

}  // namespace weft
