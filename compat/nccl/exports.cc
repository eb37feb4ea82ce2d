// SPDX-License-Identifier: Apache-2.0
//
// The C functions: they check arguments, keep groups, and hand operations to communicators. Everything else
// that NCCL exports goes to the real library with the communicator's shadow; without one it fails in words.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <thread>

#include "base/config.h"
#include "base/log.h"
#include "compat/nccl/comm.h"
#include "compat/nccl/real.h"

#define WEFT_NCCL_API extern "C" __attribute__((visibility("default")))

using weft::Code;
using weft::Result;
using weft::Status;
using weft::nccl::Function;
using weft::nccl::Operation;
using weft::nccl::real;

namespace weft::nccl {
namespace {

struct Counts {
  std::atomic<uint64_t> served{0}, forwarded{0};
};
Counts counts[kFunctions];

thread_local std::string last_error;

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

ncclResult_t answer(const Status& status, ncclComm_t comm = nullptr) {
  if (status.ok()) return ncclSuccess;
  last_error = status.message();
  if (comm) comm->note(status);
  log_info("nccl: {}", status.message());
  return result_of(status.code());
}

// ---- groups
// ------------------------------------------------------------------------------------------------

// A communicator to be made when the group ends.
struct Birth {
  ncclComm_t* target;
  std::unique_ptr<ncclComm> comm;
  ncclComm_t parent;  // of a split; else null
  ncclUniqueId id;
  int rank, size;  // of a split: color and key
  bool has_config;
  ncclConfig_t config;
};

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
  std::vector<Birth> births;
};
thread_local Group group;

Status give_birth(Birth& birth) {
  if (!birth.parent) {
    WEFT_TRY(birth.comm->init(birth.id, birth.rank, birth.size, birth.has_config ? &birth.config : nullptr));
  } else {
    int rank = 0, size = 0;
    const int color = birth.rank;
    WEFT_TRY_ASSIGN(const ncclUniqueId id, birth.parent->split(color, birth.size, rank, size));
    if (color == NCCL_SPLIT_NOCOLOR) {
      *birth.target = nullptr;
      return {};
    }
    WEFT_TRY(birth.comm->init(id, rank, size, birth.has_config ? &birth.config : nullptr));
  }
  *birth.target = birth.comm.release();
  return {};
}

// Runs act(0) to act(count - 1), each in a thread of its own where there are several: they may wait for each
// other.
Status run_beside(size_t count, const std::function<Status(size_t)>& act) {
  if (count == 1) return act(0);
  std::vector<Status> results(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) threads.emplace_back([&, i] { results[i] = act(i); });
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : results)
    if (!status.ok()) return status;
  return {};
}

// Whether one thread can start everything, one communicator after the other: GPUs of their own, and nothing to
// wait for. A thread that is made for it costs several times what a launch does.
bool starts_in_turn(const std::vector<ncclComm_t>& comms, const std::vector<std::vector<Operation>>& shares) {
  std::set<int> gpus;
  for (size_t i = 0; i < comms.size(); ++i) {
    const bool is_first = !comms[i]->device().is_host() && gpus.insert(comms[i]->device().ordinal).second;
    if (!is_first || !comms[i]->starts_at_once(shares[i])) return false;
  }
  return true;
}

ncclResult_t run_shares(std::vector<Operation> operations) {
  std::vector<ncclComm_t> comms;
  std::vector<std::vector<Operation>> shares;
  for (Operation& operation : operations) {
    const size_t at = std::find(comms.begin(), comms.end(), operation.comm) - comms.begin();
    if (at == comms.size()) {
      comms.push_back(operation.comm);
      shares.emplace_back();
    }
    shares[at].push_back(std::move(operation));
  }
  std::vector<Status> results(comms.size());
  const auto run = [&](size_t i) { return results[i] = comms[i]->run(shares[i]); };
  if (starts_in_turn(comms, shares))
    for (size_t i = 0; i < comms.size(); ++i) (void)run(i);
  else
    (void)run_beside(comms.size(), run);
  ncclResult_t result = ncclSuccess;
  for (size_t i = 0; i < comms.size(); ++i)
    if (!results[i].ok()) result = answer(results[i], comms[i]);
  return result;
}

