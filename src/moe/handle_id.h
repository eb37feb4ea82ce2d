// SPDX-License-Identifier: Apache-2.0
//
// A handle's id names one dispatch on all ranks. Its low bits count the dispatches of a buffer. The other bits name the
// buffer: they are the same on all ranks, and differ between buffers.
#pragma once

#include <cstdint>

namespace weft {

inline constexpr uint32_t kHandleNumberBits = 24;
inline constexpr uint32_t kHandleBufferBits = 39;  // ids fit an int64

constexpr uint64_t handle_id(uint64_t buffer, uint64_t number) {
  const uint64_t buffers = (uint64_t{1} << kHandleBufferBits) - 1;
  return (buffer & buffers) << kHandleNumberBits | (number & ((uint64_t{1} << kHandleNumberBits) - 1));
}
constexpr uint64_t handle_buffer(uint64_t id) {
  return id >> kHandleNumberBits;
}
constexpr uint64_t handle_number(uint64_t id) {
  return id & ((uint64_t{1} << kHandleNumberBits) - 1);
}

}  // namespace weft
