// SPDX-License-Identifier: Apache-2.0
#include "topology/nvml.h"

#include <dlfcn.h>

#include "base/log.h"

namespace weft {
namespace {

// The few declarations of nvml.h that are needed here.
using nvmlDevice_t = struct nvmlDevice_st*;
constexpr int NVML_SUCCESS = 0;
constexpr int NVML_FEATURE_ENABLED = 1;
constexpr int NVML_P2P_CAPS_INDEX_NVLINK = 2;
constexpr int NVML_P2P_STATUS_OK = 0;
constexpr unsigned kMostLinks = 18;  // NVML_NVLINK_MAX_LINKS

struct Nvml {
  int (*nvmlInit_v2)() = nullptr;
  int (*nvmlDeviceGetHandleByPciBusId_v2)(const char*, nvmlDevice_t*) = nullptr;
  int (*nvmlDeviceGetNvLinkState)(nvmlDevice_t, unsigned, int*) = nullptr;
  int (*nvmlDeviceGetP2PStatus)(nvmlDevice_t, nvmlDevice_t, int, int*) = nullptr;
};

template <class Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

const Nvml* open_nvml() {
  static Nvml nvml;
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  const bool is_complete =
      library && load(library, "nvmlInit_v2", nvml.nvmlInit_v2) &&
      load(library, "nvmlDeviceGetHandleByPciBusId_v2", nvml.nvmlDeviceGetHandleByPciBusId_v2) &&
      load(library, "nvmlDeviceGetNvLinkState", nvml.nvmlDeviceGetNvLinkState) &&
      load(library, "nvmlDeviceGetP2PStatus", nvml.nvmlDeviceGetP2PStatus);
  if (is_complete && nvml.nvmlInit_v2() == NVML_SUCCESS) return &nvml;
  log_info("NVML is not usable here: NVLinks are not counted");
  return nullptr;
}

const Nvml* nvml() {
  static const Nvml* once = open_nvml();
  return once;
}

nvmlDevice_t find_device(const std::string& pci_address) {
  nvmlDevice_t device = nullptr;
  if (!nvml() || nvml()->nvmlDeviceGetHandleByPciBusId_v2(pci_address.c_str(), &device) != NVML_SUCCESS)
    return nullptr;
  return device;
}

}  // namespace

int active_nvlinks(const std::string& pci_address) {
  nvmlDevice_t device = find_device(pci_address);
  if (!device) return -1;
  int count = 0;
  for (unsigned link = 0; link < kMostLinks; ++link) {
    int state = 0;
    if (nvml()->nvmlDeviceGetNvLinkState(device, link, &state) == NVML_SUCCESS &&
        state == NVML_FEATURE_ENABLED)
      ++count;
  }
  return count;
}

bool is_nvlink_pair(const std::string& pci_address, const std::string& other_pci_address) {
  nvmlDevice_t device = find_device(pci_address), other = find_device(other_pci_address);
  int status = -1;
  return device && other &&
         nvml()->nvmlDeviceGetP2PStatus(device, other, NVML_P2P_CAPS_INDEX_NVLINK, &status) == NVML_SUCCESS &&
         status == NVML_P2P_STATUS_OK;
}

}  // namespace weft