ncclResult_t finish_group() {
  std::vector<Birth> births = std::move(group.births);
  std::vector<Operation> operations = std::move(group.operations);
  group = {};
  if (!births.empty()) {
    const Status status = run_beside(births.size(), [&](size_t i) { return give_birth(births[i]); });
    if (!status.ok()) return answer(status);
  }
  if (operations.empty()) return ncclSuccess;
  const ncclComm_t comm = operations[0].comm;
  const auto is_of_one = [&](const Operation& operation) { return operation.comm == comm; };
  if (std::all_of(operations.begin(), operations.end(), is_of_one))
    return answer(comm->run(operations), comm);
  return run_shares(std::move(operations));
}

ncclResult_t add_birth(Birth birth) {
  group.births.push_back(std::move(birth));
  return group.depth ? ncclSuccess : finish_group();
}

ncclResult_t start_init(ncclComm_t* comm, int size, const ncclUniqueId* id, int rank,
                        const ncclConfig_t* config, Device device) {
  if (!comm || !id) return answer(Status::invalid("comm or commId: got null"));
  if (size < 1 || rank < 0 || rank >= size)
    return answer(Status::invalid("rank and nranks: got {} and {}, allowed: 0 <= rank < nranks", rank, size));
  Birth birth{comm, std::make_unique<ncclComm>(device), nullptr, *id, rank, size, config != nullptr, {}};
  if (config)
    std::memcpy(static_cast<void*>(&birth.config), config, std::min(config->size, sizeof birth.config));
  *comm = nullptr;
  return add_birth(std::move(birth));
}

// ---- operations
// --------------------------------------------------------------------------------------------

bool has_root(Function function) {
  return function == Function::kBroadcast || function == Function::kReduce || function == Function::kGather ||
         function == Function::kScatter || function == Function::kSend || function == Function::kRecv;
}

Status check(const Operation& o) {
  const char* name = kFunctionNames[static_cast<int>(o.function)];
  if (!o.comm) return Status::invalid("{}: comm: got null", name);
  if (o.type < 0 || o.type >= ncclNumTypes)
    return Status::invalid("{}: datatype: got {}, allowed: 0 to {}", name, static_cast<int>(o.type),
                           ncclNumTypes - 1);
  if (o.op < 0 || (o.op >= ncclNumOps && !o.comm->find_op(o.op)))
    return Status::invalid("{}: op: got {}, allowed: 0 to {}, or one of ncclRedOpCreatePreMulSum", name,
                           static_cast<int>(o.op), ncclNumOps - 1);
  if (o.op >= ncclNumOps && o.comm->find_op(o.op)->type != o.type)
    return Status::invalid("{}: datatype: got {}, allowed: {}, that of the operator's scalar", name,
                           static_cast<int>(o.type), static_cast<int>(o.comm->find_op(o.op)->type));
  if (has_root(o.function) && (o.peer < 0 || o.peer >= o.comm->size()))
    return Status::invalid("{}: root or peer: got {}, allowed: 0 to {}", name, o.peer, o.comm->size() - 1);
  const bool is_root = o.peer == o.comm->rank();
  const bool needs_src =
      o.function != Function::kRecv &&
      (is_root || (o.function != Function::kBroadcast && o.function != Function::kScatter));
  const bool needs_dst = o.function != Function::kSend &&
                         (is_root || (o.function != Function::kReduce && o.function != Function::kGather));
  if (o.count && ((needs_src && !o.src) || (needs_dst && !o.dst)))
    return Status::invalid("{}: sendbuff or recvbuff: got null for {} elements", name, o.count);
  const bool is_transfer = o.function == Function::kSend || o.function == Function::kRecv;
  if (is_transfer && is_root && !group.depth)
    return Status(Code::kUnsupported,
                  text("{}: to rank {} itself, allowed only inside a group", name, o.peer));
  return {};
}

