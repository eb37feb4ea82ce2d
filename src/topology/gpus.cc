// SPDX-License-Identifier: Apache-2.0
#include "topology/gpus.h"

#include <algorithm>
#include <cctype>
#include <fstream>

#include "base/cuda_driver.h"
#include "topology/nvml.h"

namespace weft {
namespace {

int numa_node_of(const std::string& pci_address) {
  int node = -1;
  std::ifstream("/sys/bus/pci/devices/" + pci_address + "/numa_node") >> node;
  return node;
}

Result<GpuFacts> ask(const CudaDriver& driver, int ordinal) {
  GpuFacts facts;
  facts.ordinal = ordinal;
  CUdevice device = 0;
  WEFT_TRY(cuda_status(driver.cuDeviceGet(&device, ordinal), "find cuda:{}", ordinal));
  char name[128] = {};
  WEFT_TRY(cuda_status(driver.cuDeviceGetName(name, sizeof name - 1, device), "ask cuda:{} for its name",
                       ordinal));
  facts.name = name;
  char address[32] = {};
  WEFT_TRY(cuda_status(driver.cuDeviceGetPCIBusId(address, sizeof address - 1, device),
                       "ask cuda:{} for its PCI address", ordinal));
  facts.pci_address = address;
  std::transform(facts.pci_address.begin(), facts.pci_address.end(), facts.pci_address.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  size_t bytes = 0;
  WEFT_TRY(cuda_status(driver.cuDeviceTotalMem(&bytes, device), "ask cuda:{} for its memory", ordinal));
  facts.bytes = bytes;
  const auto attribute = [&](int which) {
    int value = 0;
    return driver.cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value
                                                                              : 0;  // older drivers lack some
  };
  facts.sms = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  facts.compute_major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  facts.compute_minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  facts.can_share_vmm = attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0 &&
                        attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  facts.can_share_fabric = attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) != 0;
  facts.can_rdma = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  facts.exports_dmabuf = attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) != 0;
  facts.nic_write_order = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
  facts.numa_node = numa_node_of(facts.pci_address);
  facts.nvlinks = active_nvlinks(facts.pci_address);
  return facts;
}

}  // namespace

Result<GpuFacts> gpu_facts(int ordinal) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  if (ordinal < 0 || ordinal >= driver->device_count)
    return Status::invalid("device: got cuda:{}, allowed: cuda:0 to cuda:{}", ordinal,
                           driver->device_count - 1);
  return ask(*driver, ordinal);
}

Result<std::vector<GpuFacts>> gpus() {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  std::vector<GpuFacts> all;
  for (int ordinal = 0; ordinal < driver->device_count; ++ordinal) {
    WEFT_TRY_ASSIGN(GpuFacts facts, ask(*driver, ordinal));
    all.push_back(std::move(facts));
  }
  return all;
}

Result<GpuLink> gpu_link(const GpuFacts& from, const GpuFacts& to) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  GpuLink link;
  if (from.pci_address == to.pci_address) return GpuLink{true, true, false};
  CUdevice source = 0, target = 0;
  WEFT_TRY(cuda_status(driver->cuDeviceGet(&source, from.ordinal), "find cuda:{}", from.ordinal));
  WEFT_TRY(cuda_status(driver->cuDeviceGet(&target, to.ordinal), "find cuda:{}", to.ordinal));
  int can_access = 0, has_atomics = 0;
  WEFT_TRY(cuda_status(driver->cuDeviceCanAccessPeer(&can_access, source, target),
                       "ask cuda:{} for access to cuda:{}", from.ordinal, to.ordinal));
  WEFT_TRY(cuda_status(driver->cuDeviceGetP2PAttribute(
                           &has_atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, source, target),
                       "ask cuda:{} for atomics at cuda:{}", from.ordinal, to.ordinal));
  link.can_access = can_access != 0;
  link.has_atomics = has_atomics != 0;
  link.is_nvlink = is_nvlink_pair(from.pci_address, to.pci_address);
  return link;
}

}  // namespace weft
