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
typedef int32_t Int4 __attribute__((vector_size(16)));

inline Word4 bf16_bits_of(Float4 values) {
  const Word4 bits = reinterpret_cast<Word4>(values);
  const Word4 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Signed, since x86 compares vectors of signed integers only.
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

namespace detail {

// Numbers of 16 bits, in the low halves of words, as float32 and back.
struct Bf16Number {
  static Float4 widened(Word4 bits) { return reinterpret_cast<Float4>(bits << 16); }
  static Word4 narrowed(Float4 values) { return bf16_bits_of(values); }
};
// As f16_to_float_portable() and float_to_f16_portable() do it. Signed, since x86 compares vectors of signed integers only.
struct F16Number {
  static Float4 widened(Word4 bits) {
    const Word4 magnitude = bits & 0x7fffu;
    const Word4 finite = reinterpret_cast<Word4>(reinterpret_cast<Float4>(magnitude << 13) * 0x1p112f);
    const Word4 special = 0x7f800000u | (magnitude & 0x3ffu) << 13;
    const Word4 is_special = reinterpret_cast<Word4>(reinterpret_cast<Int4>(magnitude) >= 0x7c00);
    const Word4 value = (is_special & special) | (~is_special & finite);
    return reinterpret_cast<Float4>(value | (bits & 0x8000u) << 16);
  }
  static Word4 narrowed(Float4 values) {
    const Word4 bits = reinterpret_cast<Word4>(values), magnitude = bits & 0x7fffffffu;
    const Int4 size = reinterpret_cast<Int4>(magnitude);
    const Word4 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const Word4 tiny =
        reinterpret_cast<Word4>(reinterpret_cast<Float4>(magnitude) + 0.5f) - bits_of_float(0.5f);
    const Word4 is_tiny = reinterpret_cast<Word4>(size < (113 << 23));
    Word4 code = (is_tiny & tiny) | (~is_tiny & normal);
    const Word4 is_large = reinterpret_cast<Word4>(reinterpret_cast<Int4>(code) > 0x7c00);
    code = (is_large & 0x7c00u) | (~is_large & code);
    const Word4 is_nan = reinterpret_cast<Word4>(size > 0x7f800000);
    code = (is_nan & 0x7e00u) | (~is_nan & code);
    return code | ((bits >> 16) & 0x8000u);
  }
};

inline Word4 words_of(const Vec16& vec) {
  Word4 words;
  std::memcpy(&words, &vec, sizeof(words));
  return words;
}
template <class Vector>
Vec16 vec_of(const Vector& vector) {
  Vec16 vec;
  std::memcpy(&vec, &vector, sizeof(vec));
  return vec;
}

template <class Op>
struct Applied {
  Float4 operator()(Float4 a, Float4 b) const { return Op::apply(a, b); }
};
struct DividedBy {
  float divisor;
  Float4 operator()(Float4 value) const { return value / divisor; }
};

}  // namespace detail

// The numbers of a vector as float32: map() gives f of those of each vector, four at a time. Of 16 bits the low halves of the
// words and the high ones, each result rounded to nearest, ties to even.
template <class Number>
struct HalfLanes {
  template <class F, class... Vecs>
  [[gnu::always_inline]] static Vec16 map(F f, const Vecs&... vecs) {
    const detail::Word4 low = Number::narrowed(f(Number::widened(detail::words_of(vecs) & 0xffffu)...));
    const detail::Word4 high = Number::narrowed(f(Number::widened(detail::words_of(vecs) >> 16)...));
    return detail::vec_of(low | high << 16);
  }
};
struct Bf16Lanes : HalfLanes<detail::Bf16Number> {};
struct F16Lanes : HalfLanes<detail::F16Number> {};
struct F32Lanes {
  template <class F, class... Vecs>
  [[gnu::always_inline]] static Vec16 map(F f, const Vecs&... vecs) {
    return detail::vec_of(f(reinterpret_cast<detail::Float4>(detail::words_of(vecs))...));
  }
};

// Op of the numbers of two vectors, and numbers divided by another, as one after the other gives it.
inline constexpr bool kHasLanes = true;
template <class Lanes, class Op>
[[gnu::always_inline]] inline Vec16 combine_lanes(const Vec16& a, const Vec16& b) {
  return Lanes::map(detail::Applied<Op>{}, a, b);
}
template <class Lanes>
[[gnu::always_inline]] inline Vec16 divide_lanes(const Vec16& vec, float divisor) {
  return Lanes::map(detail::DividedBy{divisor}, vec);
}

}  // namespace weft
