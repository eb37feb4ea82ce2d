// SPDX-License-Identifier: Apache-2.0
//
// Compiles a generated kernel for the host with the machine's C++ compiler, and loads it.
//   WEFT_TRY_ASSIGN(HostEntry run, compile_on_host(key));
//   run(args, mesh, &host_thread);
// The shared object is kept in the cache folder under a digest of everything that it depends on. Threads:
// any.
#pragma once

#include "base/status.h"
#include "jit/cache.h"
#include "jit/jit.h"
#include "kernels/target/host.h"

namespace weft {

// One host warp. `place` is where the calling thread stands: the object has a host_thread of its own.
using HostEntry = void (*)(const void* args, const void* mesh, const HostThread* place);

// Errors: kUnsupported where there is no compiler or its output cannot be loaded; kSystem with the compiler's
// words where the source does not compile.
Result<HostEntry> compile_on_host(const KernelKey& key);

// Compiles a generated kernel into the first folder of `cache`, unless it is in one; true if it had to.
// Errors: those of compile_on_host(), and kCapacity where the folder cannot be written.
Result<bool> compile_to_cache(const KernelKey& key, const KernelCache& cache);

}  // namespace weft
