// SPDX-License-Identifier: Apache-2.0
#include "plan/collective.h"

#include <algorithm>

#include "kernels/collective/exchange.cuh"
#include "kernels/collective/program.cuh"
#include "kernels/core/carver.h"

namespace weft {
namespace {

constexpr uint32_t kMaxGroup = 71;
constexpr uint64_t kUnitBytes = 16;

// Of an exchange: one value per thread and round where there are blocks enough. A thread that adds eight
// sources at once needs more registers than blocks of 512 threads leave it.
constexpr uint32_t kExchangeThreads = 256;
// Large sums wait for what they load, and gain by more threads. With few ranks their registers suffice.
constexpr uint32_t kSumThreads = 512, kFewRanks = 4;
constexpr uint64_t kLargeSumUnits = 2048;  // of a block
constexpr uint32_t kLeastSliceUnits = 8;
// Bulk copies fill the links from few SMs, loads and stores need most (docs/hardware.md).
constexpr uint32_t kPushBlocks = 64, kPipeWarps = 2;
constexpr uint64_t kLeastPieceBytes = 2048, kMostPieceBytes = 16384;
constexpr uint64_t kPiecesPerPipe = 4;
// The bytes that a rank has under way out of the memory of a broadcast's root, in half of the stages. More only queues,
// in front of what ranks send each other (measured on 4 H100, docs/decisions/0073).
constexpr uint64_t kTakenBytes = 192 << 10, kLeastTakenPieceBytes = 512;
// A block stages its data in enough slices that filling one and emptying another overlap, unless slices
// would be so small that their signals count.
constexpr uint64_t kSlicesPerBlock = 4, kLeastStagedUnits = 256;
// Each slice waits for its stores and a signal. Blocks of few ranks have fewer peers to store to meanwhile, so they get
// larger areas: those of a rank take 64 MiB up to eight ranks, as there are 128 blocks.
constexpr uint32_t kHostStageUnits = 256, kLeastCudaStageUnits = 1024, kMostCudaStageUnits = 4096;

uint64_t ceil_div(uint64_t a, uint64_t b) {
  return (a + b - 1) / b;
}

bool pushes(const ExchangeSize& size) {
  return size.kind != Exchange::kAllReduce && size.kind != Exchange::kReduceScatter &&
         size.kind != Exchange::kReduce;
}

// Ranks through which a buffer goes in shares; 1: it goes as a whole.
uint32_t sharers(const ExchangeSize& size) {
  const bool is_full = size.kind == Exchange::kAllReduce ? size.is_one_shot : size.way == ExchangeWay::kLines;
  return !has_shares(size.kind) || is_full ? 1 : exchange_owners(size.kind, size.ranks);
}

uint32_t exchange_blocks(const ExchangeSize& size, uint64_t units, uint64_t slice,
                         const ExchangeLayout& layout, uint32_t num_sms, const ComputeLimits& limits) {
  if (!limits.is_cuda) return layout.blocks;
  uint64_t useful = ceil_div(units, slice);
  const bool has_large_slices = size.way != ExchangeWay::kLines;
  if (has_large_slices) useful = pushes(size) ? kPushBlocks : ceil_div(units, kExchangeThreads);
  const uint64_t most = std::min({layout.blocks, limits.max_blocks, num_sms ? num_sms : ~0u});
  // One may ask for more blocks than are useful on their own.
  if (has_large_slices && num_sms) useful = most;
  return static_cast<uint32_t>(std::clamp<uint64_t>(useful, 1, most));
}

// `fair`: units of a block, of each part.
uint32_t exchange_threads(const ExchangeSize& size, uint64_t fair) {
  const bool adds_much = size.way != ExchangeWay::kLines && !pushes(size) && fair >= kLargeSumUnits;
  return adds_much && size.ranks <= kFewRanks ? kSumThreads : kExchangeThreads;
}

// Of a bulk copy, where so many warps make them.
uint32_t piece_bytes(const ExchangeSize& size, uint64_t pipes) {
  const bool is_taken = size.kind == Exchange::kBroadcast && exchange_owners(size.kind, size.ranks) > 1;
  const bool has_parts_out = size.kind == Exchange::kAllToAll || size.kind == Exchange::kScatter;
  const uint64_t pushed = size.bytes * (has_parts_out ? size.ranks : 1);
  const uint64_t of_pipe = is_taken ? kTakenBytes / (kPipeStages / 2) : pushed / kPiecesPerPipe;
  const uint64_t least = is_taken ? kLeastTakenPieceBytes : kLeastPieceBytes;
  return static_cast<uint32_t>(std::clamp(of_pipe / pipes / 128 * 128, least, kMostPieceBytes));
}

}  // namespace

uint32_t exchange_stage_units(uint32_t ranks, bool is_cuda) {
  if (!is_cuda) return kHostStageUnits;
  return std::clamp(8 * kLeastCudaStageUnits / ranks, kLeastCudaStageUnits, kMostCudaStageUnits) / 2 * 2;
}

RingPlan plan_rings(const RingOptions& options) {
  RingPlan plan{};
  const uint64_t connections = uint64_t{options.ranks} * options.channels;
  plan.layout.channels = options.channels;
  Carver carver;
  plan.layout.arrived_at = carver.take(connections * sizeof(uint64_t), 4096);
  plan.layout.freed_at = carver.take(kProtocols * connections * sizeof(uint64_t), 4096);
  plan.layout.headers_at = carver.take(connections * kRingSlots * sizeof(MessageHeader), 4096);
  plan.layout.grants_at = carver.take(connections * sizeof(Grant), 4096);
  for (uint32_t protocol = 0; protocol < kProtocols; ++protocol) {
    plan.layout.slot_bytes[protocol] = options.slot_bytes[protocol];
    plan.layout.slots_at[protocol] =
        carver.take(connections * kRingSlots * options.slot_bytes[protocol], 4096);
  }
  plan.layout.has_outbox = options.has_ports;
  plan.layout.outbox_at =
      carver.take(options.has_ports ? connections * kRingSlots * options.slot_bytes[0] : 0, 4096);
  plan.exchange.blocks = options.exchange_blocks;
  plan.exchange.region_units = options.region_units;
  plan.exchange.stage_units = options.stage_units;
  const uint64_t regions = uint64_t{2} * options.ranks * options.exchange_blocks;
  plan.exchange.inbox_at = carver.take(regions * options.region_units * 2 * kUnitBytes, 4096);
  plan.exchange.descriptors_at = carver.take(regions * 2 * sizeof(uint64_t), 4096);
  plan.exchange.done_at = carver.take(regions / 2 * sizeof(uint64_t), 4096);
  plan.exchange.stages_at = carver.take(regions / 2 * kStageAreas * options.stage_units * kUnitBytes, 4096);
  plan.exchange.staged_at = carver.take(regions / 2 * sizeof(uint64_t), 4096);
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

ExchangePlan plan_exchange(const ExchangeSize& size, const ExchangeLayout& layout, uint32_t num_sms,
                           const ComputeLimits& limits) {
  ExchangePlan plan{};
  const uint64_t units = ceil_div(ceil_div(size.bytes, kUnitBytes), sharers(size));
  const uint64_t wanted = std::max(kLeastSliceUnits, kExchangeThreads / (size.ranks - 1) / 8 * 8);
  plan.grid.blocks = exchange_blocks(size, units, wanted, layout, num_sms, limits);
  const uint64_t fair = ceil_div(units, plan.grid.blocks);
  plan.grid.threads_per_block = limits.is_cuda ? exchange_threads(size, fair) : 1;
  plan.slice_units = static_cast<uint32_t>(
      std::min<uint64_t>(layout.region_units, std::max<uint64_t>(fair, kLeastSliceUnits)));
  const uint64_t staged = std::max(ceil_div(fair, kSlicesPerBlock), kLeastStagedUnits);
  const bool goes_on = has_shares(size.kind) && exchange_owners(size.kind, size.ranks) > 1;
  const uint32_t most_staged = layout.stage_units / (goes_on ? 2 : 1);
  plan.stage_slice_units = static_cast<uint32_t>(std::min<uint64_t>(staged, most_staged));
  plan.pipe_warps = limits.is_cuda ? kPipeWarps : 1;
  plan.piece_bytes = piece_bytes(size, uint64_t{plan.grid.blocks} * plan.pipe_warps);
  plan.grid.shared_bytes = exchange::places_bytes(size.ranks);
  if (size.way == ExchangeWay::kPlaces && pushes(size) && limits.is_cuda)
    plan.grid.shared_bytes += plan.pipe_warps * pipe_bytes(plan.piece_bytes);
  return plan;
}

}  // namespace weft
