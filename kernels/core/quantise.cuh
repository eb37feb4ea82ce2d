// SPDX-License-Identifier: Apache-2.0
//
// quantise.cuh: how rows become smaller before they travel. The bits are the same on every target: only single
// roundings are used. LogFMT is in logfmt.cuh.
//   FP8      float8_e4m3fn with one scale per 128 channels: float32, or the exponent byte of a power of two
//   MXFP8    float8_e4m3fn with the exponent byte of a power of two per 32 channels
//   NVFP4    4-bit floats with an E4M3 (or exponent) byte per 16 channels, relative to a scale of the whole tensor
// kGroupLanes neighbouring lanes share a group of 128 channels. Each has kLaneElems consecutive channels.
//
// NaN stays NaN: in FP8 and MXFP8 it has a code, and counts for no scale; in NVFP4, which has none, the block's scale is
// NaN. An infinity keeps its sign. Where scales are float32 or powers of two it takes the largest one, with which it is
// infinite again; finite channels of its group come as 0, or coarse. With E4M3 scales it is the largest number there is.
#pragma once

#include "kernels/core/numbers.cuh"

namespace weft {

inline constexpr uint32_t kGroupElems = 128;
inline constexpr uint32_t kGroupLanes = Warp::kMaxSize < 8 ? 1 : 8;
inline constexpr uint32_t kLaneElems = kGroupElems / kGroupLanes;

// ---- bf16 rows to lanes

// A vector's bf16 elements as float32, in the order of their channels.
WEFT_DEVICE void widen(float* values, const Vec16& vec) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    values[2 * i] = float_of_bits(vec.words[i] << 16);
    values[2 * i + 1] = float_of_bits(vec.words[i] & 0xffff0000u);
  }
}

// A lane's bf16 elements as float32, from a 16-byte aligned place; zeros where it is null.
template <bool kFresh = false, uint32_t kElems>
WEFT_DEVICE void load_lane(float (&values)[kElems], const std::byte* row) {
  WEFT_UNROLL
  for (uint32_t v = 0; v < kElems / 8; ++v) {
    const auto* at = reinterpret_cast<const Vec16*>(row) + v;
    widen(values + 8 * v, !row ? Vec16{} : kFresh ? load_vec_fresh(at) : load_vec(at));
  }
}

WEFT_DEVICE float magnitude(float value) {
  return float_of_bits(bits_of_float(value) & 0x7fffffffu);
}

// The largest magnitude of a group; every lane of the group gets it.
WEFT_DEVICE float group_max(Warp warp, const float (&values)[kLaneElems]) {
  float largest = 0;
  for (uint32_t i = 0; i < kLaneElems; ++i)
    largest = magnitude(values[i]) > largest ? magnitude(values[i]) : largest;
  return warp.max_within<kGroupLanes>(largest);
}

// ---- FP8

struct Fp8Scale {
  float scale;     // what the receiver multiplies by
  float multiply;  // what the sender multiplies by
};

// The largest power of two of float32, by its biased exponent. 448 of it are infinite.
inline constexpr uint32_t kLargestExponent = 254;
WEFT_DEVICE bool is_finite(float value) {
  return (bits_of_float(value) & 0x7f800000u) != 0x7f800000u;
}

// amax / 448, at least 1e-4 / 448; as a power of two it is rounded up.
WEFT_DEVICE Fp8Scale fp8_scale(float amax, bool power_of_two) {
  constexpr float kLeast = 1e-4f;
  constexpr float kLargestE4m3 = 448.0f;
  if (!is_finite(amax)) return {float_of_bits(kLargestExponent << 23), float_of_bits(0x00400000u)};
  amax = amax > kLeast ? amax : kLeast;
  const float scale = divide(amax, kLargestE4m3);
  if (!power_of_two) return {scale, divide(kLargestE4m3, amax)};
  const uint32_t exponent = (bits_of_float(scale) + 0x7fffffu) >> 23;
  return {float_of_bits(exponent << 23), float_of_bits((254u - exponent) << 23)};
}
// The byte of a power of two: its biased exponent.
WEFT_DEVICE uint8_t ue8m0(float scale) {
  return static_cast<uint8_t>(bits_of_float(scale) >> 23);
}

