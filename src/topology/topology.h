// SPDX-License-Identifier: Apache-2.0
//
// The facts that a rank knows of its machine and gives to the others; no decisions.
//   WEFT_TRY_ASSIGN(RankFacts mine, rank_facts(rank, device));
// transports/transport.h decides from the facts of all ranks who reaches whom, and how.
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/device.h"
#include "base/status.h"

namespace weft {

struct RankFacts {
  int rank = 0;
  int node = 0;  // the same for ranks of one host, or of one part of it when WEFT_RANKS_PER_NODE divides it
  std::string host;      // host_id() of the rank
  uint64_t process = 0;  // process_key() of the rank
  int numa_node = -1;    // the rank runs on, or its GPU is nearest to; -1 where the system does not say
  Device device;
  std::string gpu;  // PCI address of its GPU; empty on the host
  std::string
      gpus_beyond;  // PCI addresses, each followed by a comma, of visible GPUs it has no peer access to
  bool can_share_vmm = false;  // its GPU's memory can be given away as a file descriptor
  bool can_share_ipc = false;  // ... as a CUDA IPC handle
  // Transport::descriptor() of this rank, by the transport's name.
  std::map<std::string, std::string> descriptors;
};

// The same text for processes that can give each other file descriptors: one boot of one kernel, one network
// namespace (in which the names of abstract sockets live).
std::string host_id();

// NUMA node of the CPU this thread runs on; -1 where the system does not say.
int current_numa_node();

// The facts of this process as rank `rank` on `device`; node is 0 until the facts of all ranks are known.
// Errors: kUnsupported when the device does not exist, with the reason.
Result<RankFacts> rank_facts(int rank, Device device);

}  // namespace weft
