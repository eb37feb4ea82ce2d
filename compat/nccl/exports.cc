// SPDX-License-Identifier: Apache-2.0
//
// The C functions of communicators, their errors and their memory. They check arguments and hand over; what NCCL
// exports beyond that goes to the real library with the communicator's shadow, and without one it fails in words.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "base/config.h"
#include "base/log.h"
#include "compat/nccl/answer.h"
#include "compat/nccl/group.h"

using weft::Code;
using weft::Result;
using weft::Status;
using namespace weft::nccl;  // NOLINT: these are this folder's own names

// ---- communicators

WEFT_NCCL_API ncclResult_t ncclGetVersion(int* version) {
  if (!version) return answer(Status::invalid("version: got null"));
  const auto function = real<decltype(&ncclGetVersion)>("ncclGetVersion");
  if (function && function(version) == ncclSuccess) return ncclSuccess;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

WEFT_NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return answer(Status::invalid("uniqueId: got null"));
  const auto unique_id = weft::open_rendezvous(weft::config().nccl_interface);
  if (!unique_id.ok()) return answer(unique_id.status());
  *id = {};
  static_assert(sizeof(weft::UniqueId) <= sizeof(id->internal));
  std::memcpy(id->internal, &*unique_id, sizeof(weft::UniqueId));
  return ncclSuccess;
}

WEFT_NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                                  ncclConfig_t* config) {
  return start_init(comm, nranks, &commId, rank, config, current_device());
}
WEFT_NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  return start_init(comm, nranks, &commId, rank, nullptr, current_device());
}
// One rendezvous is enough for as many ranks as Weft has: the first id's.
WEFT_NCCL_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId,
                                                    ncclUniqueId* commIds, ncclConfig_t* config) {
  if (nId < 1) return answer(Status::invalid("nId: got {}, allowed: 1 or more", nId));
  return start_init(newcomm, nranks, commIds, myrank, config, current_device());
}

WEFT_NCCL_API ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist) {
  if (!comm || ndev < 1) return answer(Status::invalid("comm and ndev: got {}, {}", comm != nullptr, ndev));
  ncclUniqueId id;
  ncclResult_t result = ncclGetUniqueId(&id);
  if (result != ncclSuccess) return result;
  ++this_group().depth;
  for (int i = 0; i < ndev && result == ncclSuccess; ++i) {
    weft::Device device = current_device();
    device.ordinal = device.is_host() ? 0 : devlist ? devlist[i] : i;
    result = start_init(&comm[i], ndev, &id, i, nullptr, device);
  }
  const ncclResult_t ended = ncclGroupEnd();
  return result == ncclSuccess ? ended : result;
}

WEFT_NCCL_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                                         ncclConfig_t* config) {
  if (!newcomm) return refuse(answer(Status::invalid("newcomm: got null")));
  if (const Status given = check_comm("ncclCommSplit", comm); !given.ok()) return refuse(answer(given));
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
    return refuse(
        answer(Status::invalid("color: got {}, allowed: 0 or more, or NCCL_SPLIT_NOCOLOR", color), comm));
  PendingInit init{
      newcomm, std::make_unique<ncclComm>(comm->device()), comm, {}, color, key, config != nullptr, {}};
  if (config)
    std::memcpy(static_cast<void*>(&init.config), config, std::min(config->size, sizeof init.config));
  *newcomm = nullptr;
  return add_pending(std::move(init));
}

// Ranks that are left out take no part, so only the real library can do it.
WEFT_NCCL_API ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* newcomm,
                                          ncclConfig_t* config, int flags) {
  ncclComm_t made = nullptr;
  const ncclResult_t result =
      pass(ncclCommShrink, "ncclCommShrink", comm, excluded, count, &made, config, flags);
  if (result != ncclSuccess) return result;
  auto adopted = std::make_unique<ncclComm>(comm->device());
  adopted->adopt(made);
  *newcomm = adopted.release();
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId* id, int rank,
                                        ncclComm_t* newcomm, ncclConfig_t* config) {
  ncclComm_t made = nullptr;
  ncclResult_t result;
  if (comm) {
    result = pass(ncclCommGrow, "ncclCommGrow", comm, nRanks, id, rank, &made, config);
  } else {
    result = pass_plain(ncclCommGrow, "ncclCommGrow", nullptr, nRanks, id, rank, &made, config);
  }
  if (result != ncclSuccess) return result;
  auto adopted = std::make_unique<ncclComm>(comm ? comm->device() : current_device());
  adopted->adopt(made);
  *newcomm = adopted.release();
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  return pass(ncclCommGetUniqueId, "ncclCommGetUniqueId", comm, id);
}

