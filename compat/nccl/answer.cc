// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl/answer.h"

#include "base/log.h"

namespace weft::nccl {
namespace {

ncclResult_t result_of(Code code) {
  switch (code) {
    case Code::kOk:
      return ncclSuccess;
    case Code::kInvalid:
      return ncclInvalidArgument;
    case Code::kPeerLost:
      return ncclRemoteError;
    case Code::kSystem:
      return ncclSystemError;
    case Code::kCapacity:
      return ncclInternalError;
    default:
      return ncclInvalidUsage;
  }
}

}  // namespace

std::string& last_error() {
  thread_local std::string words;
  return words;
}

ncclResult_t answer(const Status& status, ncclComm_t comm) {
  if (status.ok()) return ncclSuccess;
  last_error() = status.message();
  if (comm) comm->note(status);
  log_info("nccl: {}", status.message());
  return result_of(status.code());
}

Status check_comm(const char* function, ncclComm_t comm) {
  if (!comm) return Status::invalid("{}: comm: got null", function);
  const Status owned = comm->check_owner();
  return owned.ok() ? owned : Status::invalid("{}: {}", function, owned.message());
}

ncclResult_t lacking(const char* name, ncclComm_t comm) {
  return answer(Status::make(Code::kUnsupported, "{} needs the real NCCL{}", name,
                             comm && !real_path().empty() ? ", which this communicator lacks" : ""),
                comm);
}

}  // namespace weft::nccl
