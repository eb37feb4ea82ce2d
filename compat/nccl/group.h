// SPDX-License-Identifier: Apache-2.0
//
// This thread's group: operations and communicators that wait for ncclGroupEnd(). Outside a group they run at once.
#pragma once

#include <memory>
#include <vector>

#include "compat/nccl/comm.h"
#include "compat/nccl/operation.h"

namespace weft::nccl {

// A communicator to be made when the group ends.
struct Birth {
  ncclComm_t* target;
  std::unique_ptr<ncclComm> comm;
  ncclComm_t parent;  // of a split; else null
  ncclUniqueId id;
  int rank, size;  // of a split: color and key
  bool has_config;
  ncclConfig_t config;
};

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  std::vector<Birth> births;
};
Group& this_group();

// Runs what has come together, one communicator after the other or side by side.
ncclResult_t finish_group();

ncclResult_t add_birth(Birth birth);

// Makes a communicator, now or when the group ends.
ncclResult_t start_init(ncclComm_t* comm, int size, const ncclUniqueId* id, int rank,
                        const ncclConfig_t* config, Device device);

// Checks an operation, and runs it now or when the group ends.
ncclResult_t submit(Operation operation);

}  // namespace weft::nccl
