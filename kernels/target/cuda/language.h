// SPDX-License-Identifier: Apache-2.0
//
// The language of the CUDA target: its types, and what the macros of kernels mean to NVRTC.
#pragma once

#define WEFT_DEVICE __device__ __forceinline__
#define WEFT_APART __device__ __noinline__  // what is seldom called, and large: one copy in a kernel
#define WEFT_INNER WEFT_DEVICE
#define WEFT_KERNEL __device__ __forceinline__
#define WEFT_UNROLL _Pragma("unroll")         // before a loop whose trip count is constant
#define WEFT_ROLLED _Pragma("unroll 1")       // before a loop that is short: code is fetched from far, too
#define WEFT_STREAM_LOOP _Pragma("unroll 4")  // before a loop whose iterations are independent

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
using size_t = decltype(sizeof(0));
namespace std {
enum class byte : unsigned char {};
}
#else
#include <cstddef>
#include <cstdint>
#endif

#include "kernels/target/gpu.h"
#include "kernels/target/portable.h"