ncclResult_t submit(Operation operation) {
  const Status status = check(operation);
  if (!status.ok()) return answer(status, operation.comm);
  if (group.depth == 0) return answer(operation.comm->run({&operation, 1}), operation.comm);
  group.operations.push_back(std::move(operation));
  return ncclSuccess;
}

Operation operation(Function function, const void* src, void* dst, size_t count, ncclDataType_t type,
                    ncclRedOp_t op, int peer, ncclComm_t comm, cudaStream_t stream) {
  return {function,
          comm,
          static_cast<const std::byte*>(src),
          static_cast<std::byte*>(dst),
          count,
          type,
          op,
          peer,
          stream,
          {},
          {},
          {},
          {}};
}

// ---- the rest
// ----------------------------------------------------------------------------------------------

ncclResult_t lacking(const char* name, ncclComm_t comm = nullptr) {
  return answer(Status::make(Code::kUnsupported, "{} needs the real NCCL{}", name,
                             comm && !real_path().empty() ? ", which this communicator lacks" : ""),
                comm);
}

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

__attribute__((destructor)) void report() {
  if (config().nccl_report == 0) return;
  std::string line = "nccl: calls served by Weft and by the real library:";
  for (int i = 0; i < kFunctions; ++i)
    if (counts[i].served || counts[i].forwarded)
      line += text(" {} {} + {};", kFunctionNames[i], counts[i].served.load(), counts[i].forwarded.load());
  log_line(LogLevel::kInfo, line);
}

}  // namespace

void count_served(Function function) {
  ++counts[static_cast<int>(function)].served;
}
void count_forwarded(Function function) {
  ++counts[static_cast<int>(function)].forwarded;
}

Element element_of(ncclDataType_t type) {
  constexpr Element kElements[] = {Element::kInt8,  Element::kUint8,  Element::kInt32, Element::kUint32,
                                   Element::kInt64, Element::kUint64, Element::kFp16,  Element::kFp32,
                                   Element::kFp64,  Element::kBf16,   Element::kE4m3,  Element::kE5m2};
  return kElements[type];
}

uint64_t bytes_of(ncclDataType_t type) {
  constexpr uint64_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[type];
}

}  // namespace weft::nccl

using namespace weft::nccl;  // NOLINT: these are this folder's own names

WEFT_NCCL_API int weftNcclCounts(weftNcclCount_t* rows, int capacity) {
  for (int i = 0; i < kFunctions && i < capacity; ++i)
    rows[i] = {kFunctionNames[i], counts[i].served, counts[i].forwarded};
  return kFunctions;
}

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
  const auto ticket = weft::open_meeting(weft::config().nccl_interface);
  if (!ticket.ok()) return answer(ticket.status());
  *id = {};
  static_assert(sizeof(weft::MeetingTicket) <= sizeof(id->internal));
  std::memcpy(id->internal, &*ticket, sizeof(weft::MeetingTicket));
  return ncclSuccess;
}

WEFT_NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                                  ncclConfig_t* config) {
  return start_init(comm, nranks, &commId, rank, config, current_device());
}
WEFT_NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) {
  return start_init(comm, nranks, &commId, rank, nullptr, current_device());
}
// One meeting is enough for as many ranks as Weft has: the first id's.
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
  ++group.depth;
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
  if (!comm || !newcomm) return answer(Status::invalid("comm or newcomm: got null"));
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
    return answer(Status::invalid("color: got {}, allowed: 0 or more, or NCCL_SPLIT_NOCOLOR", color), comm);
  Birth birth{newcomm, std::make_unique<ncclComm>(comm->device()), comm, {}, color, key, config != nullptr,
              {}};
  if (config)
    std::memcpy(static_cast<void*>(&birth.config), config, std::min(config->size, sizeof birth.config));
  *newcomm = nullptr;
  return add_birth(std::move(birth));
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
  if (!comm) return answer(Status::invalid("comm: got null"));
  const auto function = real<decltype(&ncclCommFinalize)>("ncclCommFinalize");
  return comm->real() && function ? function(comm->real()) : ncclSuccess;
}