WEFT_NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (const Status given = check_comm("ncclCommFinalize", comm); !given.ok()) return answer(given);
  const auto function = real<decltype(&ncclCommFinalize)>("ncclCommFinalize");
  return comm->real() && function ? function(comm->real()) : ncclSuccess;
}

namespace {
ncclResult_t end_comm(ncclComm_t comm, const char* name) {
  if (!comm) return ncclSuccess;
  if (const Status given = check_comm(name, comm); !given.ok()) return answer(given);
  const auto function = comm->real() ? real<decltype(&ncclCommDestroy)>(name) : nullptr;
  const ncclResult_t result = function ? function(comm->real()) : ncclSuccess;
  delete comm;
  return result;
}
}  // namespace
WEFT_NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return end_comm(comm, "ncclCommDestroy");
}
WEFT_NCCL_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm && comm->check_owner().ok()) comm->stop();
  return end_comm(comm, "ncclCommAbort");
}
WEFT_NCCL_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (const Status given = check_comm("ncclCommRevoke", comm); !given.ok()) return answer(given);
  comm->stop();
  return comm->real() ? pass(ncclCommRevoke, "ncclCommRevoke", comm, flags) : ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  return pass(ncclCommSuspend, "ncclCommSuspend", comm, flags);
}
WEFT_NCCL_API ncclResult_t ncclCommResume(ncclComm_t comm) {
  return pass(ncclCommResume, "ncclCommResume", comm);
}
WEFT_NCCL_API ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  return pass(ncclCommMemStats, "ncclCommMemStats", comm, stat, value);
}

WEFT_NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm || !error) return answer(Status::invalid("comm or asyncError: got null"));
  const auto function = real<decltype(&ncclCommGetAsyncError)>("ncclCommGetAsyncError");
  // The real library asks about its own communicators through the dynamic linker, which finds this function.
  if (!comm->is_ours()) return function ? function(comm, error) : ncclInvalidArgument;
  if (const Status given = check_comm("ncclCommGetAsyncError", comm); !given.ok()) return answer(given);
  *error = comm->async_error();
  return *error == ncclSuccess && comm->real() && function ? function(comm->real(), error) : ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  if (!comm || !count) return answer(Status::invalid("comm or count: got null"));
  *count = comm->size();
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  if (!comm || !device) return answer(Status::invalid("comm or device: got null"));
  *device = comm->device().ordinal;
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  if (!comm || !rank) return answer(Status::invalid("comm or rank: got null"));
  *rank = comm->rank();
  return ncclSuccess;
}

WEFT_NCCL_API const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[ncclNumResults] = {"no error",
                                                  "a CUDA call failed",
                                                  "a call of the system or another library failed",
                                                  "an internal check failed",
                                                  "an argument is invalid",
                                                  "the library was used in a way that is not allowed",
                                                  "a remote rank is gone or stays silent",
                                                  "the operation is in progress",
                                                  "the time was up"};
  return result >= 0 && result < ncclNumResults ? kTexts[result] : "an unknown result";
}
WEFT_NCCL_API const char* ncclGetLastError(ncclComm_t comm) {
  thread_local std::string message;
  message = comm && !comm->last_error().empty() ? comm->last_error() : last_error();
  if (message.empty() && comm && comm->real())
    if (const auto function = real<decltype(&ncclGetLastError)>("ncclGetLastError"))
      return function(comm->real());
  return message.c_str();
}
WEFT_NCCL_API void ncclResetDebugInit() {
  if (const auto function = real<decltype(&ncclResetDebugInit)>("ncclResetDebugInit")) function();
}

// ---- memory: on CUDA the real library's, which knows what its kernels need

