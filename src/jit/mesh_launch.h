// SPDX-License-Identifier: Apache-2.0
//
// How kernels run on the ranks of a window: the window knows their mesh.
//   KernelKey key{.file = "kernels/moe/ring.cuh", .name = "ring_send", .args_type = "RingArgs"};
//   WEFT_TRY(launch_on_mesh(window, std::move(key), how, &args, sizeof(args), &shape));
// Threads: any. Lifetime: on CUDA the window outlives the kernel.
#pragma once

#include "comm/window.h"
#include "jit/jit.h"
#include "topology/compute_limits.h"

namespace weft {

// How a launch treats a lost port peer.
enum class Losses { kAreErrors, kAreNoErrors };

// Of a communicator's own device. On the host WEFT_HOST_THREADS, or the rank's share of the cores.
// Errors: kSystem from the driver.
Result<ComputeLimits> compute_limits(const Communicator& comm);

// Jit::get and Jit::launch on the window's device with the window's mesh; fills in the key's mesh and
// threads. Errors: theirs; kUnsupported for a kernel that needs mapped peers, on a window that has others.
Status launch_on_mesh(const Window& window, KernelKey key, const Launch& how, const void* args,
                      size_t args_bytes, const void* shape_on_host);

// The two halves of that, for callers who keep the kernel, which lives as long as the process.
Result<const Kernel*> kernel_on_mesh(const Window& window, KernelKey key, const Launch& how);
Status launch_on_mesh(const Window& window, const Kernel& kernel, const Launch& how, const void* args,
                      size_t args_bytes, const void* shape_on_host, Losses losses = Losses::kAreErrors);

// Jit::prepare for kernels that will run on the window's mesh; their keys have their threads.
void prepare_on_mesh(const Window& window, std::vector<KernelKey> keys);

}  // namespace weft
