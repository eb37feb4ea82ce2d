// SPDX-License-Identifier: Apache-2.0
//
// From a kernel's key to machine code for a GPU architecture. Needs NVRTC but no GPU and no driver.
//   WEFT_TRY_ASSIGN(Compiled compiled, compile_kernel(key, "sm_90a", KernelCache(config().cache_dir)));
// Threads: any.
#pragma once

#include <string>

#include "base/status.h"
#include "jit/cache.h"
#include "jit/jit.h"

namespace weft {

struct Compiled {
  std::string cubin;
  std::string log;     // the compiler's; empty when the cubin came from the cache
  std::string source;  // the generated file
  // File name in the cache: the kernel's name, a digest of what Weft brings, and one of the compiler and
  // CUDA's headers.
  std::string cache_name;
  bool is_cached = false;
};

// The architecture for a device: "sm_80", "sm_90a", "sm_100a"; from Hopper on with the features of exactly
// that one.
std::string architecture(int major, int minor);

// Loads from the cache, or compiles and stores. `cache` may be null: always compile, keep nothing. Where
// there is no NVRTC, or the option compile is "never", a kernel that another release of NVRTC made from the
// same source is taken.
// Errors: kUnsupported where that is not there either; kSystem with the log where the source does not compile.
Result<Compiled> compile_kernel(const KernelKey& key, const std::string& architecture,
                                const KernelCache* cache);

}  // namespace weft
