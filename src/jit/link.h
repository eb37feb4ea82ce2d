// SPDX-License-Identifier: Apache-2.0
//
// Links a kernel with device code of a library: DeviceSources::unit and archive.
//   WEFT_TRY_ASSIGN(cubin, link_kernel(cubin, *key.sources, "sm_90a", *nvrtc, tools, cache));
// Threads: any.
#pragma once

#include <string>

#include "base/status.h"
#include "jit/cache.h"
#include "jit/toolchain.h"

namespace weft {

struct DeviceSources;

// `kernel` is relocatable. The unit is compiled once per process, or comes from the cache, which may be null.
// Errors: kUnsupported where there is no linker; kSystem with the compiler's or the linker's log.
Result<std::string> link_kernel(const std::string& kernel, const DeviceSources& sources,
                                const std::string& architecture, const Nvrtc& nvrtc, const Toolchain& tools,
                                const KernelCache* cache);

}  // namespace weft
