// SPDX-License-Identifier: Apache-2.0
//
// Decisions of the executor of collectives: where rings and inboxes stand in a window, how a buffer is cut
// into chunks and slices, what grid runs. Pure functions: no device, no environment, no clock.
#pragma once

#include <cstdint>

#include "kernels/collective/exchange_args.h"
#include "kernels/collective/program_args.h"
#include "plan/high_throughput.h"

namespace weft {

struct RingOptions {
  uint32_t ranks;
  uint32_t channels;
  uint64_t slot_bytes[kProtocols];  // multiples of 256
  uint32_t exchange_blocks = 0;
  uint32_t region_units = 0;  // of a block's region in an inbox
  uint32_t stage_units = 0;   // of exchange_stage_units()
  bool has_ports = false;     // messages to some peers start in an outbox
};

// Units of a block's staging area for one sender (docs/decisions/0077-stages-take-64-mib-per-rank.md).
uint32_t exchange_stage_units(uint32_t ranks, bool is_cuda);

// Rings and counters, from offset 0 of every window.
struct RingPlan {
  RingLayout layout;
  ExchangeLayout exchange;
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
  // Chunks are equal and their places matter; else they start at multiples of 16 bytes.
  bool has_exact_chunks;
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

struct ExchangeSize {
  Exchange kind;
  uint64_t bytes;  // of one part; kinds with shares: of the whole buffer
  uint32_t ranks;
  bool is_one_shot;
  ExchangeWay way;
};

struct ExchangePlan {
  uint32_t slice_units;
  uint32_t stage_slice_units;
  uint32_t piece_bytes;
  uint32_t pipe_warps;
  GridPlan grid;
};
// How many blocks share an exchange, and how. Computed only from values that are the same on all ranks, because blocks
// of the same number meet.
ExchangePlan plan_exchange(const ExchangeSize& size, const ExchangeLayout& layout, uint32_t num_sms,
                           const ComputeLimits& limits);

}  // namespace weft
