// SPDX-License-Identifier: Apache-2.0
#include "topology/topology.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>

#include "base/random.h"
#include "topology/gpus.h"

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

Status add_gpu(RankFacts& facts) {
  WEFT_TRY_ASSIGN(const GpuFacts own, gpu_facts(facts.device.ordinal));
  facts.gpu = own.pci_address;
  facts.numa_node = own.numa_node;
  facts.can_share_vmm = own.can_share_vmm;
  facts.can_share_ipc = true;
  WEFT_TRY_ASSIGN(const std::vector<GpuFacts> all, gpus());
  for (const GpuFacts& other : all) {
    WEFT_TRY_ASSIGN(const GpuLink link, gpu_link(own, other));
    if (!link.can_access) facts.gpus_beyond += other.pci_address + ",";
  }
  return Status();
}

}  // namespace

Result<RankFacts> rank_facts(int rank, Device device) {
  RankFacts facts;
  facts.rank = rank;
  facts.host = host_id();
  facts.process = process_key();
  facts.device = device;
  facts.numa_node = current_numa_node();
  if (!device.is_host()) WEFT_TRY(add_gpu(facts));
  return facts;
}

}  // namespace weft
