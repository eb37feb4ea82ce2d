// SPDX-License-Identifier: Apache-2.0
//
// The HIP target, for hiprtc and for clang without AMD's headers: CDNA (gfx942 and newer), waves of 64 lanes.
// See target.h for what the targets have in common. Compiled in tests; not run on hardware yet.
// Scopes: system = what peers and the host see; agent = one GPU. Sources: LLVM's AMDGPU memory model and
// built-ins.
#pragma once

#include "kernels/target/hip/groups.h"
#include "kernels/target/hip/memory.h"
#include "kernels/target/hip/numbers.h"
#include "kernels/target/hip/row_pipe.h"
#include "kernels/target/hip/time.h"
