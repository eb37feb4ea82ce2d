// SPDX-License-Identifier: Apache-2.0
//
// What a target falls back to where it has no instruction for it. Included by the targets, after WEFT_DEVICE.
#pragma once

namespace weft {

// What a RowPipe moves, and what its sink is told of it.
struct RowPiece {
  const std::byte* src;
  uint32_t bytes;  // multiple of 16
};
template <class Tag>
struct RowItem {
  RowPiece piece;
  Tag tag;
};
// A RowPipe's shared memory: its barriers, then its stages, of piece_bytes each.
inline constexpr uint32_t kPipeStages = 4;
inline constexpr uint32_t kPipeBarrierBytes = 128;
WEFT_DEVICE constexpr uint32_t pipe_bytes(uint32_t piece_bytes, uint32_t stages = kPipeStages) {
  return (kPipeBarrierBytes + stages * piece_bytes + 127) / 128 * 128;
}

// A row that is added to others, and what it is multiplied with.
struct AddedRow {
  const std::byte* at;
  float weight;
};
inline constexpr uint32_t kMostAddedRows = 32;  // that a thread which adds alone lists

// On the host: of the bytes that a rank writes in a call, so many are in a cache when they are read.
inline constexpr uint64_t kCachedBytes = 8 << 20;

// Of a RowQueue, which a target has where kHasRowQueue: its barriers, then its slots, of a piece of a row each.
class RowQueue;
inline constexpr uint32_t kQueuePieceBytes = 2048;
inline constexpr uint32_t kMostQueueSlots = kPipeBarrierBytes / 8;
WEFT_DEVICE constexpr uint32_t queue_bytes(uint32_t slots) {
  return kPipeBarrierBytes + slots * kQueuePieceBytes;
}

// Of a RowWriter, as above: what it is written in, in turns.
class RowWriter;
inline constexpr uint32_t kWriterSlots = 3;
inline constexpr uint32_t kWriterBytes = kWriterSlots * kQueuePieceBytes;

WEFT_DEVICE float float_of_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
WEFT_DEVICE uint32_t bits_of_float(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

// What networks and NICs read: the first byte in memory is the highest. All targets are little-endian.
WEFT_DEVICE constexpr uint32_t big_endian(uint32_t value) {
  return value << 24 | (value & 0xff00u) << 8 | (value >> 8 & 0xff00u) | value >> 24;
}
WEFT_DEVICE constexpr uint64_t big_endian(uint64_t value) {
  return static_cast<uint64_t>(big_endian(static_cast<uint32_t>(value))) << 32 |
         big_endian(static_cast<uint32_t>(value >> 32));
}

// float8_e4m3fn: nearest even; above 448, infinities too, it is 448; NaN stays NaN. Without branches, so that
// loops over it vectorise.
WEFT_DEVICE uint32_t e4m3_portable(float value) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  constexpr uint32_t kSmallestNormal = 121u << 23;  // 2^-6
  constexpr float kSubnormalStep = 16384.0f;  // 2^14: adding it leaves multiples of 2^-9 in the low bits
  const uint32_t bits = bits_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23)) >> 20;
  const uint32_t tiny =
      bits_of_float(float_of_bits(magnitude) + kSubnormalStep) - bits_of_float(kSubnormalStep);
  uint32_t code = magnitude < kSmallestNormal ? tiny : normal;
  code = code > 0x7eu ? 0x7eu : code;
  code = magnitude > kInfinity ? 0x7fu : code;
  return code | ((bits >> 24) & 0x80u);
}

// FP16 to float32: exact. The multiplication moves the exponent, subnormals included.
WEFT_DEVICE float f16_to_float_portable(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t finite =
      bits_of_float(float_of_bits(magnitude << 13) * float_of_bits(0x77800000u));  // 2^112
  const uint32_t value = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : finite;
  return float_of_bits(value | (bits & 0x8000u) << 16);
}
// float32 to FP16: nearest, ties to even; NaN stays NaN.
WEFT_DEVICE uint32_t float_to_f16_portable(float value) {
  constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14
  constexpr float kSubnormalStep = 0.5f;            // adding it leaves multiples of 2^-24 in the low bits
  const uint32_t bits = bits_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t tiny =
      bits_of_float(float_of_bits(magnitude) + kSubnormalStep) - bits_of_float(kSubnormalStep);
  uint32_t code = magnitude < kSmallestNormal ? tiny : normal;
  code = code > 0x7c00u ? 0x7c00u : code;
  code = magnitude > 0x7f800000u ? 0x7e00u : code;
  return code | ((bits >> 16) & 0x8000u);
}

}  // namespace weft