// A lane's channels as FP8: kLaneElems bytes.
struct Fp8Lane {
  Vec16 vecs[kLaneElems / 16];
};
WEFT_DEVICE Fp8Lane fp8_lane(const float (&values)[kLaneElems], float factor) {
  Fp8Lane lane;
  for (uint32_t i = 0; i < kLaneElems / 4; ++i)
    lane.vecs[i / 4].words[i % 4] =
        e4m3x4(multiply(values[4 * i], factor), multiply(values[4 * i + 1], factor),
               multiply(values[4 * i + 2], factor), multiply(values[4 * i + 3], factor));
  return lane;
}

// ---- blocks of 32 and 16 channels

// A quantiser turns units of kUnitElems channels, one lane each, into kBytes bytes and kBlocks scale bytes.
inline constexpr uint32_t kUnitElems = 32;

WEFT_DEVICE float largest_of(const float* values, uint32_t elems) {
  float largest = 0;
  for (uint32_t i = 0; i < elems; ++i)
    largest = magnitude(values[i]) > largest ? magnitude(values[i]) : largest;
  return largest;
}

// The same; NaN if there is one. Bits of magnitudes are ordered as they are, NaN above all.
WEFT_DEVICE float largest_or_nan(const float* values, uint32_t elems) {
  int32_t largest = 0;
  for (uint32_t i = 0; i < elems; ++i) {
    const auto bits = static_cast<int32_t>(bits_of_float(magnitude(values[i])));
    largest = bits > largest ? bits : largest;
  }
  return float_of_bits(static_cast<uint32_t>(largest));
}

// The biased exponent of the least power of two that is at least `value`, which is not negative; at most 254.
WEFT_DEVICE uint32_t exponent_above(float value) {
  const uint32_t exponent = (bits_of_float(value) + 0x7fffffu) >> 23;
  return exponent < kLargestExponent ? exponent : kLargestExponent;
}
// 2 to the minus that exponent.
WEFT_DEVICE float inverse_power(uint32_t exponent) {
  return float_of_bits(exponent < kLargestExponent ? (kLargestExponent - exponent) << 23 : 0x00400000u);
}

struct Mxfp8 {
  static constexpr uint32_t kBlocks = 1;
  static constexpr uint32_t kBytes = kUnitElems;

  // A block's codes, 4 to a word. Returns the exponent of its largest magnitude / 448, rounded up, so that
  // nothing saturates.
  WEFT_DEVICE uint32_t encode(const float* values, uint32_t* words) const {
    const uint32_t exponent = exponent_above(divide(largest_of(values, kUnitElems), 448.0f));
    const float factor = inverse_power(exponent);
    WEFT_UNROLL
    for (uint32_t i = 0; i < kUnitElems / 4; ++i)
      words[i] = e4m3x4(multiply(values[4 * i], factor), multiply(values[4 * i + 1], factor),
                        multiply(values[4 * i + 2], factor), multiply(values[4 * i + 3], factor));
    return exponent;
  }
};

struct Nvfp4 {
  static constexpr uint32_t kBlocks = 2;
  static constexpr uint32_t kBytes = kUnitElems / 2;
  float global;       // a channel is code * scale / global
  bool power_of_two;  // scales are exponents, rounded up, instead of E4M3, to nearest

  // A block's codes, 8 to a word, the first in the low bits. Returns its scale byte.
  WEFT_DEVICE uint32_t encode(const float* values, uint32_t* words) const {
    constexpr uint32_t kElems = kUnitElems / kBlocks;
    const float wanted = multiply(divide(largest_or_nan(values, kElems), 6.0f), global);
    if (wanted != wanted) {  // whatever the codes say
      WEFT_UNROLL
      for (uint32_t i = 0; i < kElems / 8; ++i) words[i] = 0;
      return power_of_two ? 0xffu : 0x7fu;
    }
    const uint32_t scale = power_of_two ? exponent_above(wanted) : e4m3x4(wanted, 0, 0, 0) & 0xffu;
    const float given = power_of_two ? float_of_bits(scale << 23) : float_of_e4m3(scale);
    const float factor = given > 0.0f ? divide(global, given) : 0.0f;
    WEFT_UNROLL
    for (uint32_t i = 0; i < kElems / 8; ++i) {
      words[i] = 0;
      for (uint32_t c = 0; c < 8; ++c) words[i] |= e2m1_bits(multiply(values[8 * i + c], factor)) << (4 * c);
    }
    return scale;
  }
};

}  // namespace weft
