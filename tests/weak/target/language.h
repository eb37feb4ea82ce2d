// SPDX-License-Identifier: Apache-2.0
//
// The language of the weak target: that of a C++ compiler, and the constants of GPUs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weak/machine.h"

#define WEFT_DEVICE inline
#define WEFT_INNER inline
#define WEFT_APART inline
#define WEFT_KERNEL inline
#define WEFT_UNROLL
#define WEFT_ROLLED
#define WEFT_STREAM_LOOP

#include "kernels/target/gpu.h"
#include "kernels/target/portable.h"
