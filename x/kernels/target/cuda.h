// SPDX-License-Identifier: Apache-2.0
//
// The CUDA target, for NVRTC: sm_80 and newer, bulk copies (TMA) from sm_90. Inline PTX only; no header is
// needed. See target.h for what the targets have in common. Instruction meanings: PTX ISA 8.x, sections 9.7.8
// (memory), 9.7.9.25 (bulk copies), 9.7.12 (barriers).
#pragma once

#include "kernels/target/cuda/groups.h"
#include "kernels/target/cuda/memory.h"
#include "kernels/target/cuda/numbers.h"
#include "kernels/target/cuda/row_pipe.h"
#include "kernels/target/cuda/time.h"
