// SPDX-License-Identifier: Apache-2.0
//
// Results of the C functions: a Status becomes NCCL's code, and its message is kept for ncclGetLastError(). Also
// calls that go to the real library with the communicator's shadow.
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

// Refuses communicators that no call may use: null, and one of the process that this one was forked from.
Status check_comm(const char* function, ncclComm_t comm);

// The answer where only the real library could help, and it is not there.
ncclResult_t lacking(const char* name, ncclComm_t comm = nullptr);

// The real library's communicator behind this one. The real library may reach what it exports through the dynamic
// linker, which finds this library's functions: then the communicator is its own.
inline ncclComm_t shadow(ncclComm_t comm) {
  return comm->is_ours() ? comm->real() : comm;
}

// Calls the real library's function with the shadow; `failed` turns a failure's code into what the function returns.
template <class R, class... Parameters, class Failed, class... Arguments>
R pass_or(Failed failed, R (*)(ncclComm_t, Parameters...), const char* name, ncclComm_t comm,
          Arguments... arguments) {
  if (const Status given = check_comm(name, comm); !given.ok()) return failed(answer(given));
  const auto function = real<R (*)(ncclComm_t, Parameters...)>(name);
  if (!shadow(comm) || !function) return failed(lacking(name, comm->is_ours() ? comm : nullptr));
  return function(shadow(comm), arguments...);
}
template <class... Parameters, class... Arguments>
ncclResult_t pass(ncclResult_t (*function)(ncclComm_t, Parameters...), const char* name, ncclComm_t comm,
                  Arguments... arguments) {
  return pass_or([](ncclResult_t result) { return result; }, function, name, comm, arguments...);
}
template <class R, class... Parameters, class... Arguments>
ncclResult_t pass_plain(R (*)(Parameters...), const char* name, Arguments... arguments) {
  const auto function = real<R (*)(Parameters...)>(name);
  return function ? function(arguments...) : lacking(name);
}

}  // namespace weft::nccl
