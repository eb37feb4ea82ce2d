// SPDX-License-Identifier: Apache-2.0
//
// Low-latency kernels that are compiled for what the arguments of a plan's calls have in common:
// WEFT_LOW_LATENCY_CONSTANTS.
//   KernelKey key = with_known(low_latency_key(shape, in_bulk), args, config().low_latency_constants);
// A generated function stands before the kernel, as a key's prelude. It copies the arguments, sets those that are known to
// constants, and calls the kernel. The kernel's source is the same: the compiler folds the constants. Pure functions.
#pragma once

#include <string_view>

#include "jit/jit.h"
#include "kernels/moe/low_latency_args.h"

namespace weft {

// The key of a kernel that computes with what `args` hold now, whatever a launch passes there. `which`: "never", the key
// itself; "sizes", what all calls of a buffer with such rows have; "calls", also what follows from the number of tokens and
// of SMs. Tensors, phases and call slots stay arguments, and Divisors of value 0, which differ between launches.
KernelKey with_known(KernelKey key, const LowLatencyDispatchArgs& args, std::string_view which);
KernelKey with_known(KernelKey key, const LowLatencyCombineArgs& args, std::string_view which);

}  // namespace weft
