// SPDX-License-Identifier: Apache-2.0
#include "topology/topology.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>

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

Result<RankFacts> rank_facts(int rank, Device device) {
  RankFacts facts;
  facts.rank = rank;
  facts.host = host_id();
  facts.process = process_key();
  facts.device = device;
  if (device.is_host()) return facts;
  return Status::make(Code::kUnsupported, "device {}: this build has no CUDA path", device);
}

}  // namespace weft
