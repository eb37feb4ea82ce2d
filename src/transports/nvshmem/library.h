// SPDX-License-Identifier: Apache-2.0
//
// NVSHMEM's host library, opened at run time: the copy that the process has loaded, else the one that is found.
//   WEFT_TRY_ASSIGN(const Library* nvshmem, open_library());
// Types and constants keep NVSHMEM's values. Threads: any; calls are one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "transports/nvshmem/wire.h"

namespace weft::nvshmem_link {

// Structures of NVSHMEM carry a version: this number, shifted, and their size.
constexpr int version_of(size_t bytes) {
  return (1 << 16) + static_cast<int>(bytes);
}

struct UniqueId {  // nvshmemx_uniqueid_v1
  int version = version_of(128);
  char internal[124] = {};
};
static_assert(sizeof(UniqueId) == 128);

struct UniqueIdArgs {  // nvshmemx_uniqueid_args_v1
  int version = version_of(24);
  UniqueId* id = nullptr;
  int my_rank = -1;
  int ranks = -1;
};
static_assert(sizeof(UniqueIdArgs) == 24);

struct InitArgs {  // nvshmemx_init_args_v1
  int version = version_of(128);
  UniqueIdArgs unique_id;
  char content[96] = {};
};
static_assert(sizeof(InitArgs) == 128);

struct InitAttributes {  // nvshmemx_init_attr_v1
  int version = version_of(144);
  void* mpi_comm = nullptr;
  InitArgs args;
};
static_assert(sizeof(InitAttributes) == 144);

inline constexpr unsigned kInitWithUniqueId = 1 << 3;
inline constexpr int kIsInitialized = 2;  // NVSHMEM_STATUS_IS_INITIALIZED; more is initialised, too
inline constexpr int kLeastMajor = 3;

// clang-format off: WEFT_NVSHMEM_CALL(function, result, parameters)
#define WEFT_NVSHMEM_CALLS(WEFT_NVSHMEM_CALL) \
  WEFT_NVSHMEM_CALL(nvshmemx_vendor_get_version_info, void, (int*, int*, int*)) \
  WEFT_NVSHMEM_CALL(nvshmemx_get_uniqueid, int, (UniqueId*)) \
  WEFT_NVSHMEM_CALL(nvshmemx_set_attr_uniqueid_args, int, (int, int, const UniqueId*, InitAttributes*)) \
  WEFT_NVSHMEM_CALL(nvshmemx_hostlib_init_attr, int, (unsigned, InitAttributes*)) \
  WEFT_NVSHMEM_CALL(nvshmemx_hostlib_finalize, void, ()) \
  WEFT_NVSHMEM_CALL(nvshmemx_init_status, int, ()) \
  WEFT_NVSHMEM_CALL(nvshmem_my_pe, int, ()) \
  WEFT_NVSHMEM_CALL(nvshmem_n_pes, int, ()) \
  WEFT_NVSHMEM_CALL(nvshmem_align, void*, (size_t, size_t)) \
  WEFT_NVSHMEM_CALL(nvshmem_free, void, (void*)) \
  WEFT_NVSHMEM_CALL(nvshmem_ptr, void*, (const void*, int)) \
  WEFT_NVSHMEM_CALL(nvshmem_barrier_all, void, ()) \
  WEFT_NVSHMEM_CALL(nvshmemx_cumodule_init, int, (void*)) \
  WEFT_NVSHMEM_CALL(nvshmemx_cumodule_finalize, int, (void*))
// clang-format on

struct Library {
#define WEFT_NVSHMEM_CALL(function, result, parameters) result(*function) parameters = nullptr;
  WEFT_NVSHMEM_CALLS(WEFT_NVSHMEM_CALL)
#undef WEFT_NVSHMEM_CALL
  std::string path;
  std::string version;       // "3.7.2"
  bool serves_host = false;  // a library that stands in for NVSHMEM, with memory of the host: for tests
  const shmem::HostCalls* host_calls = nullptr;  // ... and its calls in place of device code
};

// Opens it, once per path. Errors: kUnsupported, where there is none, saying where it was looked for; where the process
// has loaded two copies, naming both; where it is too old or lacks a function.
Result<const Library*> open_library();

}  // namespace weft::nvshmem_link