namespace {
ncclResult_t end_comm(ncclComm_t comm, const char* name) {
  if (!comm) return ncclSuccess;
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
  if (!comm) return ncclSuccess;
  comm->stop();
  return end_comm(comm, "ncclCommAbort");
}
WEFT_NCCL_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (!comm) return answer(Status::invalid("comm: got null"));
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
  thread_local std::string kept;
  kept = comm && !comm->last_error().empty() ? comm->last_error() : last_error;
  if (kept.empty() && comm && comm->real())
    if (const auto function = real<decltype(&ncclGetLastError)>("ncclGetLastError"))
      return function(comm->real());
  return kept.c_str();
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
  if (comm->real())
    return pass(ncclCommWindowRegister, "ncclCommWindowRegister", comm, buff, size, win, flags);
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

// ---- operators

WEFT_NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                                    ncclScalarResidence_t residence, ncclComm_t comm) {
  if (!op || !scalar || !comm) return answer(Status::invalid("op, scalar or comm: got null"), comm);
  if (type < 0 || type >= ncclNumTypes)
    return answer(
        Status::invalid("datatype: got {}, allowed: 0 to {}", static_cast<int>(type), ncclNumTypes - 1),
        comm);
  PreMulSum made{type, nullptr, 0, ncclSum, true};
  if (residence == ncclScalarHostImmediate)
    std::memcpy(&made.bits, scalar, bytes_of(type));
  else
    made.pointer = scalar;
  if (comm->real()) {
    const ncclResult_t result = pass_plain(ncclRedOpCreatePreMulSum, "ncclRedOpCreatePreMulSum", &made.real,
                                           scalar, type, residence, comm->real());
    if (result != ncclSuccess) return result;
  }
  const Result<ncclRedOp_t> added = comm->add_op(made);
  if (!added.ok()) return answer(added.status(), comm);
  *op = *added;
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  PreMulSum* made = comm ? comm->find_op(op) : nullptr;
  if (!made)
    return answer(
        Status::invalid("op: got {}, allowed: one of ncclRedOpCreatePreMulSum", static_cast<int>(op)), comm);
  made->is_alive = false;
  if (!comm->real()) return ncclSuccess;
  return pass_plain(ncclRedOpDestroy, "ncclRedOpDestroy", made->real, comm->real());
}

// ---- collectives, sends and receives

