// SPDX-License-Identifier: Apache-2.0
#include "plan/elastic.h"

#include <algorithm>

namespace weft {
namespace {

constexpr uint64_t kLineBytes = 128;
constexpr uint32_t kCudaWarp = 32;
constexpr uint32_t kRingWarps = 3;                // as many row pipes as an SM's shared memory holds
constexpr uint32_t kRingSms = 16;                 // bulk copies of so many SMs fill the link to one peer
constexpr uint64_t kHostPieceBytes = 256 * 1024;  // what is worth another thread
constexpr uint32_t kFetchThreads = 512, kPortFetchBlocks = 4;

// On the host every thread is a block of its own, so that none waits for another before the end.
GridPlan grid_of(uint64_t items, uint32_t most_blocks, uint32_t cuda_threads, uint32_t cuda_shared_bytes,
                 const ComputeLimits& limits) {
  GridPlan grid{};
  grid.blocks = static_cast<uint32_t>(std::clamp<uint64_t>(items, 1, std::max(1u, most_blocks)));
  grid.threads_per_block = limits.is_cuda ? cuda_threads : 1;
  grid.shared_bytes = limits.is_cuda ? cuda_shared_bytes : kPipeBarrierBytes;
  return grid;
}

uint64_t divide_up(uint64_t value, uint64_t by) {
  return (value + by - 1) / by;
}

}  // namespace

NeighbourPlan plan_neighbours(uint64_t max_bytes, uint32_t in_flight, bool has_ports) {
  NeighbourPlan plan{};
  plan.slot_bytes = round_up(std::max<uint64_t>(max_bytes, 1), kLineBytes);
  Carver carver;
  plan.at.states = carver.take(2 * kRingSides * sizeof(GridState));
  plan.at.arrived = carver.take(kRingSides * sizeof(uint64_t));
  plan.at.released = carver.take(kRingSides * sizeof(uint64_t));
  plan.at.sizes = carver.take(uint64_t{kRingSides} * in_flight * sizeof(uint64_t));
  plan.at.slots = carver.take(kRingSides * in_flight * plan.slot_bytes);
  if (has_ports) plan.at.outbox = carver.take(kRingSides * in_flight * plan.slot_bytes);
  plan.at.end = carver.end();
  return plan;
}

int ring_side(uint32_t rank, uint32_t peer, uint32_t ranks) {
  if (peer == (rank + 1) % ranks) return 0;
  return rank == (peer + 1) % ranks ? 1 : -1;
}

GridPlan plan_ring_message(uint64_t bytes, uint32_t num_sms, const ComputeLimits& limits) {
  if (!limits.is_cuda) return grid_of(divide_up(bytes, kHostPieceBytes), limits.host_threads, 1, 0, limits);
  const uint32_t warps = std::min(
      kRingWarps, std::max(1u, (limits.shared_bytes - kPipeBarrierBytes) / pipe_bytes(kRingPieceBytes)));
  const uint64_t pieces_per_block = uint64_t{warps} * kRingPieceBytes;
  return grid_of(divide_up(bytes, pieces_per_block),
                 std::min(num_sms == 0 ? kRingSms : num_sms, limits.max_blocks), warps * kCudaWarp,
                 kPipeBarrierBytes + warps * pipe_bytes(kRingPieceBytes), limits);
}

// Warps that fetch through ports each have places to land: a few keep any NIC busy.
GridPlan plan_engram_fetch(uint64_t count, bool has_ports, const ComputeLimits& limits) {
  constexpr uint64_t kHostEntries = 256;  // what is worth another thread
  if (!limits.is_cuda) return grid_of(divide_up(count, kHostEntries), limits.host_threads, 1, 0, limits);
  const uint32_t most = has_ports ? std::min(kPortFetchBlocks, limits.max_blocks) : limits.max_blocks;
  return grid_of(divide_up(count, kFetchThreads / kCudaWarp), most, kFetchThreads, 0, limits);
}

EngramLayout plan_engram(uint64_t entries_per_rank, uint64_t row_bytes, bool has_ports,
                         const ComputeLimits& limits) {
  EngramLayout at{};
  Carver carver;
  if (has_ports) {
    const uint64_t warps =
        limits.is_cuda ? kPortFetchBlocks * (kFetchThreads / kCudaWarp) : std::max(1u, limits.host_threads);
    at.landing_bytes = landing_bytes_of(row_bytes);
    at.words = carver.take(warps * kLandings * sizeof(uint64_t));
    at.landings = carver.take(warps * kLandings * at.landing_bytes);
  }
  at.entries = carver.take(entries_per_rank * row_bytes);
  at.end = std::max<uint64_t>(round_up(carver.end(), 16), 16);
  return at;
}

}  // namespace weft
