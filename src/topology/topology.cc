// SPDX-License-Identifier: Apache-2.0
#include "topology/topology.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>

#include "base/cuda_driver.h"
#include "base/random.h"

namespace weft {

std::string host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) {
    char name[65] = {};
    gethostname(name, sizeof name - 1);
    boot = name;
  }
  struct stat net{};
  const bool has_namespace = stat("/proc/self/ns/net", &net) == 0;
  return text("{}/{}", boot, has_namespace ? net.st_ino : 0);
}

int current_numa_node() {
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : -1;
}

namespace {

Status add_gpu_facts(RankFacts& facts) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  const int ordinal = facts.device.ordinal;
  if (ordinal >= driver->device_count)
    return Status::make(Code::kUnsupported, "device: got {}, allowed: cuda:0 to cuda:{}", facts.device,
                        driver->device_count - 1);
  CUdevice gpu = 0;
  char address[32] = {};
  int can_share = 0;
  WEFT_TRY(cuda_status(driver->cuDeviceGet(&gpu, ordinal), "find device cuda:{}", ordinal));
  WEFT_TRY(cuda_status(driver->cuDeviceGetPCIBusId(address, sizeof address, gpu), "read the PCI address of cuda:{}", ordinal));
  WEFT_TRY(cuda_status(driver->cuDeviceGetAttribute(
                           &can_share, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, gpu),
                       "ask whether cuda:{} shares memory by file descriptors", ordinal));
  facts.gpu = address;
  facts.can_share_vmm = can_share != 0;
  return Status();
}

}  // namespace

Result<RankFacts> rank_facts(int rank, Device device) {
  RankFacts facts;
  facts.rank = rank;
  facts.host = host_id();
  facts.process = process_key();
  facts.device = device;
  if (device.is_host()) return facts;
  WEFT_TRY(add_gpu_facts(facts));
  return facts;
}

}  // namespace weft
