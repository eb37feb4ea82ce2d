// SPDX-License-Identifier: Apache-2.0
//
// Names that NCCL exports and Weft has no part in: the device interface and parameters, which go to the real
// library; and pncclX, a profiler's other name for ncclX.
#include "base/log.h"
#include "compat/nccl/comm.h"
#include "compat/nccl/real.h"

#define WEFT_NCCL_API extern "C" __attribute__((visibility("default")))

using weft::nccl::real_symbol;

namespace {

ncclComm_t shadow(ncclComm_t comm) {
  return comm ? comm->real() : nullptr;
}

template <class... Arguments>
ncclResult_t call(const char* name, Arguments... arguments) {
  const auto function = reinterpret_cast<ncclResult_t (*)(Arguments...)>(real_symbol(name));
  if (function) return function(arguments...);
  weft::log_info("nccl: {} needs the real NCCL", name);
  return ncclInvalidUsage;
}

}  // namespace

// With a communicator. Structs are passed on by address, so their layout is the caller's and the real
// library's affair.
WEFT_NCCL_API ncclResult_t ncclCommQueryProperties(ncclComm_t comm, void* properties) {
  return shadow(comm) ? call("ncclCommQueryProperties", shadow(comm), properties) : ncclInvalidUsage;
}
WEFT_NCCL_API ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void* requirements, void* made) {
  return shadow(comm) ? call("ncclDevCommCreate", shadow(comm), requirements, made) : ncclInvalidUsage;
}
WEFT_NCCL_API ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const void* made) {
  return shadow(comm) ? call("ncclDevCommDestroy", shadow(comm), made) : ncclInvalidUsage;
}

#define WEFT_PASS(name, parameters, ...)       \
  WEFT_NCCL_API ncclResult_t name parameters { \
    return call(#name, __VA_ARGS__);           \
  }
WEFT_PASS(ncclGetLsaMultimemDevicePointer, (ncclWindow_t win, size_t offset, void** out), win, offset, out)
WEFT_PASS(ncclGetLsaDevicePointer, (ncclWindow_t win, size_t offset, int rank, void** out), win, offset, rank,
          out)
WEFT_PASS(ncclGetPeerDevicePointer, (ncclWindow_t win, size_t offset, int peer, void** out), win, offset,
          peer, out)
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
  if (const auto function = reinterpret_cast<void (*)()>(real_symbol("ncclParamDumpAll"))) function();
}
