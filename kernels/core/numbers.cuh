// SPDX-License-Identifier: Apache-2.0
//
// numbers.cuh: 16-bit and 32-bit floating-point rows as float32 accumulators, eight or four elements at a time.
#pragma once

#include "kernels/target/target.h"

namespace weft {

WEFT_DEVICE float float_of_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
WEFT_DEVICE uint32_t bits_of_float(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

// Nearest, ties to even; NaN stays NaN.
WEFT_DEVICE uint32_t bf16_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
WEFT_DEVICE float float_of_bf16(uint32_t bits) { return float_of_bits(bits << 16); }

// The elements of one Vec16 in float32.
struct Bf16 {
  static constexpr uint32_t kPerVec = 8;

  WEFT_DEVICE static void add(float (&sums)[kPerVec], const Vec16& vec) {
    for (uint32_t i = 0; i < 4; ++i) {
      sums[2 * i] += float_of_bits(vec.words[i] << 16);
      sums[2 * i + 1] += float_of_bits(vec.words[i] & 0xffff0000u);
    }
  }
  WEFT_DEVICE static Vec16 round(const float (&sums)[kPerVec]) {
    Vec16 vec;
    for (uint32_t i = 0; i < 4; ++i) vec.words[i] = bf16_bits(sums[2 * i]) | bf16_bits(sums[2 * i + 1]) << 16;
    return vec;
  }
};

struct Fp32 {
  static constexpr uint32_t kPerVec = 4;

  WEFT_DEVICE static void add(float (&sums)[kPerVec], const Vec16& vec) {
    for (uint32_t i = 0; i < 4; ++i) sums[i] += float_of_bits(vec.words[i]);
  }
  WEFT_DEVICE static Vec16 round(const float (&sums)[kPerVec]) {
    Vec16 vec;
    for (uint32_t i = 0; i < 4; ++i) vec.words[i] = bits_of_float(sums[i]);
    return vec;
  }
};

}  // namespace weft
