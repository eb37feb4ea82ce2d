// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic and conversions of HIP kernels.
#pragma once

#include "kernels/target/hip/memory.h"

#include "kernels/target/numbers_portable.h"
