// SPDX-License-Identifier: Apache-2.0
//
// message_units.cuh: what one step of a program moves, and its memory as units of 16 bytes, whole or ragged.
#pragma once

#include "kernels/collective/element.cuh"
#include "kernels/core/copy.cuh"

namespace weft {

// Local memory of one piece: `bytes` of it exist (the last chunk of a buffer may be short). Null: not used.
struct Piece {
  std::byte* at = nullptr;
  uint64_t bytes = 0;
};

// Where a message is or goes: a slot of a connection, or of a direct message the memory itself, of which
// `bytes` exist. Null: not used.
struct Slot {
  std::byte* at = nullptr;
  uint64_t tag = 0;  // of the message
  uint64_t bytes = ~uint64_t{0};
};

struct Movement {
  Slot in;
  Piece src;  // combined with `in` where both are there
  Piece dst;
  Slot out;
  bool adds_dst = false;  // dst = dst + src
  bool streams = false;   // what moves is too large for the caches, and not read soon; on the host only
  uint32_t divisor = 0;   // of what an average combines here for the last time; 0: not the last time
  uint64_t units = 0;
};

namespace message {

WEFT_DEVICE bool is_aligned(const std::byte* at) {
  return reinterpret_cast<uint64_t>(at) % 16 == 0;
}

// Units that lie whole and aligned in a piece or slot; all of them where it is not used.
template <class Memory>
WEFT_DEVICE uint64_t full_units(const Memory& memory, uint64_t units) {
  if (!memory.at) return units;
  if (!is_aligned(memory.at)) return 0;
  const uint64_t whole = memory.bytes / 16;
  return whole < units ? whole : units;
}

// A unit that may be unaligned or run over the end, where it reads zero and is not written.
WEFT_DEVICE Vec16 load_ragged(const Piece& piece, uint64_t unit) {
  struct Bytes {
    std::byte values[16];
  } bytes;
  if (unit * 16 + 16 <= piece.bytes) {
    copy_few<16>(bytes.values, piece.at + unit * 16);
    return __builtin_bit_cast(Vec16, bytes);
  }
  for (uint32_t i = 0; i < 16; ++i) {
    const uint64_t at = unit * 16 + i;
    bytes.values[i] = at < piece.bytes ? piece.at[at] : std::byte{0};
  }
  return __builtin_bit_cast(Vec16, bytes);
}
WEFT_DEVICE void store_ragged(const Piece& piece, uint64_t unit, const Vec16& value) {
  struct Bytes {
    std::byte values[16];
  };
  const auto bytes = __builtin_bit_cast(Bytes, value);
  if (unit * 16 + 16 <= piece.bytes) {
    copy_few<16>(piece.at + unit * 16, bytes.values);
    return;
  }
  for (uint32_t i = 0; i < 16; ++i)
    if (unit * 16 + i < piece.bytes) piece.at[unit * 16 + i] = bytes.values[i];
}

// The combined unit; divided if this step ends an average.
template <class Combiner>
WEFT_INNER Vec16 combined(const Vec16& a, const Vec16& b, [[maybe_unused]] uint32_t divisor) {
  const Vec16 value = Combiner::apply(a, b);
  if constexpr (Combiner::kIsAverage) {
    if (divisor) return Combiner::finish(value, divisor);
  }
  return value;
}

}  // namespace message

}  // namespace weft
