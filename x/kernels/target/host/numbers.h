// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic that gives the same bits on every target, and conversions of FP8, FP16 and BF16.
#pragma once

#include <cstring>

#include "kernels/target/host/memory.h"

namespace weft {

// One rounding each, as on the other targets.
inline float multiply(float a, float b) {
  return a * b;
}
inline float add(float a, float b) {
  return a + b;
}
inline float divide(float a, float b) {
  return a / b;
}

// Four floats as float8_e4m3fn, first in the low byte: nearest even; above 448 it is 448.
inline uint32_t e4m3x4(float a, float b, float c, float d) {
  return e4m3_portable(a) | e4m3_portable(b) << 8 | e4m3_portable(c) << 16 | e4m3_portable(d) << 24;
}

// FP16 to float32 and back, to nearest, ties to even.
inline float float_of_f16(uint32_t bits) {
  return f16_to_float_portable(bits);
}
inline uint32_t f16_bits(float value) {
  return float_to_f16_portable(value);
}

namespace detail {

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));

inline Word4 bf16_bits_of(Float4 values) {
  const Word4 bits = reinterpret_cast<Word4>(values);
  const Word4 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Signed, since x86 compares vectors of signed integers only.
  typedef int32_t Int4 __attribute__((vector_size(16)));
  const Int4 infinity = {0x7f800000, 0x7f800000, 0x7f800000, 0x7f800000};
  const Word4 is_nan = reinterpret_cast<Word4>(reinterpret_cast<Int4>(bits & 0x7fffffffu) > infinity);
  return (is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded);
}

}  // namespace detail

// The eight bf16 of a Vec16 and their float32 sums: sums[0..3] belong to the low halves of the words,
// sums[4..7] to the high ones. Rounding is to nearest, ties to even. Always inline: a call hands a Vec16 over in halves.
[[gnu::always_inline]] inline void add_bf16x8(float (&sums)[8], const Vec16& vec) {
  detail::Float4 low, high;
  detail::Word4 words;
  std::memcpy(&low, sums, sizeof(low));
  std::memcpy(&high, sums + 4, sizeof(high));
  std::memcpy(&words, &vec, sizeof(words));
  low += reinterpret_cast<detail::Float4>(words << 16);
  high += reinterpret_cast<detail::Float4>(words & 0xffff0000u);
  std::memcpy(sums, &low, sizeof(low));
  std::memcpy(sums + 4, &high, sizeof(high));
}
[[gnu::always_inline]] inline Vec16 round_bf16x8(const float (&sums)[8]) {
  detail::Float4 low, high;
  std::memcpy(&low, sums, sizeof(low));
  std::memcpy(&high, sums + 4, sizeof(high));
  const detail::Word4 words = detail::bf16_bits_of(low) | detail::bf16_bits_of(high) << 16;
  Vec16 vec;
  std::memcpy(&vec, &words, sizeof(vec));
  return vec;
}

}  // namespace weft
