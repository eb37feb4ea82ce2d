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
struct PendingInit {
  ncclComm_t* target;
  std::unique_ptr<ncclComm> comm;
  ncclComm_t parent;  // of a split; else null
  ncclUniqueId id;
  int rank, size;  // of a split: color and key
  bool has_config;
  ncclConfig_t config;
};

// An operator that was let go inside a group, whose calls still need it.
struct OldOperator {
  ncclComm_t comm;
  ncclRedOp_t op;
};

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  std::vector<PendingInit> pending;
  std::vector<OldOperator> old_operators;
  bool is_real_open = false;           // the real library's group, beside this one
  ncclResult_t refused = ncclSuccess;  // the first call that was not accepted: nothing of the group runs then
};
Group& this_group();

// Runs what has come together, one communicator after the other or side by side; nothing of it where a call of the
// group was refused.
ncclResult_t finish_group();

// Inside a group: opens one of the real library, for calls of it that wait for other ranks until the group ends, which
// may be ranks of this thread. finish_group() and drop_group() end it.
void join_real_group();

// Ends the group without running it.
void drop_group();

// Ends an operator, now or when the group has run.
ncclResult_t end_operator(ncclComm_t comm, ncclRedOp_t op);

ncclResult_t add_pending(PendingInit init);

// Gives the result of a call that was not accepted, and keeps it for the end of this thread's group, if it is in one.
ncclResult_t refuse(ncclResult_t result);

// Makes a communicator, now or when the group ends.
ncclResult_t start_init(ncclComm_t* comm, int size, const ncclUniqueId* id, int rank,
                        const ncclConfig_t* config, Device device);

// Checks an operation, and runs it now or when the group ends.
ncclResult_t submit(Operation operation);

}  // namespace weft::nccl
