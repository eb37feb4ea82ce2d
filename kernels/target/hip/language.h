// SPDX-License-Identifier: Apache-2.0
//
// The language of the HIP target: its types, and what the macros of kernels mean to hiprtc and to clang
// without AMD's headers.
#pragma once

#if defined(__HIPCC_RTC__)
using int8_t = __INT8_TYPE__;
using uint8_t = __UINT8_TYPE__;
using int16_t = __INT16_TYPE__;
using uint16_t = __UINT16_TYPE__;
using int32_t = __INT32_TYPE__;
using uint32_t = __UINT32_TYPE__;
using int64_t = __INT64_TYPE__;
using uint64_t = __UINT64_TYPE__;
using uintptr_t = __UINTPTR_TYPE__;
using size_t = __SIZE_TYPE__;
namespace std {
enum class byte : unsigned char {};
}
#else
#include <cstddef>
#include <cstdint>
#endif

// What HIP's own headers define, for a compiler that has only the language. AMD's second bound is waves per
// SIMD, not blocks per SM; four SIMDs share a block.
#if !defined(__global__)
#define __global__ __attribute__((global))
#endif
#undef __launch_bounds__
#define __launch_bounds__(threads, blocks)                  \
  __attribute__((amdgpu_flat_work_group_size(1, (threads)), \
                 amdgpu_waves_per_eu(((threads) * (blocks) + 255) / 256)))
#define __grid_constant__  // arguments lie in constant memory anyway

#define WEFT_DEVICE __attribute__((device, always_inline)) inline
// What is seldom called, and large: one copy in a kernel.
#define WEFT_APART __attribute__((device, noinline)) inline
#define WEFT_INNER WEFT_DEVICE
#define WEFT_KERNEL __attribute__((device, always_inline)) inline
#define WEFT_UNROLL _Pragma("unroll")         // before a loop whose trip count is constant
#define WEFT_ROLLED _Pragma("nounroll")       // before a loop that is short: code is fetched from far, too
#define WEFT_STREAM_LOOP _Pragma("unroll 4")  // before a loop whose iterations are independent

#include "kernels/target/gpu.h"
#include "kernels/target/portable.h"
