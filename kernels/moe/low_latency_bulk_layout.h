// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of low-latency calls whose rows go by bulk copies (low_latency_dispatch_bulk.cuh, low_latency_combine_bulk.cuh):
// behind what every call has, a part for each warp. Described once for host and device.
#pragma once

#include "kernels/moe/low_latency_layout.h"

namespace weft {

// A lane has one place of a row, at most.
inline constexpr uint32_t kMostBulkTopK = kMostTopK;
inline constexpr uint32_t kMostBulkPieceBytes = 2560;

// Rows go in pieces as even as they come.
WEFT_DEVICE constexpr uint32_t bulk_piece_bytes(uint64_t row_bytes) {
  const uint64_t pieces = (row_bytes + kMostBulkPieceBytes - 1) / kMostBulkPieceBytes;
  return static_cast<uint32_t>(round_up_16((row_bytes + pieces - 1) / pieces));
}

// Batches of one token that a warp sends before it waits until they have arrived.
inline constexpr uint32_t kBatchesTogether = 4;

// Each warp has its own copy of the DispatchShared fields of a block's token.
struct DispatchBulkShared {
  uint64_t parts;  // [warps] of part_bytes
  uint64_t slot;   // in a part, like what follows
  uint64_t targets;
  uint64_t target;
  uint64_t place;
  uint64_t sent;  // u32[kBatchesTogether][R]
  uint64_t prefix;
  uint64_t part_bytes;
  uint64_t pipes;  // [warps] of pipe_bytes(bulk_piece_bytes())
  uint64_t bytes;
};
WEFT_DEVICE constexpr DispatchBulkShared dispatch_bulk_shared(uint64_t base_bytes, uint64_t ranks,
                                                              uint64_t experts_per_rank, uint64_t top_k,
                                                              uint64_t warps, uint64_t row_bytes) {
  Carver part;
  DispatchBulkShared at{};
  at.slot = part.take(4 * top_k * 4, 16);
  at.targets = part.take(4, 16);
  at.target = part.take(top_k * 4, 16);
  at.place = part.take(top_k * 8, 16);
  at.sent = part.take(kBatchesTogether * ranks * 4, 16);
  at.prefix = part.take(ranks * experts_per_rank * 4, 16);
  at.part_bytes = part.end();
  Carver carver(base_bytes);
  at.parts = carver.take(warps * at.part_bytes);
  at.pipes = carver.take(warps * pipe_bytes(bulk_piece_bytes(row_bytes)));
  at.bytes = carver.end();
  return at;
}

// Pieces of rows that a warp has asked for, and of sums that are on their way.
inline constexpr uint32_t kBulkQueueSlots = 3;

// Two lists of rows for each warp: what it sums, and what comes next.
struct CombineBulkShared {
  uint64_t parts;   // [warps] of part_bytes
  uint64_t row;     // in a part: const std::byte*[2][K]
  uint64_t weight;  // f32[2][K]
  uint64_t part_bytes;
  uint64_t queues;   // [warps] of queue_bytes(kBulkQueueSlots)
  uint64_t writers;  // [warps] of kWriterBytes
  uint64_t bytes;
};
WEFT_DEVICE constexpr CombineBulkShared combine_bulk_shared(uint64_t base_bytes, uint64_t top_k,
                                                            uint64_t warps) {
  Carver part;
  CombineBulkShared at{};
  at.row = part.take(2 * top_k * 8, 16);
  at.weight = part.take(2 * top_k * 4, 16);
  at.part_bytes = part.end();
  Carver carver(base_bytes);
  at.parts = carver.take(warps * at.part_bytes);
  at.queues = carver.take(warps * queue_bytes(kBulkQueueSlots));
  at.writers = carver.take(warps * kWriterBytes);
  at.bytes = carver.end();
  return at;
}

}  // namespace weft
