// SPDX-License-Identifier: Apache-2.0
//
// Plans of an elastic buffer's other calls, besides dispatch and combine: messages between neighbours, reads
// of a table. Pure functions: no device, no environment, no clock.
#pragma once

#include <cstdint>

#include "kernels/moe/engram_args.h"
#include "kernels/moe/ring_args.h"
#include "plan/high_throughput.h"

namespace weft {

// Where the slots stand, from offset 0 of every window. slot_bytes is rounded up to whole lines. has_ports: not all ranks
// map each other, so there is an outbox.
struct NeighbourPlan {
  NeighbourLayout at;
  uint64_t slot_bytes;
};
NeighbourPlan plan_neighbours(uint64_t max_bytes, uint32_t in_flight, bool has_ports);

// The side of `peer` that receives the messages of `rank`, or -1 where the two are no neighbours. A rank
// that is both the previous and the next neighbour of another counts as the previous one.
int ring_side(uint32_t rank, uint32_t peer, uint32_t ranks);

// num_sms 0: as many as a message of this size is worth.
GridPlan plan_ring_message(uint64_t bytes, uint32_t num_sms, const ComputeLimits& limits);
GridPlan plan_engram_fetch(uint64_t count, bool has_ports, const ComputeLimits& limits);

// The places of a rank's entries in its window, and of entries that it fetches through ports: from offset 0 of every
// window.
EngramLayout plan_engram(uint64_t entries_per_rank, uint64_t row_bytes, bool has_ports,
                         const ComputeLimits& limits);

}  // namespace weft
