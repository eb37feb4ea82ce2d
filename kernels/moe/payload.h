// SPDX-License-Identifier: Apache-2.0
//
// payload.h: the formats in which a low-latency dispatch sends its rows. All that host, kernels and Python know of one
// stands in its row here. To add a format: its row; where no encoder fits, one in kernels/core/quantise.cuh and its
// branch in send_row() (low_latency_dispatch_send.cuh); and the options that ask for it in find_format()
// (python/weft/moe/low_latency_formats.py).
#pragma once

#include "kernels/target/target.h"

namespace weft {

// What makes the bytes of a row from bf16 channels.
enum class Encoder : uint32_t {
  kNone,   // the row travels as it is
  kFp8,    // e4m3, a scale for each group of 128 channels
  kMxfp8,  // e4m3, blocks of 32 (OCP Microscaling Formats 1.0)
  kNvfp4,  // e2m1, blocks of 16 below a global scale
};

enum class Scale : uint32_t {
  kOpaque,          // bytes of the caller's, if any
  kFloat32,         // any value
  kFloat32Rounded,  // a power of two
  kExponent,        // the same, as its exponent byte (UE8M0)
  kE4m3,
};

struct Payload {
  const char* name;
  Encoder encoder;
  Scale scale;
  uint32_t shrinks_by;          // bf16 bytes of x that become one byte of the row
  uint32_t channels_per_scale;  // 0: as the caller has them
  // How PyTorch calls what arrives: elements of rows, and of scales: several exponents may share one.
  const char* row_type;
  const char* scale_type;
  bool tiled_scales;  // they arrive in the order of matrix units
};

// Part of kernels' keys, and of what ranks compare.
inline constexpr int64_t kPayloadCopy = 0, kPayloadFp8 = 1, kPayloadFp8Rounded = 2, kPayloadFp8Exponent = 3,
                         kPayloadMxfp8 = 4, kPayloadNvfp4 = 5, kPayloadNvfp4Exponent = 6, kPayloads = 7;

WEFT_DEVICE constexpr Payload payload(int64_t number) {
  switch (number) {
    case kPayloadFp8:
      return {"fp8", Encoder::kFp8, Scale::kFloat32, 2, 128, "float8_e4m3fn", "float32", false};
    case kPayloadFp8Rounded:
      return {"fp8_rounded", Encoder::kFp8, Scale::kFloat32Rounded, 2, 128, "float8_e4m3fn",
              "float32",     false};
    case kPayloadFp8Exponent:
      return {"fp8_exponent", Encoder::kFp8, Scale::kExponent, 2, 128, "float8_e4m3fn", "int32", false};
    case kPayloadMxfp8:
      return {"mxfp8", Encoder::kMxfp8, Scale::kExponent, 2, 32, "float8_e4m3fn", "int32", false};
    case kPayloadNvfp4:
      return {"nvfp4", Encoder::kNvfp4, Scale::kE4m3, 4, 16, "uint8", "float8_e4m3fn", true};
    case kPayloadNvfp4Exponent:
      return {"nvfp4_exponent", Encoder::kNvfp4, Scale::kExponent, 4, 16, "uint8", "int8", true};
    default:
      return {"copy", Encoder::kNone, Scale::kOpaque, 1, 0, "bfloat16", "", false};
  }
}

constexpr uint32_t bytes_of_scale(Scale scale) {
  return scale == Scale::kFloat32 || scale == Scale::kFloat32Rounded ? 4 : 1;
}

}  // namespace weft
