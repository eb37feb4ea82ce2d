// SPDX-License-Identifier: Apache-2.0
//
// numbers.cuh: 16-bit and 32-bit floating-point rows as float32 accumulators, eight or four elements at a
// time.
#pragma once

#include "kernels/target/target.h"

namespace weft {

// Nearest, ties to even; NaN stays NaN.
WEFT_DEVICE uint32_t bf16_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Signed, since x86 compares vectors of signed integers only.
  const bool is_nan = static_cast<int32_t>(bits & 0x7fffffffu) > 0x7f800000;
  return is_nan ? (bits >> 16) | 0x40u : rounded;
}
WEFT_DEVICE float float_of_bf16(uint32_t bits) {
  return float_of_bits(bits << 16);
}

// FP8 with 5 exponent bits: the upper byte of an FP16 number, to nearest, ties to even; NaN stays NaN.
WEFT_DEVICE uint32_t e5m2_bits(float value) {
  const uint32_t half = f16_bits(value);
  if ((half & 0x7fffu) > 0x7c00u) return (half >> 8) | 0x7fu;
  return (half + 0x7fu + ((half >> 8) & 1u)) >> 8;
}
// FP8 with 4 exponent bits and no infinity: 0x7f and 0xff are NaN.
WEFT_DEVICE float float_of_e4m3(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  const uint32_t sign = (bits & 0x80u) << 24;
  if (magnitude == 0x7fu) return float_of_bits(sign | 0x7fc00000u);
  if (magnitude < 8) return float_of_bits(sign | bits_of_float(static_cast<float>(magnitude) * 0.001953125f));
  return float_of_bits(sign | ((magnitude << 20) + (120u << 23)));
}

// FP4 with 2 exponent bits, in 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; nearest, ties to even;
// above 6, NaN too, it is 6.
WEFT_DEVICE uint32_t e2m1_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  const float size = float_of_bits(bits & 0x7fffffffu);
  if (!(size <= 5.0f)) return 7u | (bits >> 28 & 8u);
  const uint32_t code =
      (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f);
  return code | (bits >> 28 & 8u);
}

// Elements whose rows no target adds as wholes.
struct AddedByVecs {
  template <bool kIsWeighted>
  WEFT_DEVICE static bool sum_by_thread(std::byte*, const AddedRow*, uint32_t, uint64_t, bool) {
    return false;
  }
};

// The elements of one Vec16 in float32: the low halves of its words, then the high ones.
// sum_by_thread(): rows as wholes, by one thread, as a loop of add() and round() gives it; false where a target can't.
struct Bf16 {
  static constexpr uint32_t kPerVec = 8;

  template <bool kIsWeighted>
  WEFT_DEVICE static bool sum_by_thread(std::byte* out, const AddedRow* rows, uint32_t count, uint64_t bytes,
                                        bool past_caches) {
    return sum_bf16_by_thread<kIsWeighted>(out, rows, count, bytes, past_caches);
  }

  WEFT_DEVICE static void add(float (&sums)[kPerVec], const Vec16& vec) { add_bf16x8(sums, vec); }
  WEFT_DEVICE static Vec16 round(const float (&sums)[kPerVec]) { return round_bf16x8(sums); }
};

struct Fp16 : AddedByVecs {
  static constexpr uint32_t kPerVec = 8;

  WEFT_DEVICE static void add(float (&sums)[kPerVec], const Vec16& vec) {
    for (uint32_t i = 0; i < 4; ++i) {
      sums[i] += float_of_f16(vec.words[i] & 0xffffu);
      sums[4 + i] += float_of_f16(vec.words[i] >> 16);
    }
  }
  WEFT_DEVICE static Vec16 round(const float (&sums)[kPerVec]) {
    Vec16 vec;
    for (uint32_t i = 0; i < 4; ++i) vec.words[i] = f16_bits(sums[i]) | f16_bits(sums[4 + i]) << 16;
    return vec;
  }
};

struct Fp32 : AddedByVecs {
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
