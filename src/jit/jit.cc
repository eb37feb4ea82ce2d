// SPDX-License-Identifier: Apache-2.0
#include "jit/jit.h"

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <system_error>
#include <thread>
#include <tuple>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "base/owner_process.h"
#include "jit/compile.h"
#include "jit/host_compile.h"
#include "jit/host_kernels.h"
#include "jit/host_launch.h"
#include "jit/record.h"
#include "jit/source.h"
#include "jit/toolchain.h"
#include "kernels/target/host.h"
#include "transports/transport.h"

namespace weft {

class Kernel {
 public:
  explicit Kernel(KernelKey kernel_key)
      : key(std::move(kernel_key)), row(find_kernel(key.name, key.mesh_type)) {}

  const KernelKey key;
  const KernelRow* const row;      // null for a kernel that only GPUs have, or that is generated
  HostEntry host_entry = nullptr;  // of a kernel that was compiled at run time, on the host
  CUfunction function = nullptr;   // null on the host
  KernelResources resources;
};

namespace {

// A kernel that is being compiled: by whoever asked first; later callers wait for `is_done`.
struct Build {
  explicit Build(const KernelKey& key) : kernel(std::make_unique<Kernel>(key)) {}

  std::unique_ptr<Kernel> kernel;
  std::string cubin;   // CUDA
  std::string target;  // "sm_90a", or "cpu"
  Status status;
  std::promise<void> finished;
  std::shared_future<void> is_done = finished.get_future().share();
  const OwnerProcess owner;  // a fork has the record, but not the thread
};

}  // namespace

struct Jit::Impl {
  explicit Impl(Device for_device) : device(for_device) {}

  // The build for a key, and whether the caller is to run it. Under `mutex`.
  std::pair<std::shared_ptr<Build>, bool> build_of(const KernelKey& key) {
    std::shared_ptr<Build>& known = builds[key];
    const bool is_mine = !known || !known->owner.is_this();
    if (is_mine) known = std::make_shared<Build>(key);
    return {known, is_mine};
  }
  void run(Build& build) const;
  Result<const Kernel*> finish(const KernelKey& key, const std::shared_ptr<Build>& build);

