// SPDX-License-Identifier: Apache-2.0
//
// Bytes of the window that a buffer's calls need. buffer_room.cc makes sure that the window has them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/moe/high_throughput_args.h"
#include "memory/heap.h"

namespace weft {

// What a call found no room for: 0 bytes where it did.
struct Lacking {
  uint64_t bytes = 0;       // in one piece
  uint64_t free_bytes = 0;  // the largest free piece
};

// Of combine: `rows` rows and their weights.
inline uint64_t staging_bytes_of(uint64_t rows, uint64_t row_bytes, uint64_t top_k) {
  return round_up(rows * row_bytes, 16) + rows * top_k * sizeof(float);
}

// Of one piece of the heap.
inline uint64_t heap_bytes_of(uint64_t bytes) {
  return round_up(std::max<uint64_t>(bytes, 1), Heap::kAlignment);
}

}  // namespace weft
