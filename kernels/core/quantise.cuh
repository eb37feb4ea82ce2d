// SPDX-License-Identifier: Apache-2.0
//
// quantise.cuh: how rows are made smaller for the wire. The same bits on every target: only single roundings
// are used.
//   FP8      float8_e4m3fn with one scale per 128 channels, float32 or (power of two only) its exponent byte
//   MXFP8    float8_e4m3fn with the exponent byte of a power of two per 32 channels
//   NVFP4    4-bit floats with an E4M3 (or exponent) byte per 16 channels, relative to a scale of the whole
//   tensor LogFMT   sign and 9 bits of a logarithm, on a grid between the smallest and the largest magnitude
//   of 128 channels
// A group of 128 channels is shared by kGroupLanes neighbouring lanes, each with kLaneElems consecutive
// channels.
#pragma once

#include "kernels/core/numbers.cuh"

namespace weft {

inline constexpr uint32_t kGroupElems = 128;
inline constexpr uint32_t kGroupLanes = Warp::kMaxSize < 8 ? 1 : 8;
inline constexpr uint32_t kLaneElems = kGroupElems / kGroupLanes;

// ---- bf16 rows to lanes
// --------------------------------------------------------------------------------------------

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
// -----------------------------------------------------------------------------------------------------------

struct Fp8Scale {
  float scale;     // what the receiver multiplies by
  float multiply;  // what the sender multiplies by
};

// amax / 448, at least 1e-4 / 448; as a power of two it is rounded up.
WEFT_DEVICE Fp8Scale fp8_scale(float amax, bool power_of_two) {
  constexpr float kLeast = 1e-4f;
  constexpr float kLargestE4m3 = 448.0f;
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
// ---------------------------------------------------------------------------------------------------

// A quantiser turns units of kUnitElems channels, one lane each, into kBytes bytes and kBlocks scale bytes.
inline constexpr uint32_t kUnitElems = 32;

WEFT_DEVICE float largest_of(const float* values, uint32_t elems) {
  float largest = 0;
  for (uint32_t i = 0; i < elems; ++i)
    largest = magnitude(values[i]) > largest ? magnitude(values[i]) : largest;
  return largest;
}

// The biased exponent of the least power of two that is at least `value`, which is not negative; at most 254.
WEFT_DEVICE uint32_t exponent_above(float value) {
  const uint32_t exponent = (bits_of_float(value) + 0x7fffffu) >> 23;
  return exponent < 254u ? exponent : 254u;
}
// 2 to the minus that exponent.
WEFT_DEVICE float inverse_power(uint32_t exponent) {
  return float_of_bits(exponent < 254u ? (254u - exponent) << 23 : 0x00400000u);
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
    const float wanted = multiply(divide(largest_of(values, kElems), 6.0f), global);
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

// ---- LogFMT
// --------------------------------------------------------------------------------------------------------

// log2 of a positive finite number, to about 1e-7.
WEFT_DEVICE float log2_positive(float value) {
  int32_t exponent = -127;
  if (bits_of_float(value) < 0x00800000u) {  // subnormal
    value = multiply(value, 16777216.0f);
    exponent -= 24;
  }
  const uint32_t bits = bits_of_float(value);
  exponent += static_cast<int32_t>(bits >> 23);
  float mantissa = float_of_bits((bits & 0x007fffffu) | 0x3f800000u);
  if (mantissa > 1.41421356f) {
    mantissa = multiply(mantissa, 0.5f);
    exponent += 1;
  }
  // 2 / ln 2 * atanh(s), |s| < 0.172
  const float s = divide(add(mantissa, -1.0f), add(mantissa, 1.0f));
  const float square = multiply(s, s);
  float series = 0.32059889f;
  series = add(multiply(series, square), 0.41219858f);
  series = add(multiply(series, square), 0.57707802f);
  series = add(multiply(series, square), 0.96179669f);
  series = add(multiply(series, square), 2.88539008f);
  return add(static_cast<float>(exponent), multiply(series, s));
}

// 2 to a power of at most 127, to about 1e-7; 0 below the smallest normal number.
WEFT_DEVICE float exp2_bounded(float power) {
  if (power < -126.0f) return 0.0f;
  const int32_t whole = static_cast<int32_t>(add(power, power < 0 ? -0.5f : 0.5f));
  const float part =
      add(power, -static_cast<float>(whole));  // at most 1/2 either way: the series is that of exp
  float series = 1.5252734e-5f;
  series = add(multiply(series, part), 1.5403530e-4f);
  series = add(multiply(series, part), 1.3333558e-3f);
  series = add(multiply(series, part), 9.6181291e-3f);
  series = add(multiply(series, part), 5.5504109e-2f);
  series = add(multiply(series, part), 2.4022651e-1f);
  series = add(multiply(series, part), 6.9314718e-1f);
  series = add(multiply(series, part), 1.0f);
  return multiply(series, float_of_bits(static_cast<uint32_t>(whole + 127) << 23));
}

inline constexpr uint32_t kLogCodes = 512;       // 9 bits; code 0 is zero
inline constexpr uint32_t kLogGroupBytes = 160;  // 128 codes with their signs
inline constexpr uint32_t kLogLaneWords = kLaneElems * 10 / 32;

// The grid of one group. Both sides derive it from the same two numbers.
struct LogGrid {
  float low;   // the logarithm that code 1 stands for
  float step;  // between codes; 0 where the group does not fit
  float bias;  // rounds to the nearest value, not to the nearest logarithm

  WEFT_DEVICE bool fits() const { return step > 0; }
};
WEFT_DEVICE LogGrid log_grid(float largest, float smallest) {
  constexpr float kSpan = 32.0f;
  if (!(largest > 0.0f) || !(largest < 1.0f)) return {0, 0, 0};
  const float high = log2_positive(largest);
  float low = add(high, -kSpan);
  if (smallest > 0.0f) {
    const float given = log2_positive(smallest);
    low = given > low ? given : low;
  }
  if (!(low < high)) return {0, 0, 0};
  const float step = divide(add(high, -low), 510.0f);
  const float middle = log2_positive(multiply(add(1.0f, exp2_bounded(step)), 0.5f));
  return {low, step, add(2.0f, -divide(middle, step))};
}

// Sign in bit 9, code in bits 0 to 8.
WEFT_DEVICE uint32_t log_encode(const LogGrid& grid, float value) {
  const uint32_t sign = bits_of_float(value) >> 31 << 9;
  const float size = magnitude(value);
  if (!(size > 0.0f)) return sign;
  const float at = add(divide(add(log2_positive(size), -grid.low), grid.step), grid.bias);
  const uint32_t code = at > 0.0f ? static_cast<uint32_t>(at) : 0;
  return sign | (code < kLogCodes ? code : kLogCodes - 1);
}
WEFT_DEVICE float log_decode(const LogGrid& grid, uint32_t code) {
  const uint32_t step = code & (kLogCodes - 1);
  if (step == 0) return 0.0f;
  const float size = exp2_bounded(add(multiply(static_cast<float>(step - 1), grid.step), grid.low));
  return float_of_bits(bits_of_float(size) | (code >> 9 & 1u) << 31);
}

// A lane's channels as LogFMT: kLogLaneWords words, sixteen channels to five words.
struct LogLane {
  uint32_t words[kLogLaneWords];
};
WEFT_DEVICE LogLane log_lane(const LogGrid& grid, const float (&values)[kLaneElems]) {
  LogLane lane{};
  WEFT_UNROLL
  for (uint32_t i = 0; i < kLaneElems; ++i) {
    const uint64_t code = static_cast<uint64_t>(log_encode(grid, values[i])) << (i * 10 % 32);
    lane.words[i * 10 / 32] |= static_cast<uint32_t>(code);
    if (i * 10 % 32 > 22) lane.words[i * 10 / 32 + 1] |= static_cast<uint32_t>(code >> 32);
  }
  return lane;
}
WEFT_DEVICE void log_lane_values(float (&values)[kLaneElems], const LogGrid& grid, const LogLane& lane) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < kLaneElems; ++i) {
    uint64_t code = lane.words[i * 10 / 32];
    if (i * 10 % 32 > 22) code |= static_cast<uint64_t>(lane.words[i * 10 / 32 + 1]) << 32;
    values[i] = log_decode(grid, static_cast<uint32_t>(code >> (i * 10 % 32)) & 0x3ffu);
  }
}

}  // namespace weft
