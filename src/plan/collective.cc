// SPDX-License-Identifier: Apache-2.0
#include "plan/collective.h"

#include <algorithm>

#include "kernels/collective/program.cuh"
#include "kernels/core/carver.h"

namespace weft {
namespace {

// What programs are verified for: eight steps per connection, of which a Simple message takes four.
constexpr uint32_t kSlots = 8;
constexpr uint32_t kMaxGroup = 71;
constexpr uint64_t kUnitBytes = 16;

uint64_t ceil_div(uint64_t a, uint64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

RingPlan plan_rings(const RingOptions& options) {
  RingPlan plan{};
  const uint64_t connections = uint64_t{options.ranks} * options.channels;
  plan.layout.slots = kSlots;
  plan.layout.channels = options.channels;
  Carver carver;
  plan.layout.arrived_at = carver.take(connections * sizeof(uint64_t), 4096);
  plan.layout.freed_at = carver.take(kProtocols * connections * sizeof(uint64_t), 4096);
  plan.layout.headers_at = carver.take(connections * kSlots * sizeof(MessageHeader), 4096);
  plan.layout.grants_at = carver.take(connections * sizeof(Grant), 4096);
  for (uint32_t protocol = 0; protocol < kProtocols; ++protocol) {
    plan.layout.slot_bytes[protocol] = options.slot_bytes[protocol];
    plan.layout.slots_at[protocol] = carver.take(connections * kSlots * options.slot_bytes[protocol], 4096);
  }
  plan.end = carver.end();
  return plan;
}

uint64_t slot_payload_bytes(const RingLayout& layout, Protocol protocol) {
  const uint64_t bytes = layout.slot_bytes[static_cast<uint32_t>(protocol)];
  if (protocol == Protocol::kSimple) return bytes;
  return protocol == Protocol::kLl ? bytes / 2 : bytes / 128 * 120;
}

ProgramPlan plan_program(const ProgramSize& size, Element element, Protocol protocol, const RingLayout& rings,
                         uint32_t num_sms, const ComputeLimits& limits) {
  ProgramPlan plan{};
  const uint64_t bytes = element_bytes(element);
  const uint64_t unit_elems = kUnitBytes / bytes;
  plan.chunk_elems = ceil_div(size.part_elems, size.per_part);
  if (!size.has_exact_chunks) plan.chunk_elems = ceil_div(plan.chunk_elems, unit_elems) * unit_elems;
  uint64_t payload = size.message_bytes ? size.message_bytes : slot_payload_bytes(rings, protocol);
  if (size.max_slice_bytes)
    payload = std::min<uint64_t>(payload, std::max<uint64_t>(size.max_slice_bytes, kUnitBytes));
  plan.slice_elems = payload / kUnitBytes * unit_elems;
  plan.iterations = ceil_div(plan.chunk_elems, plan.slice_elems);
  plan.group = 1;
  const bool is_even = plan.chunk_elems * size.per_part == size.part_elems;
  if (is_even && plan.iterations == 1)
    plan.group = static_cast<uint32_t>(std::min<uint64_t>(plan.slice_elems / plan.chunk_elems, kMaxGroup));
  const uint32_t blocks =
      std::max(1u, std::min({size.num_blocks, limits.max_blocks, num_sms ? num_sms : ~0u}));
  plan.grid.blocks = limits.is_cuda ? blocks : 1;
  plan.grid.threads_per_block = limits.is_cuda ? 512 : 1;
  plan.grid.shared_bytes =
      program_shared_bytes(static_cast<uint32_t>(ceil_div(size.num_blocks, plan.grid.blocks)));
  return plan;
}

}  // namespace weft
