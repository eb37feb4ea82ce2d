// SPDX-License-Identifier: Apache-2.0
//
// logfmt.cuh: LogFMT, the format of low-latency combine's replies. A channel is a sign and 9 bits of a logarithm,
// on a grid between the smallest and the largest magnitude of 128 channels. The bits are the same on every target:
// only single roundings are used.
#pragma once

#include "kernels/core/quantise.cuh"

namespace weft {

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