WEFT_NCCL_API ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  if (!ptr) return answer(Status::invalid("ptr: got null"));
  const weft::Device device = current_device();
  if (device.is_host()) {
    const size_t page = 4096;
    *ptr = aligned_alloc(page, (std::max<size_t>(size, 1) + page - 1) / page * page);
    return *ptr ? ncclSuccess : answer(Status::make(Code::kSystem, "allocate {} bytes", size));
  }
  if (const auto function = real<decltype(&ncclMemAlloc)>("ncclMemAlloc")) return function(ptr, size);
  const auto context = weft::CudaContext::enter(device.ordinal);
  if (!context.ok()) return answer(context.status());
  return answer(
      weft::cuda_status(context->driver().cuMemAlloc(reinterpret_cast<weft::CUdeviceptr*>(ptr), size),
                        "allocate {} bytes", size));
}
WEFT_NCCL_API ncclResult_t ncclMemFree(void* ptr) {
  const weft::Device device = current_device();
  if (device.is_host()) {
    free(ptr);
    return ncclSuccess;
  }
  if (const auto function = real<decltype(&ncclMemFree)>("ncclMemFree")) return function(ptr);
  const auto context = weft::CudaContext::enter(device.ordinal);
  if (!context.ok()) return answer(context.status());
  return answer(weft::cuda_status(context->driver().cuMemFree(reinterpret_cast<weft::CUdeviceptr>(ptr)),
                                  "free memory"));
}

// Weft needs no registration: without a shadow these only check, and the handle is the buffer.
WEFT_NCCL_API ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  if (!comm || !buff || !handle) return answer(Status::invalid("comm, buff or handle: got null"));
  if (comm->real()) return pass(ncclCommRegister, "ncclCommRegister", comm, buff, size, handle);
  *handle = buff;
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  if (!comm) return answer(Status::invalid("comm: got null"));
  return comm->real() ? pass(ncclCommDeregister, "ncclCommDeregister", comm, handle) : ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                                  int flags) {
  if (!comm || !buff || !win) return answer(Status::invalid("comm, buff or win: got null"));
  if (shadow(comm)) {
    join_real_group();
    return pass(ncclCommWindowRegister, "ncclCommWindowRegister", comm, buff, size, win, flags);
  }
  *win = static_cast<ncclWindow_t>(buff);
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  if (!comm) return answer(Status::invalid("comm: got null"));
  return comm->real() ? pass(ncclCommWindowDeregister, "ncclCommWindowDeregister", comm, win) : ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** out) {
  if (!comm || !out) return answer(Status::invalid("comm or outUserPtr: got null"));
  if (comm->real()) return pass(ncclWinGetUserPtr, "ncclWinGetUserPtr", comm, win, out);
  *out = win;
  return ncclSuccess;
}

// ---- the other names

WEFT_PROFILED(ncclGetVersion)
WEFT_PROFILED(ncclGetUniqueId)
WEFT_PROFILED(ncclCommInitRankConfig)
WEFT_PROFILED(ncclCommInitRank)
WEFT_PROFILED(ncclCommInitRankScalable)
WEFT_PROFILED(ncclCommInitAll)
WEFT_PROFILED(ncclCommSplit)
WEFT_PROFILED(ncclCommShrink)
WEFT_PROFILED(ncclCommGrow)
WEFT_PROFILED(ncclCommGetUniqueId)
WEFT_PROFILED(ncclCommFinalize)
WEFT_PROFILED(ncclCommDestroy)
WEFT_PROFILED(ncclCommAbort)
WEFT_PROFILED(ncclCommRevoke)
WEFT_PROFILED(ncclCommSuspend)
WEFT_PROFILED(ncclCommResume)
WEFT_PROFILED(ncclCommMemStats)
WEFT_PROFILED(ncclCommGetAsyncError)
WEFT_PROFILED(ncclCommCount)
WEFT_PROFILED(ncclCommCuDevice)
WEFT_PROFILED(ncclCommUserRank)
WEFT_PROFILED(ncclGetErrorString)
WEFT_PROFILED(ncclGetLastError)
WEFT_PROFILED(ncclResetDebugInit)
WEFT_PROFILED(ncclMemAlloc)
WEFT_PROFILED(ncclMemFree)
WEFT_PROFILED(ncclCommRegister)
WEFT_PROFILED(ncclCommDeregister)
WEFT_PROFILED(ncclCommWindowRegister)
WEFT_PROFILED(ncclCommWindowDeregister)
WEFT_PROFILED(ncclWinGetUserPtr)
