// SPDX-License-Identifier: Apache-2.0
#include "jit/mesh_launch.h"

#include <algorithm>
#include <thread>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "kernels/target/host.h"

namespace weft {
namespace {

constexpr int kLastRounds = 8;

// The threads of a host launch inside of this help the link while they wait; at the end, what the launch asked
// for last is sent.
class Helping {
 public:
  explicit Helping(Link* ports) : ports_(ports), outer_(host_thread.help) {
    if (ports) host_thread.help = {&help_or_rest, ports};
  }
  ~Helping() {
    host_thread.help = outer_;
    for (int i = 0; ports_ && i < kLastRounds && ports_->help(); ++i) continue;
  }
  Helping(const Helping&) = delete;

 private:
  static bool help_or_rest(void* link) {
    Link& ports = *static_cast<Link*>(link);
    return ports.help() || ports.rest();
  }

  Link* const ports_;
  const HostHelp outer_;
};

}  // namespace

Result<ComputeLimits> compute_limits(const Communicator& comm) {
  if (comm.device().is_host()) {
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    const auto wanted = static_cast<uint32_t>(config().host_threads);
    return ComputeLimits{false, 1, wanted ? wanted : std::max(1u, cores / static_cast<unsigned>(comm.size())),
                         0};
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  int sms = 0;
  int shared_bytes = 0;
  WEFT_TRY(cuda_status(
      driver->cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, comm.device().ordinal),
      "read the number of SMs"));
  WEFT_TRY(cuda_status(
      driver->cuDeviceGetAttribute(&shared_bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                                   comm.device().ordinal),
      "read the shared memory per block"));
  int has_clusters = 0;
  WEFT_TRY(cuda_status(
      driver->cuDeviceGetAttribute(&has_clusters, CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, comm.device().ordinal),
      "read whether blocks can be launched in clusters"));
  return ComputeLimits{true, static_cast<uint32_t>(sms), 1, static_cast<uint32_t>(shared_bytes),
                       has_clusters != 0};
}

Status launch_on_mesh(const Window& window, KernelKey key, const Launch& how, const void* args,
                      size_t args_bytes, const void* shape_on_host) {
  WEFT_TRY_ASSIGN(const Kernel* kernel, kernel_on_mesh(window, std::move(key), how));
  return launch_on_mesh(window, *kernel, how, args, args_bytes, shape_on_host);
}

Result<const Kernel*> kernel_on_mesh(const Window& window, KernelKey key, const Launch& how) {
  key.mesh_type = window.mesh().type;
  key.sources = window.mesh().sources;
  key.threads_per_block = how.threads_per_block;
  return Jit::of(window.communicator()->device()).get(key);
}

void prepare_on_mesh(const Window& window, std::vector<KernelKey> keys) {
  for (KernelKey& key : keys) {
    key.mesh_type = window.mesh().type;
    key.sources = window.mesh().sources;
  }
  Jit::of(window.communicator()->device()).prepare(keys);
}

Status launch_on_mesh(const Window& window, const Kernel& kernel, const Launch& how, const void* args,
                      size_t args_bytes, const void* shape_on_host, Losses losses) {
  Communicator& comm = *window.communicator();
  Link* ports = comm.port_link();
  const auto status = [&] {
    return !ports ? Status() : losses == Losses::kAreErrors ? comm.port_status() : ports->fault();
  };
  WEFT_TRY(status());
  window.used();
  const Helping helping(window.communicator()->device().is_host() ? ports : nullptr);
  const MeshPart& mesh = window.mesh();
  WEFT_TRY(Jit::of(window.communicator()->device())
               .launch(kernel, how, args, args_bytes, mesh.value.data(), mesh.value.size(), shape_on_host));
  return status();
}

}  // namespace weft
