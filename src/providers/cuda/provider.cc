// SPDX-License-Identifier: Apache-2.0
//
// Which GPUs there are, and why some are of no use.
#include "providers/cuda/cuda.h"

#include <cstdio>
#include <fstream>

#include "base/cuda_driver.h"
#include "base/same_host.h"
#include "providers/cuda/rail.h"

namespace weft::provider {
namespace {

constexpr char kHostOnly[] = "cuda:host";

Caps caps_of_rails() {
  Caps caps;
  caps.device_memory = true;
  caps.same_host = true;
  caps.copy_engines = true;
  caps.source = Source::kRoute;  // a lane is of the process that holds it
  caps.message_bytes_max = cuda::kMessageBytes;
  caps.tx_depth = cuda::kRequests;
  return caps;
}

int numa_node_of(const std::string& pci) {
  int node = -1;
  std::ifstream("/sys/bus/pci/devices/" + pci + "/numa_node") >> node;
  return node;
}

std::string why_unusable(int ordinal) {
  const Result<int> has_words =
      cuda_device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
  if (!has_words.ok()) return has_words.status().message();
  return *has_words ? "" : "this GPU or its driver stores no words behind copies (stream memory operations)";
}

class Cuda : public Provider {
 public:
  explicit Cuda(CudaOptions options) : options_(options) {}
  std::string name() const override { return "cuda"; }

  std::vector<Nic> probe() override {
    if (options_.host_only) return {nic(kHostOnly)};
    const Result<const CudaDriver*> driver = cuda_driver();
    if (!driver.ok()) {
      Nic none = nic("-");
      none.unusable_because = driver.status().message();
      return {none};
    }
    std::vector<Nic> nics;
    for (int ordinal = 0; ordinal < (*driver)->device_count; ++ordinal)
      nics.push_back(look_at(**driver, ordinal));
    return nics;
  }

  Result<std::unique_ptr<Rail>> open(const Nic& wanted, const RailOptions&) override {
    int ordinal = -1;
    const bool is_host_only = options_.host_only && wanted.name == kHostOnly;
    if (!is_host_only && std::sscanf(wanted.name.c_str(), "cuda:%d", &ordinal) != 1)
      return Status::invalid("nic: got {}, which the provider cuda does not have", wanted.name);
    if (!is_host_only)
      if (const std::string why = why_unusable(ordinal); !why.empty()) return Status(Code::kUnsupported, why);
    auto rail = std::make_unique<cuda::CudaRail>(wanted, ordinal);
    WEFT_TRY(rail->open());
    return std::unique_ptr<Rail>(std::move(rail));
  }

 private:
  static Nic nic(const std::string& name) {
    Nic made;
    made.provider = "cuda";
    made.name = name;
    made.caps = caps_of_rails();
    return made;
  }

  static Nic look_at(const CudaDriver& driver, int ordinal) {
    Nic found = nic(text("cuda:{}", ordinal));
    char pci[16] = {};
    CUdevice device = 0;
    if (driver.cuDeviceGet(&device, ordinal) == CUDA_SUCCESS &&
        driver.cuDeviceGetPCIBusId(pci, sizeof pci, device) == CUDA_SUCCESS) {
      found.pci = pci;
      for (char& letter : found.pci) letter = static_cast<char>(std::tolower(letter));
      found.numa_node = numa_node_of(found.pci);
    }
    found.unusable_because = why_unusable(ordinal);
    return found;
  }

  const CudaOptions options_;
};

}  // namespace

std::shared_ptr<Provider> make_cuda(CudaOptions options) {
  return std::make_shared<Cuda>(options);
}

}  // namespace weft::provider
