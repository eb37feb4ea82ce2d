// SPDX-License-Identifier: Apache-2.0
//
// Compiles a kernel for the host with the machine's C++ compiler, and loads it: generated ones and, in builds for
// development (the CMake option WEFT_HOST_KERNELS is OFF), all others.
//   WEFT_TRY_ASSIGN(HostEntry run, compile_on_host(key));
//   run(args, mesh, shape, &host_thread);
// The shared object is cached under a digest of everything that it depends on: generated kernels in the cache folder,
// others in the build's. Processes that want the same kernel wait for the one that compiles it. Threads: any.
#pragma once

#include "base/status.h"
#include "jit/cache.h"
#include "jit/jit.h"
#include "kernels/target/host.h"

namespace weft {

// One host warp. shape: run-time fields, which a generated kernel doesn't read. place: where the calling thread stands, as
// the object has a host_thread of its own.
using HostEntry = void (*)(const void* args, const void* mesh, const void* shape, const HostThread* place);

// Errors: kUnsupported where there is no compiler or its output cannot be loaded; kSystem with the compiler's
// words where the source does not compile.
Result<HostEntry> compile_on_host(const KernelKey& key);

// Compiles a generated kernel into the first folder of `cache`, unless it is in one; true if it had to.
// Errors: those of compile_on_host(), and kCapacity where the folder cannot be written.
Result<bool> compile_to_cache(const KernelKey& key, const KernelCache& cache);

}  // namespace weft
