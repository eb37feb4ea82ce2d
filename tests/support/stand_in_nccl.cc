// SPDX-License-Identifier: Apache-2.0
//
// A library that stands in for NCCL on CPUs, so that the nccl transport's host half and everything above it run without
// a GPU: communicators that do not block, memory that peers map, windows. It keeps NCCL's rules where a caller could
// break them: windows are registered by all ranks in the same order, a call that is under way forbids the next one, an
// aborted communicator is gone. Faults and the order of calls: stand_in_nccl.h. Built once for each version that tests
// need (STAND_IN_VERSION); from 2.29 on it has ncclGetLsaDevicePointer, before, the fields of a window.
#include "support/stand_in_nccl.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "support/stand_in.h"
#include "support/stand_in_gin.h"
#include "transports/nccl/library.h"

using weft::nccl_link::Config;
using weft::nccl_link::kInProgress;
using weft::nccl_link::kSuccess;
using weft::nccl_link::Properties;
using weft::nccl_link::Requirements;
using weft::nccl_link::Team;
using weft::nccl_link::UniqueId;
using weft::nccl_link::WindowFields;

namespace {

constexpr int kInvalidArgument = 4, kInvalidUsage = 5, kUnhandled = 1;
constexpr size_t kRanks = 64;
constexpr uint64_t kStride = uint64_t{4} << 30;

std::mutex mutex;
StandInFaults faults;
std::string calls;
std::map<void*, std::pair<std::string, size_t>> allocations;  // by address
int allocation_count = 0;

void note(const char* call) {
  std::lock_guard lock(mutex);
  calls += (calls.empty() ? "" : " ") + std::string(call);
}

// All ranks of a communicator see this.
struct Shared {
  stand_in::Barrier::Counters counters;
  char names[kRanks][96];  // of the memory that each registers
};

struct WindowOf {
  WindowFields fields;
  std::vector<void*> parts;  // by rank
  void* flat = nullptr;
  size_t bytes = 0;
};

struct CommOf {
  Shared* shared = nullptr;
  std::string name;
  int rank = 0, ranks = 0;
  std::atomic<int> state{kInProgress};
  std::atomic<bool> is_aborted{false};
  std::thread work;
  std::unique_ptr<stand_in::FakeGin> gin;