  const Device device;
  std::shared_mutex mutex;
  std::map<KernelKey, std::unique_ptr<Kernel>> kernels;
  std::map<KernelKey, std::shared_ptr<Build>> builds;
};

namespace {

// ---- host ------------------------------------------------------------------------------------------------

Status check_row(const Kernel& kernel) {
  if (!kernel.row)
    return Status::make(
        Code::kUnsupported, "kernel {} has no version for {}{}", kernel.key.name, kernel.key.mesh_type,
        find_kernel(kernel.key.name, "MappedMesh") ? ": it needs peers that are all mapped" : "");
  if (kernel.row->args_type != kernel.key.args_type)
    return Status::invalid("args_type of kernel {}: got {}, allowed: {}", kernel.key.name,
                           kernel.key.args_type, kernel.row->args_type);
  return Status();
}

Status prepare_on_host(Kernel& kernel) {
  const bool is_generated = !kernel.key.prelude.empty();
  if (!is_generated) WEFT_TRY(check_row(kernel));
  if (!is_generated && kernel.row->run) return Status();
  WEFT_TRY_ASSIGN(kernel.host_entry, compile_on_host(kernel.key));
  return Status();
}

// ---- CUDA ------------------------------------------------------------------------------------------------

Result<std::string> architecture_of(int ordinal) {
  WEFT_TRY_ASSIGN(const int major,
                  cuda_device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
  WEFT_TRY_ASSIGN(const int minor,
                  cuda_device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
  if (major < 8)
    return Status::make(Code::kUnsupported, "cuda:{} has compute capability {}.{}; Weft needs 8.0 or newer",
                        ordinal, major, minor);
  return architecture(major, minor);
}

// Lets launches use all the dynamic shared memory that the device has; without this, 48 KiB.
Status allow_all_shared(const CudaDriver& driver, int ordinal, const Kernel& kernel) {
  WEFT_TRY_ASSIGN(const int most,
                  cuda_device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
  const int dynamic = most - kernel.resources.static_shared_bytes;
  return cuda_status(
      driver.cuFuncSetAttribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic),
      "allowing kernel {} {} bytes of shared memory", kernel.key.name, dynamic);
}

Status load_function(const CudaDriver& driver, const std::string& cubin, Kernel& kernel) {
  CUmodule module = nullptr;  // lives as long as the process, like the kernel
  const std::string& name = kernel.key.name;
  WEFT_TRY(cuda_status(driver.cuModuleLoadDataEx(&module, cubin.data(), 0, nullptr, nullptr),
                       "loading kernel {}", name));
  if (kernel.key.sources && kernel.key.sources->on_load) WEFT_TRY(kernel.key.sources->on_load(module));
  WEFT_TRY(cuda_status(driver.cuModuleGetFunction(&kernel.function, module, entry_point(kernel.key).c_str()),
                       "finding kernel {}", name));
  KernelResources& found = kernel.resources;
  driver.cuFuncGetAttribute(&found.registers, CU_FUNC_ATTRIBUTE_NUM_REGS, kernel.function);
  driver.cuFuncGetAttribute(&found.static_shared_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel.function);
  driver.cuFuncGetAttribute(&found.local_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, kernel.function);
  driver.cuFuncGetAttribute(&found.max_threads_per_block, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
                            kernel.function);
  return Status();
}

Status compile_for_cuda(int ordinal, Build& build) {
  WEFT_TRY_ASSIGN(build.target, architecture_of(ordinal));
  const KernelCache cache(config().cache_dir, config().cache_path);
  WEFT_TRY_ASSIGN(Compiled compiled, compile_kernel(build.kernel->key, build.target, &cache));
  build.cubin = std::move(compiled.cubin);
  return Status();
}

Status load_on_cuda(int ordinal, const std::string& cubin, Kernel& kernel) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(const CudaContext current, CudaContext::enter(ordinal));
  const RelaxedCapture relaxed(*driver);  // loading allocates
  WEFT_TRY(load_function(*driver, cubin, kernel));
  return allow_all_shared(*driver, ordinal, kernel);
}

Status launch_on_cuda(int ordinal, const Kernel& kernel, const Launch& launch, const void* args,
                      const void* mesh) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(const CudaContext current, CudaContext::enter(ordinal));
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (launch.cooperative) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[count++].value.cooperative = 1;
  }
  if (launch.blocks_per_cluster > 1) {
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[count++].value.clusterDim = {launch.blocks_per_cluster, 1, 1};
  }
  CUlaunchConfig config{};
  config.gridDimX = launch.blocks;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = launch.threads_per_block;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = launch.shared_bytes;
  config.hStream = static_cast<CUstream>(launch.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  void* parameters[] = {const_cast<void*>(args), const_cast<void*>(mesh)};
  return cuda_status(driver->cuLaunchKernelEx(&config, kernel.function, parameters, nullptr),
                     "launching {} on {} blocks of {} threads with {} bytes of shared memory",
                     kernel.key.name, launch.blocks, launch.threads_per_block, launch.shared_bytes);
}

Status check_launch(const Kernel& kernel, const Launch& launch, size_t args_bytes, size_t mesh_bytes) {
  if (launch.blocks == 0 || launch.threads_per_block == 0)
    return Status::invalid("launch of {}: got {} blocks of {} threads, allowed: at least 1 of each",
                           kernel.key.name, launch.blocks, launch.threads_per_block);
  if (kernel.function && launch.threads_per_block > kernel.key.threads_per_block)
    return Status::invalid(
        "launch of {}: got {} threads per block, allowed: up to the {} that it was compiled for",
        kernel.key.name, launch.threads_per_block, kernel.key.threads_per_block);
  if (kernel.row && (args_bytes != kernel.row->args_bytes || mesh_bytes != kernel.row->mesh_bytes))
    return Status::invalid("launch of {}: got {} bytes of arguments and {} of mesh, allowed: {} and {}",
                           kernel.key.name, args_bytes, mesh_bytes, kernel.row->args_bytes,
                           kernel.row->mesh_bytes);
  return Status();
}

// ---- kernels that are compiled ahead ---------------------------------------------------------------------

// The threads of prepare(). Python ends them before it ends the process; other programs, static destruction.
class Preparers {
 public:
  static Preparers& of_process() {
    // What the threads use is made before, so that it goes after.
    static_cast<void>(Nvrtc::open());
    static Preparers once;
    return once;
  }
  ~Preparers() { finish(); }

