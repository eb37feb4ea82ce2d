// SPDX-License-Identifier: Apache-2.0
//
// The weak target: kernels as a GPU with CUDA's abilities may run them, on the machine of tests/weak. For tests alone.
#pragma once

#include "weak/target/groups.h"
#include "weak/target/memory.h"
#include "weak/target/row_pipe.h"
#include "weak/target/time.h"

#include "kernels/target/numbers_portable.h"
