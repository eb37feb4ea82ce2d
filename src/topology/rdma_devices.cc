// SPDX-License-Identifier: Apache-2.0
#include "topology/rdma_devices.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "base/status.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// "0000:17:00.0"
bool is_pci_address(const std::string& name) {
  return name.size() == 12 && name[4] == ':' && name[7] == ':' && name[10] == '.';
}

std::string first_line(const fs::path& file) {
  std::string line;
  std::getline(std::ifstream(file), line);
  return line;
}

// The folders of a device from the top of the machine down, as sysfs nests them.
std::vector<std::string> steps_to(const fs::path& device) {
  std::error_code error;
  const fs::path path = fs::canonical(device, error);
  std::vector<std::string> steps;
  for (const fs::path& step : path) steps.push_back(step.string());
  return steps;
}

DevicePlace place_of(const fs::path& device) {
  DevicePlace place;
  fs::path at = "/";
  for (const std::string& step : steps_to(device)) {
    at /= step;
    if (!is_pci_address(step)) continue;
    place.pci = step;  // the last one: the device, not a bridge above it
    place.numa_node = -1;
    std::ifstream(at / "numa_node") >> place.numa_node;
  }
  return place;
}

}  // namespace

RdmaDevice rdma_device(const std::string& name, int port, const std::string& sysfs) {
  const fs::path folder = fs::path(sysfs) / "class" / "infiniband" / name;
  const fs::path ports = folder / "ports" / text("{}", port);
  RdmaDevice device;
  device.place = place_of(folder / "device");
  const std::string interface = first_line(ports / "gid_attrs" / "ndevs" / "0");
  if (device.place.pci.empty() && !interface.empty())
    device.place = place_of(fs::path(sysfs) / "class" / "net" / interface / "device");
  std::ifstream(ports / "rate") >> device.gbit_per_s;  // "400 Gb/sec (4X NDR)"
  return device;
}

std::string kernel_driver(const std::string& name, const std::string& sysfs) {
  std::error_code error;
  const fs::path link = fs::path(sysfs) / "class" / "infiniband" / name / "device" / "driver";
  return fs::read_symlink(link, error).filename().string();
}

Nearness nearness(const DevicePlace& a, const DevicePlace& b, const std::string& sysfs) {
  if (a.pci.empty() || b.pci.empty()) return Nearness::kFar;
  const fs::path devices = fs::path(sysfs) / "bus" / "pci" / "devices";
  const std::vector<std::string> to_a = steps_to(devices / a.pci), to_b = steps_to(devices / b.pci);
  const auto end = std::mismatch(to_a.begin(), to_a.end(), to_b.begin(), to_b.end()).first;
  // A port of the processor is the first address below its root ("pci0000:16"); one in common is a switch below it.
  if (std::any_of(to_a.begin(), end, is_pci_address)) return Nearness::kSameSwitch;
  return a.numa_node >= 0 && a.numa_node == b.numa_node ? Nearness::kSameNode : Nearness::kFar;
}

}  // namespace weft
