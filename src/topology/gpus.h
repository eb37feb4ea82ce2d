// SPDX-License-Identifier: Apache-2.0
//
// The GPUs that this process can see, and what joins two of them.
//   WEFT_TRY_ASSIGN(std::vector<GpuFacts> all, gpus());
//   WEFT_TRY_ASSIGN(GpuLink link, gpu_link(all[0], all[1]));
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace weft {

struct GpuFacts {
  int ordinal = 0;          // CUDA's number within this process
  std::string name;         // "NVIDIA H200"
  std::string pci_address;  // as sysfs spells it: 0000:1b:00.0
  uint64_t bytes = 0;
  int sms = 0;
  int compute_major = 0, compute_minor = 0;
  int numa_node = -1;             // of the CPUs nearest to it; -1 where the system does not say
  int nvlinks = -1;               // that are up; -1 where it is unknown
  bool can_share_vmm = false;     // memory as a file descriptor (cuMemExportToShareableHandle)
  bool can_share_fabric = false;  // memory as a fabric handle, for GPUs of other hosts in one NVLink domain
  bool can_rdma = false;          // NICs may read and write such memory
  bool exports_dmabuf = false;    // ... through a DMA-BUF that the driver makes of it
  int nic_write_order = 0;  // who sees a NIC's writes in their order: 0 nobody, 100 this GPU, 200 all GPUs
};

struct GpuLink {
  bool can_access = false;   // loads and stores
  bool has_atomics = false;  // ... and atomics, natively
  bool is_nvlink = false;    // as far as NVML says; else PCIe
};

// Errors: kUnsupported, with the reason, where there is no driver or device.
Result<std::vector<GpuFacts>> gpus();
// Errors: kInvalid when there is no such device, saying how many there are; kUnsupported as gpus().
Result<GpuFacts> gpu_facts(int ordinal);
// How `from` reaches `to`'s memory. Errors: kSystem.
Result<GpuLink> gpu_link(const GpuFacts& from, const GpuFacts& to);

}  // namespace weft
