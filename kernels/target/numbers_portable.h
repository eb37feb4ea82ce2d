// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic that gives the same bits on every target, and conversions of FP8, FP16 and BF16, where a target has no
// instructions for them. Included by a target's numbers.h, after its memory.
#pragma once

namespace weft {

// One rounding each: the compiler may not fuse them, so that every target gives the same bits.
WEFT_DEVICE float multiply(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
WEFT_DEVICE float add(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
WEFT_DEVICE float divide(float a, float b) {
#pragma clang fp contract(off)
  return a / b;
}

// Four floats as float8_e4m3fn, first in the low byte: nearest even; above 448 it is 448. CDNA 3's own
// conversion is to another format (e4m3fnuz).
WEFT_DEVICE uint32_t e4m3x4(float a, float b, float c, float d) {
  return e4m3_portable(a) | e4m3_portable(b) << 8 | e4m3_portable(c) << 16 | e4m3_portable(d) << 24;
}

// FP16 to float32 and back, to nearest, ties to even.
WEFT_DEVICE float float_of_f16(uint32_t bits) {
  return f16_to_float_portable(bits);
}
WEFT_DEVICE uint32_t f16_bits(float value) {
  return float_to_f16_portable(value);
}

namespace detail {

WEFT_DEVICE uint32_t bf16_bits_of(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

}  // namespace detail

// The eight bf16 of a Vec16 and their float32 sums: sums[0..3] belong to the low halves of the words,
// sums[4..7] to the high ones. Rounding is to nearest, ties to even.
WEFT_DEVICE void add_bf16x8(float (&sums)[8], const Vec16& vec) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    sums[i] += __builtin_bit_cast(float, vec.words[i] << 16);
    sums[4 + i] += __builtin_bit_cast(float, vec.words[i] & 0xffff0000u);
  }
}
WEFT_DEVICE Vec16 round_bf16x8(const float (&sums)[8]) {
  Vec16 vec;
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i)
    vec.words[i] = detail::bf16_bits_of(sums[i]) | detail::bf16_bits_of(sums[4 + i]) << 16;
  return vec;
}

}  // namespace weft
