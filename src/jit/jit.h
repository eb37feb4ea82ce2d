// SPDX-License-Identifier: Apache-2.0
//
// Jit turns the name of a kernel and its constants into something that can be launched on a device.
//   WEFT_TRY_ASSIGN(const Kernel* kernel, Jit::of(device).get(key));   // compiled at most once per process
//   const Launch how{.blocks = 16, .threads_per_block = 512, .stream = stream};
//   WEFT_TRY(Jit::of(device).launch(*kernel, how, args, mesh, shape));
// CUDA: about ten generated lines around the kernel's source are compiled by NVRTC for the device's
// architecture, kept on disk (cache.h) and loaded with the driver. Host: the kernel was compiled with Weft
// (host_kernels.h), or is compiled at run time (host_compile.h); a launch runs its warps as threads
// (host_launch.h) and returns when all have finished. Threads: any. Kernels live as long as the process.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/device.h"
#include "base/status.h"

namespace weft {

struct DeviceSources;

// Everything in which compiled kernels differ.
struct KernelKey {
  std::string file;       // "kernels/moe/dispatch.cuh"
  std::string name;       // "dispatch_rows": template <class Mesh, class Shape>
                          //   WEFT_KERNEL void dispatch_rows(const DispatchArgs&, const Mesh&, const Shape&)
  std::string args_type;  // "DispatchArgs"; all names are inside namespace weft
  std::string mesh_type = {};  // "MappedMesh", or "NoMesh"; its headers: mesh_headers()
  // Compile-time constants on GPUs: struct Shape { static constexpr int64_t row_bytes = 14336; ... }.
  // Ignored on the host, where launch() gets the Shape as a struct of run-time fields.
  std::vector<std::pair<std::string, int64_t>> shape = {};
  uint32_t threads_per_block = 0;  // the most that a launch uses; ignored on the host
  uint32_t blocks_per_sm = 1;      // how many must fit on one SM: the second number of __launch_bounds__
  // Generated source that follows the includes and defines the function. On the host such a kernel is
  // compiled when it is first asked for, which needs a C++ compiler (`c++`) there; else kUnsupported.
  std::string prelude = {};
  // The sources that the mesh adds to Weft's headers; one object for a process, so that equal ones are the same. Null:
  // none.
  std::shared_ptr<const DeviceSources> sources = {};

  auto operator<=>(const KernelKey&) const = default;
};

struct Launch {
  uint32_t blocks = 1;
  uint32_t threads_per_block = 1;   // on the host: warps per block, each one thread
  uint32_t shared_bytes = 0;        // dynamic shared memory of each block
  void* stream = nullptr;           // CUstream; ignored on the host
  bool cooperative = false;         // all blocks run at once or the launch fails; on the host they always do
  uint32_t blocks_per_cluster = 1;  // divides blocks; 1 where the device has no clusters; ignored on the host
};

// What the compiler used, for `weft info`, tests and the planner. All zero on the host.
struct KernelResources {
  int registers = 0;            // per thread
  int static_shared_bytes = 0;  // per block
  int local_bytes = 0;          // per thread: stack and spills
  int max_threads_per_block = 0;
};

class Kernel;  // a CUfunction, or a host function

class Jit {
 public:
  // The compiler of a device; made at first use. Errors show at get().
  static Jit& of(Device device);

  // The kernel for a key. Compiles, or loads from the disk cache, at the first call for a key; later calls
  // look it up (under 1 us). Calls for one key share one compilation. Errors: kUnsupported where the
  // device, NVRTC or the host version of the kernel is missing, kSystem with the compiler's log where the
  // source does not compile.
  Result<const Kernel*> get(const KernelKey& key);

  // Starts to compile kernels that get() will soon be asked for, each on a thread of its own; returns at once.
  // Errors show at get(). Does nothing for kernels that came with Weft.
  void prepare(const std::vector<KernelKey>& keys);

  // Returns when no thread of prepare() runs any more: before the process ends.
  static void finish_preparing();

  // Runs a kernel. args, mesh: the structs that key.args_type and key.mesh_type name, copied before launch()
  // returns. shape_on_host: the Shape struct, read on the host only; may be null on CUDA. CUDA: enqueues on
  // the stream and returns. Host: returns when every thread has finished; concurrent launches (ranks as
  // threads) run at the same time, each on its own threads. Errors: kInvalid on sizes that do not match the
  // kernel's structs or an empty grid; kSystem from the driver or when no thread can be made. Nothing ran
  // then.
  Status launch(const Kernel& kernel, const Launch& launch, const void* args, size_t args_bytes,
                const void* mesh, size_t mesh_bytes, const void* shape_on_host);

  // The same for structs that are at hand.
  template <class Args, class Mesh, class Shape>
  Status launch(const Kernel& kernel, const Launch& how, const Args& args, const Mesh& mesh,
                const Shape& shape) {
    return launch(kernel, how, &args, sizeof(args), &mesh, sizeof(mesh), &shape);
  }

  static KernelResources resources(const Kernel& kernel);

 private:
  struct Impl;
  explicit Jit(Impl* impl) : impl_(impl) {}
  Impl* impl_;  // never freed: streams may outlive static destruction
};

}  // namespace weft
