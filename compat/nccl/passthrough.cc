// SPDX-License-Identifier: Apache-2.0
//
// Names that NCCL exports and Weft has no part in: the device interface (nccl_device.h), parameters and debugging, which
// go to the real library; without one they fail in words. Structs that are passed by address are the affair of the
// caller and the real library.
#include "compat/nccl/answer.h"
#include "compat/nccl/group.h"

using namespace weft::nccl;  // NOLINT: these are this folder's own names

// What nccl_device.h passes by value.
struct ncclTeam {
  int nRanks, rank, stride;
};
struct ncclMultimemHandle {
  void* mcBasePtr;
};

namespace {

// What functions give that have no result to say that they failed; ncclGetLastError() has the words.
ncclTeam no_team(ncclResult_t /*result*/) {
  return {};
}
int no_number(ncclResult_t /*result*/) {
  return -1;
}

}  // namespace

#define WEFT_PASS(name, parameters, ...)         \
  WEFT_NCCL_API ncclResult_t name parameters {   \
    return pass_plain(name, #name, __VA_ARGS__); \
  }                                              \
  WEFT_PROFILED(name)
#define WEFT_PASS_COMM(name, parameters, ...)    \
  WEFT_NCCL_API ncclResult_t name parameters {   \
    return pass(name, #name, comm, __VA_ARGS__); \
  }                                              \
  WEFT_PROFILED(name)
#define WEFT_PASS_TEAM(name)                     \
  WEFT_NCCL_API ncclTeam name(ncclComm_t comm) { \
    return pass_or(no_team, name, #name, comm);  \
  }                                              \
  WEFT_PROFILED(name)
#define WEFT_PASS_RANK(name)                                         \
  WEFT_NCCL_API int name(ncclComm_t comm, ncclTeam team, int rank) { \
    return pass_or(no_number, name, #name, comm, team, rank);        \
  }                                                                  \
  WEFT_PROFILED(name)

// ---- device communicators, and what they are asked to have

WEFT_PASS_COMM(ncclCommQueryProperties, (ncclComm_t comm, void* properties), properties)
WEFT_NCCL_API ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void* requirements, void* made) {
  join_real_group();
  return pass(ncclDevCommCreate, "ncclDevCommCreate", comm, requirements, made);
}
WEFT_PROFILED(ncclDevCommCreate)
WEFT_PASS_COMM(ncclDevCommDestroy, (ncclComm_t comm, const void* made), made)
WEFT_PASS_COMM(ncclGinBarrierCreateRequirement,
               (ncclComm_t comm, ncclTeam team, int barriers, void* handle, void* requirement), team,
               barriers, handle, requirement)
WEFT_PASS(ncclLsaBarrierCreateRequirement, (ncclTeam team, int barriers, void* handle, void* requirement),
          team, barriers, handle, requirement)
WEFT_PASS(ncclGinOutboxCreateRequirement, (int blocks, int size_log2, void* handle, void* requirement),
          blocks, size_log2, handle, requirement)
WEFT_PASS(ncclGinInboxA2ACreateRequirement,
          (ncclTeam peers, int blocks, int size_log2, void* handle, void* requirement), peers, blocks,
          size_log2, handle, requirement)
WEFT_PASS(ncclLLA2ACreateRequirement, (int blocks, int slots, void* handle, void* requirement), blocks, slots,
          handle, requirement)
WEFT_NCCL_API int ncclLLA2ACalcSlots(int elements, int element_bytes) {
  const auto function = real<decltype(&ncclLLA2ACalcSlots)>("ncclLLA2ACalcSlots");
  return function ? function(elements, element_bytes) : no_number(lacking("ncclLLA2ACalcSlots"));
}
WEFT_PROFILED(ncclLLA2ACalcSlots)

// ---- teams of ranks

WEFT_PASS_TEAM(ncclTeamWorld)
WEFT_PASS_TEAM(ncclTeamLsa)
WEFT_PASS_TEAM(ncclTeamRail)
WEFT_PASS_RANK(ncclTeamRankToWorld)
WEFT_PASS_RANK(ncclTeamRankToLsa)

// ---- addresses in windows

WEFT_PASS(ncclGetMultimemDevicePointer,
          (ncclWindow_t win, size_t offset, ncclMultimemHandle multimem, void** out), win, offset, multimem,
          out)
WEFT_PASS(ncclGetLsaMultimemDevicePointer, (ncclWindow_t win, size_t offset, void** out), win, offset, out)
WEFT_PASS(ncclGetLsaDevicePointer, (ncclWindow_t win, size_t offset, int rank, void** out), win, offset, rank,
          out)
WEFT_PASS(ncclGetPeerDevicePointer, (ncclWindow_t win, size_t offset, int peer, void** out), win, offset,
          peer, out)

// ---- parameters and debugging

WEFT_PASS(ncclParamBind, (ncclParamHandle_t * out, const char* key), out, key)
WEFT_PASS(ncclParamGetI8, (ncclParamHandle_t h, int8_t* out), h, out)
WEFT_PASS(ncclParamGetI16, (ncclParamHandle_t h, int16_t* out), h, out)
WEFT_PASS(ncclParamGetI32, (ncclParamHandle_t h, int32_t* out), h, out)
WEFT_PASS(ncclParamGetI64, (ncclParamHandle_t h, int64_t* out), h, out)
WEFT_PASS(ncclParamGetU8, (ncclParamHandle_t h, uint8_t* out), h, out)
WEFT_PASS(ncclParamGetU16, (ncclParamHandle_t h, uint16_t* out), h, out)
WEFT_PASS(ncclParamGetU32, (ncclParamHandle_t h, uint32_t* out), h, out)
WEFT_PASS(ncclParamGetU64, (ncclParamHandle_t h, uint64_t* out), h, out)
WEFT_PASS(ncclParamGetStr, (ncclParamHandle_t h, const char** out), h, out)
WEFT_PASS(ncclParamGet, (ncclParamHandle_t h, void* out, int most, int* length), h, out, most, length)
WEFT_PASS(ncclParamGetParameter, (const char* key, const char** value, int* length), key, value, length)
WEFT_PASS(ncclParamGetAllParameterKeys, (const char*** table, int* length), table, length)
WEFT_NCCL_API void ncclParamDumpAll() {
  if (const auto function = real<decltype(&ncclParamDumpAll)>("ncclParamDumpAll")) function();
}
WEFT_PROFILED(ncclParamDumpAll)
WEFT_NCCL_API void ncclResetDebugInitInternal() {
  if (const auto function = real<decltype(&ncclResetDebugInitInternal)>("ncclResetDebugInitInternal"))
    function();
}