  void start(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    threads_.emplace_back(OwnerProcess(), std::thread(std::move(work)));
  }

  void finish() {
    std::vector<std::pair<OwnerProcess, std::thread>> threads;
    {
      std::lock_guard lock(mutex_);
      threads.swap(threads_);
    }
    // After a fork the threads are the parent's.
    for (auto& [owner, thread] : threads) owner.is_this() ? thread.join() : thread.detach();
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<OwnerProcess, std::thread>> threads_;
};

std::atomic<bool> has_preparers{false};

}  // namespace

void Jit::Impl::run(Build& build) const {
  if (device.is_host()) {
    build.target = "cpu";
    build.status = prepare_on_host(*build.kernel);
  } else {
    build.status = compile_for_cuda(device.ordinal, build);
  }
  build.finished.set_value();
}

Result<const Kernel*> Jit::Impl::finish(const KernelKey& key, const std::shared_ptr<Build>& build) {
  std::unique_lock lock(mutex);
  if (auto known = kernels.find(key); known != kernels.end()) return known->second.get();
  if (auto known = builds.find(key); known != builds.end() && known->second == build) builds.erase(known);
  WEFT_TRY(build->status);
  if (!device.is_host()) WEFT_TRY(load_on_cuda(device.ordinal, build->cubin, *build->kernel));
  record_kernel(key, build->target);
  return (kernels[key] = std::move(build->kernel)).get();
}

Jit& Jit::of(Device device) {
  static std::mutex mutex;
  // By whether kernels trace, and what, since that is compiled into them. Never freed, like its kernels.
  static auto* jits = new std::map<std::pair<Device, Traced>, Jit>;
  const std::pair key(device, what_is_traced());
  std::lock_guard lock(mutex);
  if (auto known = jits->find(key); known != jits->end()) return known->second;
  return jits->emplace(key, Jit(new Impl(device))).first->second;
}

Result<const Kernel*> Jit::get(const KernelKey& key) {
  {
    std::shared_lock lock(impl_->mutex);
    if (auto known = impl_->kernels.find(key); known != impl_->kernels.end()) return known->second.get();
  }
  std::shared_ptr<Build> build;
  bool is_mine = false;
  {
    std::unique_lock lock(impl_->mutex);
    if (auto known = impl_->kernels.find(key); known != impl_->kernels.end()) return known->second.get();
    std::tie(build, is_mine) = impl_->build_of(key);
  }
  if (is_mine) impl_->run(*build);
  build->is_done.wait();
  return impl_->finish(key, build);
}

void Jit::prepare(const std::vector<KernelKey>& keys) {
  for (const KernelKey& key : keys) {
    if (impl_->device.is_host() && key.prelude.empty()) continue;
    std::shared_ptr<Build> build;
    {
      std::unique_lock lock(impl_->mutex);
      if (impl_->kernels.contains(key) || impl_->builds.contains(key)) continue;
      build = impl_->build_of(key).first;
    }
    has_preparers = true;
    try {
      Preparers::of_process().start([impl = impl_, build] { impl->run(*build); });
    } catch (const std::system_error&) {  // no thread to be had: whoever asks for it compiles it
      std::unique_lock lock(impl_->mutex);
      impl_->builds.erase(key);
      build->status = Status::make(Code::kSystem, "no thread for the compiler");
      build->finished.set_value();
    }
  }
}

void Jit::finish_preparing() {
  if (has_preparers) Preparers::of_process().finish();
}

Status Jit::launch(const Kernel& kernel, const Launch& launch, const void* args, size_t args_bytes,
                   const void* mesh, size_t mesh_bytes, const void* shape_on_host) {
  WEFT_TRY(check_launch(kernel, launch, args_bytes, mesh_bytes));
  if (impl_->device.kind == Device::Kind::kCuda)
    return launch_on_cuda(impl_->device.ordinal, kernel, launch, args, mesh);
  const HostGrid grid{launch.blocks, launch.threads_per_block, launch.shared_bytes};
  if (kernel.host_entry)
    return run_on_host(grid, [&] { kernel.host_entry(args, mesh, shape_on_host, &host_thread); });
  return run_on_host(grid, [&] { kernel.row->run(args, mesh, shape_on_host); });
}

KernelResources Jit::resources(const Kernel& kernel) {
  return kernel.resources;
}

}  // namespace weft
