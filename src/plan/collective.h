// SPDX-License-Identifier: Apache-2.0
//
// Decisions of the executor of collective programs: where the rings stand in a window, how a buffer is cut
// into chunks and slices, what grid runs. Pure functions: no device, no environment, no clock.
#pragma once

#include <cstdint>

#include "kernels/collective/program_args.h"
#include "plan/high_throughput.h"

namespace weft {

struct RingOptions {
  uint32_t ranks;
  uint32_t channels;
  uint64_t slot_bytes[kProtocols];  // multiples of 256
};

// Rings and counters, from offset 0 of every window.
struct RingPlan {
  RingLayout layout;
  uint64_t end;
};
RingPlan plan_rings(const RingOptions& options);

// Bytes of payload that a slot of a protocol holds.
uint64_t slot_payload_bytes(const RingLayout& layout, Protocol protocol);

struct ProgramSize {
  uint64_t part_elems;  // elements of one part (of everything, where there is one part)
  uint64_t per_part;    // chunks of a part
  uint32_t num_blocks;
  uint32_t max_slice_bytes;  // 0: as much as a message may have
  bool
      has_exact_chunks;  // chunks are equal and their places matter; else they start at multiples of 16 bytes
  uint64_t message_bytes = 0;  // most of a message; 0: what a slot holds
};

struct ProgramPlan {
  uint64_t chunk_elems;
  uint64_t slice_elems;
  uint64_t iterations;
  uint32_t group;
  GridPlan grid;
};
ProgramPlan plan_program(const ProgramSize& size, Element element, Protocol protocol, const RingLayout& rings,
                         uint32_t num_sms, const ComputeLimits& limits);

}  // namespace weft
