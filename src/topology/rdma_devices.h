// SPDX-License-Identifier: Apache-2.0
//
// What the system says of an RDMA device, and how near a device is to another one on PCIe.
//   const RdmaDevice device = rdma_device("mlx5_0", 1);
//   if (nearness(device.place(), gpu_place) == Nearness::kSameSwitch) ...
// Threads: any.
#pragma once

#include <string>

namespace weft {

// Where a device sits: empty and -1 where the system does not say.
struct DevicePlace {
  std::string pci;  // 0000:17:00.0
  int numa_node = -1;
};

struct RdmaDevice {
  DevicePlace place;
  double gbit_per_s = 0;  // of the port; 0: unknown
};

// `sysfs` is another folder in tests. A device in software sits where the network interface below it does.
RdmaDevice rdma_device(const std::string& name, int port, const std::string& sysfs = "/sys");

// The kernel's driver of an RDMA device, such as "mlx5_core"; empty for one in software, and where the system does not say.
std::string kernel_driver(const std::string& name, const std::string& sysfs = "/sys");

// Below one bridge, that of the processor not counted; at the same processor; neither, or unknown.
enum class Nearness { kSameSwitch, kSameNode, kFar };
Nearness nearness(const DevicePlace& a, const DevicePlace& b, const std::string& sysfs = "/sys");

}  // namespace weft
