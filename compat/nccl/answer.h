// SPDX-License-Identifier: Apache-2.0
//
// What the C functions answer: a Status as NCCL's result, with the words kept for ncclGetLastError(); and calls that
// go to the real library with the communicator's shadow.
#pragma once

#include <string>

#include "base/status.h"
#include "compat/nccl/comm.h"
#include "compat/nccl/real.h"

// A function that the library exports, and the other name by which profilers know it.
#define WEFT_NCCL_API extern "C" __attribute__((visibility("default")))
#define WEFT_PROFILED(name) WEFT_NCCL_API decltype(name) p##name __attribute__((alias(#name)));

namespace weft::nccl {

// The words of this thread's last failure.
std::string& last_error();

// Keeps a failure's words, for the communicator too where there is one, and gives its code.
ncclResult_t answer(const Status& status, ncclComm_t comm = nullptr);

// The answer where only the real library could help, and it is not there.
ncclResult_t lacking(const char* name, ncclComm_t comm = nullptr);

// Calls the real library's function with the shadow.
template <class R, class... Parameters, class... Arguments>
ncclResult_t pass(R (*)(ncclComm_t, Parameters...), const char* name, ncclComm_t comm,
                  Arguments... arguments) {
  if (!comm) return answer(Status::invalid("{}: comm: got null", name));
  const auto function = real<R (*)(ncclComm_t, Parameters...)>(name);
  if (!comm->real() || !function) return lacking(name, comm);
  return function(comm->real(), arguments...);
}
template <class R, class... Parameters, class... Arguments>
ncclResult_t pass_plain(R (*)(Parameters...), const char* name, Arguments... arguments) {
  const auto function = real<R (*)(Parameters...)>(name);
  return function ? function(arguments...) : lacking(name);
}

}  // namespace weft::nccl