WEFT_NCCL_API ncclResult_t ncclReduce(const void* src, void* dst, size_t count, ncclDataType_t type,
                                      ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kReduce, src, dst, count, type, op, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclBroadcast(const void* src, void* dst, size_t count, ncclDataType_t type,
                                         int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kBroadcast, src, dst, count, type, ncclSum, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                     cudaStream_t stream) {
  return ncclBroadcast(buff, buff, count, type, root, comm, stream);
}
WEFT_NCCL_API ncclResult_t ncclAllReduce(const void* src, void* dst, size_t count, ncclDataType_t type,
                                         ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kAllReduce, src, dst, count, type, op, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclReduceScatter(const void* src, void* dst, size_t count, ncclDataType_t type,
                                             ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kReduceScatter, src, dst, count, type, op, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclAllGather(const void* src, void* dst, size_t count, ncclDataType_t type,
                                         ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kAllGather, src, dst, count, type, ncclSum, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclAlltoAll(const void* src, void* dst, size_t count, ncclDataType_t type,
                                        ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kAllToAll, src, dst, count, type, ncclSum, -1, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclAllToAll(const void* src, void* dst, size_t count, ncclDataType_t type,
                                        ncclComm_t comm, cudaStream_t stream) {
  return ncclAlltoAll(src, dst, count, type, comm, stream);
}
WEFT_NCCL_API ncclResult_t ncclAllToAllv(const void* src, const size_t src_counts[],
                                         const size_t src_places[], void* dst, const size_t dst_counts[],
                                         const size_t dst_places[], ncclDataType_t type, ncclComm_t comm,
                                         cudaStream_t stream) {
  if (!comm || !src_counts || !src_places || !dst_counts || !dst_places)
    return answer(Status::invalid("comm, counts or displacements: got null"), comm);
  Operation made = operation(Function::kAllToAllv, src, dst, 0, type, ncclSum, -1, comm, stream);
  const int ranks = comm->size();
  made.src_counts.assign(src_counts, src_counts + ranks);
  made.src_places.assign(src_places, src_places + ranks);
  made.dst_counts.assign(dst_counts, dst_counts + ranks);
  made.dst_places.assign(dst_places, dst_places + ranks);
  return submit(std::move(made));
}
WEFT_NCCL_API ncclResult_t ncclGather(const void* src, void* dst, size_t count, ncclDataType_t type, int root,
                                      ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kGather, src, dst, count, type, ncclSum, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclScatter(const void* src, void* dst, size_t count, ncclDataType_t type,
                                       int root, ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kScatter, src, dst, count, type, ncclSum, root, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclSend(const void* src, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t comm, cudaStream_t stream) {
  return submit(operation(Function::kSend, src, nullptr, count, type, ncclSum, peer, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclRecv(void* dst, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                                    cudaStream_t stream) {
  return submit(operation(Function::kRecv, nullptr, dst, count, type, ncclSum, peer, comm, stream));
}
WEFT_NCCL_API ncclResult_t ncclPutSignal(const void* src, size_t count, ncclDataType_t type, int peer,
                                         ncclWindow_t win, size_t offset, int signal, int ctx,
                                         unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  if (!comm || !comm->real()) return lacking("ncclPutSignal", comm);
  return pass_plain(ncclPutSignal, "ncclPutSignal", src, count, type, peer, win, offset, signal, ctx, flags,
                    comm->real(), stream);
}
WEFT_NCCL_API ncclResult_t ncclSignal(int peer, int signal, int ctx, unsigned int flags, ncclComm_t comm,
                                      cudaStream_t stream) {
  if (!comm || !comm->real()) return lacking("ncclSignal", comm);
  return pass_plain(ncclSignal, "ncclSignal", peer, signal, ctx, flags, comm->real(), stream);
}
WEFT_NCCL_API ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t* signals, ncclComm_t comm,
                                          cudaStream_t stream) {
  if (!comm || !comm->real()) return lacking("ncclWaitSignal", comm);
  return pass_plain(ncclWaitSignal, "ncclWaitSignal", count, signals, comm->real(), stream);
}

// ---- groups

WEFT_NCCL_API ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
WEFT_NCCL_API ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return answer(Status(Code::kUnsupported, "ncclGroupEnd without ncclGroupStart"));
  return --group.depth ? ncclSuccess : finish_group();
}
// Nothing runs, and nobody has measured what it would take.
WEFT_NCCL_API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  if (group.depth == 0)
    return answer(Status(Code::kUnsupported, "ncclGroupSimulateEnd without ncclGroupStart"));
  if (--group.depth == 0) group = {};
  if (info) info->estimatedTime = NCCL_UNDEF_FLOAT;
  return ncclSuccess;
}

// ---- the other names

#define WEFT_PROFILED(name) WEFT_NCCL_API decltype(name) p##name __attribute__((alias(#name)));
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
WEFT_PROFILED(ncclRedOpCreatePreMulSum)
WEFT_PROFILED(ncclRedOpDestroy)
WEFT_PROFILED(ncclReduce)
WEFT_PROFILED(ncclBroadcast)
WEFT_PROFILED(ncclBcast)
WEFT_PROFILED(ncclAllReduce)
WEFT_PROFILED(ncclReduceScatter)
WEFT_PROFILED(ncclAllGather)
WEFT_PROFILED(ncclAlltoAll)
WEFT_PROFILED(ncclAllToAll)
WEFT_PROFILED(ncclAllToAllv)
WEFT_PROFILED(ncclGather)
WEFT_PROFILED(ncclScatter)
WEFT_PROFILED(ncclSend)
WEFT_PROFILED(ncclRecv)
WEFT_PROFILED(ncclPutSignal)
WEFT_PROFILED(ncclSignal)
WEFT_PROFILED(ncclWaitSignal)
WEFT_PROFILED(ncclGroupStart)
WEFT_PROFILED(ncclGroupEnd)
WEFT_PROFILED(ncclGroupSimulateEnd)
