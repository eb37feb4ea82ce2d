// SPDX-License-Identifier: Apache-2.0
//
// The process's own NCCL, opened at run time: the copy that PyTorch has loaded, else the one that is found.
//   WEFT_TRY_ASSIGN(const Library* nccl, open_library());     // 2.28.9 or newer, one copy
//   nccl->MemAlloc(&at, bytes);
// Types and constants keep NCCL's values; tests/unit/test_nccl_abi.py compares them with nccl.h where there is one.
// Threads: any; which calls may run at once is NCCL's own rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace weft::nccl_link {

using Comm = struct OpaqueComm*;      // ncclComm_t
using Window = struct OpaqueWindow*;  // ncclWindow_t

struct UniqueId {  // ncclUniqueId
  char internal[128];
};

// The first fields of ncclConfig_t. A library takes as many bytes as `size` says, and looks at those that `version`
// had: NCCL 2.14 brought this one.
struct Config {
  size_t size = sizeof(Config);
  uint32_t magic = 0xcafebeef;
  uint32_t version = 21400;
  int32_t blocking = 0;  // calls return at once; GetAsyncError() says when they have finished
  int32_t unused = 0;
};

struct Team {  // ncclTeam_t
  int ranks;
  int rank;
  int stride;
};

// The first bytes of ncclWindow_vidmem, which are the same in all releases from 2.28.9 to 2.32.3.
struct WindowFields {
  void* host;
  uint64_t lsa_flat_base;  // address of the window's part of the first rank of the LSA team
  int32_t lsa_rank;
  int32_t world_rank;
  uint32_t stride_4g;  // from one rank's part to the next, in units of 4 GiB
};

// ncclCommProperties_t, from 2.29 on. A library fills as many bytes as `size` says.
struct Properties {
  size_t size;
  uint32_t magic, version;
  int32_t rank, ranks, cuda_device, nvml_device;
  bool has_device_api, has_multimem;
  int32_t gin_type, lsa_teams;
  bool has_host_rma;
  int32_t railed_gin_type;
  int32_t more[3];  // from 2.31 on
  int32_t gin_stride, gin_connection;
  uint8_t gin_support[64];
  uint64_t dev_comm_bytes;  // that ncclDevComm takes
};
static_assert(offsetof(Properties, gin_type) == 36 && offsetof(Properties, gin_stride) == 64 &&
              offsetof(Properties, dev_comm_bytes) == 136 && sizeof(Properties) == 144);

// ncclDevCommRequirements_t, as it has grown at its end from 2.29.7 on.
struct Requirements {
  size_t size;
  uint32_t magic, version;
  const void* resources;
  const void* teams;
  bool lsa_multimem;
  int32_t barriers, lsa_barriers, rail_barriers;
  int32_t lsa_blocks, lsa_slots;
  bool gin_force;
  int32_t gin_contexts, gin_signals, gin_counters;
  int32_t gin_connection;  // 1: every rank with every other
  bool gin_exclusive;
  int32_t gin_queue_depth;
  int32_t gin_traffic_class = INT32_MIN;  // from 2.30.3 on
  int32_t world_barriers;
  bool gin_strong_signals, gin_va_signals;  // from 2.30.5 on
  int32_t gin_stride = 1;                   // from 2.31 on
  int32_t gin_type;
  bool uses_runtime_version;
  int32_t cft_caps, cft_barriers;
};
static_assert(offsetof(Requirements, gin_connection) == 72 &&
              offsetof(Requirements, gin_traffic_class) == 84 &&
              offsetof(Requirements, gin_strong_signals) == 92 && offsetof(Requirements, gin_stride) == 96 &&
              offsetof(Requirements, uses_runtime_version) == 104 && sizeof(Requirements) == 120);

// Room for an ncclDevComm of any release: 248 bytes in 2.32.3.
inline constexpr size_t kDevCommRoom = 4096;

// ncclResult_t
inline constexpr int kSuccess = 0;
inline constexpr int kInProgress = 7;

inline constexpr int kLeastVersion = 22809;
inline constexpr int kLeastVersionOfPorts = 23003;  // GIN has gets, and structures that grow at their end
inline constexpr int kNewDevComm = 23100;           // a library says how long its ncclDevComm is

// clang-format off: WEFT_NCCL_CALL(member, parameters): the function nccl<member>, which returns ncclResult_t
#define WEFT_NCCL_CALLS(WEFT_NCCL_CALL) \
  WEFT_NCCL_CALL(GetVersion, (int*)) \
  WEFT_NCCL_CALL(GetUniqueId, (UniqueId*)) \
  WEFT_NCCL_CALL(CommInitRankConfig, (Comm*, int, UniqueId, int, Config*)) \
  WEFT_NCCL_CALL(CommGetAsyncError, (Comm, int*)) \
  WEFT_NCCL_CALL(CommAbort, (Comm)) \
  WEFT_NCCL_CALL(MemAlloc, (void**, size_t)) \
  WEFT_NCCL_CALL(MemFree, (void*)) \
  WEFT_NCCL_CALL(CommWindowRegister, (Comm, void*, size_t, Window*, int)) \
  WEFT_NCCL_CALL(CommWindowDeregister, (Comm, Window))
// clang-format on

struct Library {
#define WEFT_NCCL_CALL(member, parameters) int(*member) parameters = nullptr;
  WEFT_NCCL_CALLS(WEFT_NCCL_CALL)
#undef WEFT_NCCL_CALL
  const char* (*GetErrorString)(int) = nullptr;
  const char* (*GetLastError)(Comm) = nullptr;
  Team (*TeamLsa)(Comm) = nullptr;
  // From 2.29 on; null before.
  int (*GetLsaDevicePointer)(Window, size_t, int, void**) = nullptr;
  int (*CommQueryProperties)(Comm, Properties*) = nullptr;
  int (*DevCommCreate)(Comm, const Requirements*, void*) = nullptr;
  int (*DevCommDestroy)(Comm, const void*) = nullptr;

  std::string path;
  int version = 0;           // 22809 for 2.28.9
  bool was_loaded = false;   // somebody else, as PyTorch, had loaded it
  bool serves_host = false;  // a library that stands in for NCCL, with memory of the host: for tests
};

// "2.28.9"
std::string version_text(int version);

// Opens it, once per path. Errors: kUnsupported, where there is none, saying where it was looked for; where the
// process has loaded two copies, naming both; where it is too old or lacks a function.
Result<const Library*> open_library();

}  // namespace weft::nccl_link
