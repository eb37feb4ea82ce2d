// SPDX-License-Identifier: Apache-2.0
//
// The language of the host target: what the macros of kernels mean to a C++ compiler.
#pragma once

#include <cstddef>
#include <cstdint>

#define WEFT_DEVICE inline
// What runs once for each vector of a long loop: a call there costs more than the work, and compilers differ in what they inline.
#define WEFT_INNER [[gnu::always_inline]] inline
#define WEFT_APART inline  // what is seldom called, and large: one copy in a kernel
#define WEFT_KERNEL inline
#define WEFT_UNROLL  // before a loop whose trip count is constant; the compiler decides
#define WEFT_ROLLED  // before a loop that is short and should stay small
// Before a loop whose iterations are independent. Clang's own pragma warns wherever it is of no use.
#if defined(__clang__)
#define WEFT_STREAM_LOOP
#else
#define WEFT_STREAM_LOOP _Pragma("GCC ivdep")
#endif
#define WEFT_HOST_TARGET 1

#include "kernels/target/portable.h"
