// SPDX-License-Identifier: Apache-2.0
//
// What a buffer's calls take of its window, in bytes. buffer_room.cc makes sure that it is there.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/status.h"
#include "kernels/moe/high_throughput_args.h"
#include "memory/heap.h"

namespace weft {

inline constexpr char kNoRoom[] = "num_nvl_bytes:";  // how the message begins of a call that found none

// Of combine: `rows` rows and their weights.
inline uint64_t staging_bytes_of(uint64_t rows, uint64_t row_bytes, uint64_t top_k) {
  return round_up(rows * row_bytes, 16) + rows * top_k * sizeof(float);
}

// Of one piece of the heap.
inline uint64_t heap_bytes_of(uint64_t bytes) {
  return round_up(std::max<uint64_t>(bytes, 1), Heap::kAlignment);
}

// Whether a call found no room, which is no fault of an earlier call.
inline bool lacks_room(const Status& status) {
  return status.code() == Code::kCapacity && status.message().starts_with(kNoRoom);
}
template <class T>
bool lacks_room(const Result<T>& result) {
  return lacks_room(result.status());
}

}  // namespace weft
