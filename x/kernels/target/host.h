// SPDX-License-Identifier: Apache-2.0
//
// The host target: a rank is a process (or a thread, in tests), a warp is one thread, a block is one or more.
// See target.h for what the targets have in common.
#pragma once

#include "kernels/target/host/groups.h"
#include "kernels/target/host/memory.h"
#include "kernels/target/host/numbers.h"
#include "kernels/target/host/row_pipe.h"
#include "kernels/target/host/sums.h"
#include "kernels/target/host/time.h"
