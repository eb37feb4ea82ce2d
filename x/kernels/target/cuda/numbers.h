// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic that gives the same bits on every target, and conversions of FP8, FP16 and BF16.
#pragma once

#include "kernels/target/cuda/memory.h"

namespace weft {

// One rounding each: the compiler may not fuse them, so that every target gives the same bits.
WEFT_DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
WEFT_DEVICE float add(float a, float b) {
  return __fadd_rn(a, b);
}
WEFT_DEVICE float divide(float a, float b) {
  return __fdiv_rn(a, b);
}

// Four floats as float8_e4m3fn, first in the low byte: nearest even; above 448 it is 448.
WEFT_DEVICE uint32_t e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint16_t low;
  uint16_t high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | static_cast<uint32_t>(high) << 16;
#else
  return e4m3_portable(a) | e4m3_portable(b) << 8 | e4m3_portable(c) << 16 | e4m3_portable(d) << 24;
#endif
}

// FP16 to float32 and back, to nearest, ties to even.
WEFT_DEVICE float float_of_f16(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
}
WEFT_DEVICE uint32_t f16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// The eight bf16 of a Vec16 and their float32 sums: sums[0..3] belong to the low halves of the words,
// sums[4..7] to the high ones. Rounding is to nearest, ties to even.
WEFT_DEVICE void add_bf16x8(float (&sums)[8], const Vec16& vec) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    sums[i] += __uint_as_float(vec.words[i] << 16);
    sums[4 + i] += __uint_as_float(vec.words[i] & 0xffff0000u);
  }
}
WEFT_DEVICE Vec16 round_bf16x8(const float (&sums)[8]) {
  Vec16 vec;
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(vec.words[i]) : "f"(sums[4 + i]), "f"(sums[i]));
  return vec;
}

}  // namespace weft