  bool meet() { return stand_in::Barrier(&shared->counters, static_cast<uint32_t>(ranks)).pass(is_aborted); }
  // As NCCL does: the call returns, a thread goes on.
  template <class Work>
  void go_on(Work run) {
    if (work.joinable()) work.join();
    state = kInProgress;
    work = std::thread([this, run] { state = run(); });
  }
};

CommOf* of(weft::nccl_link::Comm comm) {
  return reinterpret_cast<CommOf*>(comm);
}

// Ranks' parts at one stride after each other, as NCCL's flat range of addresses has them.
int map_parts(CommOf& comm, WindowOf& window) {
  window.flat = mmap(nullptr, kStride * static_cast<size_t>(comm.ranks), PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (window.flat == MAP_FAILED) return kUnhandled;
  for (int rank = 0; rank < comm.ranks; ++rank) {
    const int fd = shm_open(comm.shared->names[rank], O_RDWR, 0600);
    if (fd < 0) return kUnhandled;
    char* at = static_cast<char*>(window.flat) + kStride * static_cast<size_t>(rank);
    const void* mapped = mmap(at, window.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return kUnhandled;
    window.parts.push_back(at);
  }
  window.fields = {&window, reinterpret_cast<uint64_t>(window.flat), comm.rank, comm.rank, kStride >> 32};
  return kSuccess;
}

}  // namespace

extern "C" {

int weftStandsInForNccl() {
  return 1;
}

void standInNcclFaults(const StandInFaults* wanted) {
  std::lock_guard lock(mutex);
  faults = *wanted;
  calls.clear();
}

void standInNcclCalls(std::string* out) {
  std::lock_guard lock(mutex);
  *out = calls;
}

size_t standInNcclAllocations() {
  std::lock_guard lock(mutex);
  return allocations.size();
}

int ncclGetVersion(int* version) {
  *version = STAND_IN_VERSION;
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  return result == kInvalidArgument ? "invalid argument"
         : result == kInvalidUsage  ? "invalid usage"
                                    : "unhandled error";
}

const char* ncclGetLastError(weft::nccl_link::Comm) {
  return "so the test wants it";
}

int ncclGetUniqueId(UniqueId* id) {
  note("GetUniqueId");
  static std::atomic<int> count{0};
  std::memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/weft-nccl-%d-%d", getpid(), count++);
  return kSuccess;
}

int ncclCommInitRankConfig(weft::nccl_link::Comm* out, int ranks, UniqueId id, int rank, Config* config) {
  note("CommInitRankConfig");
  if (config->size != 24 || config->magic != 0xcafebeef || config->version != 21400 || config->blocking != 0)
    return kInvalidArgument;
  auto* comm = new CommOf;
  comm->name = id.internal;
  comm->rank = rank;
  comm->ranks = ranks;
  comm->shared = static_cast<Shared*>(stand_in::map_shared(comm->name, sizeof(Shared)));
  *out = reinterpret_cast<weft::nccl_link::Comm>(comm);
  const bool stays_away = faults.stays_away_at_init == rank;
  comm->go_on([comm, stays_away] {
    if (stays_away) {
      while (!comm->is_aborted.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return kUnhandled;
    }
    return comm->meet() ? kSuccess : kUnhandled;
  });
  return kInProgress;
}

int ncclCommGetAsyncError(weft::nccl_link::Comm comm, int* state) {
  *state = of(comm)->state.load();
  return kSuccess;
}

int ncclCommAbort(weft::nccl_link::Comm comm) {
  note("CommAbort");
  of(comm)->is_aborted = true;
  if (of(comm)->work.joinable()) of(comm)->work.join();
  shm_unlink(of(comm)->name.c_str());
  munmap(of(comm)->shared, sizeof(Shared));
  delete of(comm);
  return kSuccess;
}

Team ncclTeamLsa(weft::nccl_link::Comm comm) {
  const int size = faults.lsa_ranks > 0 ? faults.lsa_ranks : of(comm)->ranks;
  return {size, of(comm)->rank % size, 1};
}

int ncclMemAlloc(void** at, size_t bytes) {
  note("MemAlloc");
  if (faults.allocations == 0) return kUnhandled;
  if (faults.allocations > 0) --faults.allocations;
  std::lock_guard lock(mutex);
  const std::string name =
      "/weft-nccl-memory-" + std::to_string(getpid()) + "-" + std::to_string(allocation_count++);
  *at = stand_in::map_shared(name, bytes);
  if (!*at) return kUnhandled;
  std::memset(*at, 0x5a, bytes);  // memory of NCCL is not zero
  allocations[*at] = {name, bytes};
  return kSuccess;
}

int ncclMemFree(void* at) {
  note("MemFree");
  std::lock_guard lock(mutex);
  const auto known = allocations.find(at);
  if (known == allocations.end()) return kInvalidArgument;
  shm_unlink(known->second.first.c_str());
  munmap(at, known->second.second);
  allocations.erase(known);
  return kSuccess;
}

int ncclCommWindowRegister(weft::nccl_link::Comm handle, void* at, size_t bytes, weft::nccl_link::Window* out,
                           int flags) {
  note("CommWindowRegister");
  CommOf* comm = of(handle);
  if ((flags & ~1) != 0 || comm->state.load() == kInProgress) return kInvalidUsage;
  if (!faults.is_symmetric) {
    *out = nullptr;
    return kSuccess;
  }
  std::string name;
  {
    std::lock_guard lock(mutex);
    const auto known = allocations.find(at);
    if (known == allocations.end() || known->second.second < bytes) return kInvalidArgument;
    name = known->second.first;
  }
  const bool stays_away = faults.stays_away_at_register == comm->rank && --faults.registers_before < 0;
  snprintf(comm->shared->names[comm->rank], sizeof comm->shared->names[0], "%s", name.c_str());
  comm->go_on([comm, bytes, out, stays_away]() -> int {
    if (stays_away) {
      while (!comm->is_aborted.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return kUnhandled;
    }
    if (!comm->meet()) return kUnhandled;
    auto window = std::make_unique<WindowOf>();
    window->bytes = bytes;
    const int mapped = map_parts(*comm, *window);
    if (!comm->meet() || mapped != kSuccess) return kUnhandled;
    // A pointer to the fields, as NCCL's is: they come first.
    *out = reinterpret_cast<weft::nccl_link::Window>(window.release());
    return kSuccess;
  });
  return faults.says_success_early ? kSuccess : kInProgress;
}

#if STAND_IN_VERSION >= 22900
int ncclCommQueryProperties(weft::nccl_link::Comm comm, Properties* out) {
  if (out->size != offsetof(Properties, more) || out->magic != 0xcafebeef || out->version != STAND_IN_VERSION)
    return kInvalidArgument;
  out->rank = of(comm)->rank;
  out->ranks = of(comm)->ranks;
  out->has_device_api = true;
  out->gin_type = faults.gin_type;
  return kSuccess;
}

int ncclDevCommCreate(weft::nccl_link::Comm handle, const Requirements* wanted, void* out) {
  note("DevCommCreate");
  CommOf* comm = of(handle);
  if (wanted->size != offsetof(Requirements, gin_stride) || wanted->magic != 0xcafebeef ||
      wanted->gin_connection != 1 || !wanted->gin_strong_signals || wanted->gin_va_signals ||
      comm->state.load() == kInProgress)
    return kInvalidArgument;
  const auto place_of = [](void* window, uint32_t rank) {
    return static_cast<std::byte*>(static_cast<WindowOf*>(window)->parts[rank]);
  };
  const auto number = [](int32_t value) { return static_cast<uint32_t>(value); };
  comm->go_on([comm, out, place_of, contexts = number(wanted->gin_contexts),
               signals = number(wanted->gin_signals), counters = number(wanted->gin_counters)]() -> int {
    comm->gin = std::make_unique<stand_in::FakeGin>(comm->name, static_cast<uint32_t>(comm->rank),
                                                    static_cast<uint32_t>(comm->ranks), contexts, signals,
                                                    counters, place_of);
    const weft::nccl_gin::HostGin made = comm->gin->handle();
    std::memcpy(out, &made, sizeof made);
    return comm->meet() ? kSuccess : kUnhandled;
  });
  return kInProgress;
}

int ncclDevCommDestroy(weft::nccl_link::Comm comm, const void*) {
  note("DevCommDestroy");
  of(comm)->gin.reset();
  return kSuccess;
}
#endif

int ncclCommWindowDeregister(weft::nccl_link::Comm comm, weft::nccl_link::Window handle) {
  note("CommWindowDeregister");
  auto* window = reinterpret_cast<WindowOf*>(handle);
  munmap(window->flat, kStride * static_cast<size_t>(of(comm)->ranks));
  delete window;
  return kSuccess;
}

#if STAND_IN_VERSION >= 22900
int ncclGetLsaDevicePointer(weft::nccl_link::Window handle, size_t offset, int rank, void** at) {
  *at = static_cast<char*>(reinterpret_cast<WindowOf*>(handle)->parts[static_cast<size_t>(rank)]) + offset;
  return kSuccess;
}
#endif

}  // extern "C"
