// SPDX-License-Identifier: Apache-2.0
//
// The tables that NCCL looks up, and their functions: each turns NCCL's handles into Weft's objects, and a Status into
// a result code with one line in NCCL's log.
#include <atomic>
#include <cstring>
#include <exception>

#include "base/config.h"
#include "compat/nccl_rma/plugin.h"

namespace weft::nccl_rma {
namespace {

struct Rendezvous {  // what listen() gives to the other ranks
  char magic[8];
  uint32_t protocol;
  uint32_t reserved;
  UniqueId unique_id;
};
static_assert(sizeof(Rendezvous) <= kHandleBytes);
constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'r', 'm', 'a', 0};

NcclResult result_of(Code code) {
  switch (code) {
    case Code::kOk:
      return kNcclSuccess;
    case Code::kInvalid:
      return kNcclInvalidArgument;
    case Code::kPeerLost:
      return kNcclRemoteError;
    case Code::kSystem:
      return kNcclSystemError;
    case Code::kCapacity:
      return kNcclInternalError;
    default:
      return kNcclInvalidUsage;
  }
}

// Runs the body of a function of the table; what goes wrong is logged here.
template <class Body>
NcclResult answer(const char* function, Body body) {
  try {
    const Status status = body();
    if (status.ok()) return kNcclSuccess;
    Plugin::instance().say(kNcclLogWarn, text("RMA/Weft: {}: {}", function, status.message()));
    return result_of(status.code());
  } catch (const std::exception& error) {
    Plugin::instance().say(kNcclLogWarn, text("RMA/Weft: {}: {}", function, error.what()));
    return kNcclInternalError;
  }
}

Status need(const char* argument, const void* pointer) {
  return pointer ? Status() : Status::invalid("{}: got null", argument);
}

// Memory handles: the team's serial above the region's number, which starts from 1 there.
void* memory_handle(uint64_t serial, uint32_t region) {
  return reinterpret_cast<void*>(serial << 32 | (uint64_t{region} + 1));
}
Result<uint32_t> region_of(const char* argument, const void* handle, uint64_t serial) {
  const auto bits = reinterpret_cast<uint64_t>(handle);
  if (bits >> 32 != serial || (bits & 0xffffffff) == 0)
    return Status::invalid("{}: got a handle that this communicator did not make", argument);
  return static_cast<uint32_t>((bits & 0xffffffff) - 1);
}

NcclResult init(void** context, uint64_t comm_id, NcclLogger logger) {
  return answer("init", [&]() -> Status {
    WEFT_TRY(need("ctx", context));
    WEFT_TRY(Plugin::instance().init(logger));
    *context = Plugin::instance().instances.add(comm_id);
    return {};
  });
}

NcclResult finalize(void* context) {
  return answer("finalize", [&] { return Plugin::instance().instances.take("ctx", context).status(); });
}

NcclResult devices(int* count) {
  return answer("devices", [&]() -> Status {
    WEFT_TRY(need("ndev", count));
    WEFT_TRY_ASSIGN(*count, Plugin::instance().devices());
    return {};
  });
}

NcclResult get_properties(int device, PropertiesV12* properties) {
  return answer("getProperties", [&]() -> Status {
    WEFT_TRY(need("props", properties));
    return Plugin::instance().properties(device, *properties);
  });
}

// `context` is not looked at: NCCL 2.30.7 passes that of its net plug-in to connect() (src/rma/rma_proxy.cc).
NcclResult listen(void*, int device, void* handle, void** listener) {
  return answer("listen", [&]() -> Status {
    WEFT_TRY(need("handle", handle));
    WEFT_TRY(need("listenComm", listener));
    WEFT_TRY(Plugin::instance().nic(device).status());
    WEFT_TRY_ASSIGN(const UniqueId unique_id, open_rendezvous(config().interface));
    Rendezvous rendezvous{{}, kProtocol, 0, unique_id};
    std::memcpy(rendezvous.magic, kMagic, sizeof kMagic);
    std::memset(handle, 0, kHandleBytes);
    std::memcpy(handle, &rendezvous, sizeof rendezvous);
    *listener = Plugin::instance().listeners.add(std::make_shared<Listener>(Listener{device, unique_id}));
    return {};
  });
}

NcclResult connect(void*, void* handles[], int ranks, int rank, void* listener, void** team) {
  return answer("connect", [&]() -> Status {
    Plugin& plugin = Plugin::instance();
    WEFT_TRY(need("handles", handles));
    WEFT_TRY(need("collComm", team));
    if (ranks < 1 || rank < 0 || rank >= ranks)
      return Status::invalid("rank and nranks: got {} and {}, allowed: 0 <= rank < nranks", rank, ranks);
    WEFT_TRY_ASSIGN(const std::shared_ptr<Listener> own, plugin.listeners.find("listenComm", listener));
    WEFT_TRY(need("handles[0]", handles[0]));
    Rendezvous rendezvous;
    std::memcpy(static_cast<void*>(&rendezvous), handles[0], sizeof rendezvous);
    if (std::memcmp(rendezvous.magic, kMagic, sizeof kMagic) != 0)
      return Status::invalid("handles: got one of rank 0 that this plug-in did not make");
    if (rendezvous.protocol != kProtocol)
      return Status::invalid("handles: rank 0 speaks version {}, allowed: {}", rendezvous.protocol,
                             kProtocol);
    own->is_rank_0 = rank == 0;
    WEFT_TRY_ASSIGN(const provider::Nic* nic, plugin.nic(own->device));
    WEFT_TRY_ASSIGN(std::shared_ptr<Team> made,
                    Team::connect(plugin.network(), *nic, rendezvous.unique_id, rank, ranks));
    static std::atomic<uint32_t> serials{0};
    *team = plugin.teams.add({std::move(made), (serials.fetch_add(1) & 0x3fffffff) + 1});
    return {};
  });
}

// A rendezvous ends with the last rank that leaves it; where nobody met, this is that rank.
NcclResult close_listener(void* listener) {
  return answer("closeListen", [&]() -> Status {
    WEFT_TRY_ASSIGN(const std::shared_ptr<Listener> own,
                    Plugin::instance().listeners.take("listenComm", listener));
    if (!own->is_rank_0) (void)join_rendezvous(own->unique_id, 0, 1, Deadline::after_s(1));
    return {};
  });
}

Status create(void* team, int contexts, int stride, void** rma_context) {
  WEFT_TRY(need("rmaCtx", rma_context));
  WEFT_TRY_ASSIGN(const TeamEntry entry, Plugin::instance().teams.find("collComm", team));
  WEFT_TRY_ASSIGN(const uint32_t context, entry.team->create_context(contexts, stride));
  *rma_context = Plugin::instance().contexts.add({entry.team, entry.serial, context});
  return {};
}

NcclResult create_context_14(void* team, ConfigV14* config, void** rma_context) {
  return answer("createContext", [&]() -> Status {
    WEFT_TRY(need("config", config));
    return create(team, config->contexts, config->rank_stride, rma_context);
  });
}

NcclResult create_context_13(void* team, ConfigV13* config, void** rma_context, DeviceHandle** device) {
  return answer("createContext", [&]() -> Status {
    WEFT_TRY(need("config", config));
    WEFT_TRY(create(team, config->contexts, 1, rma_context));
    static DeviceHandle proxy{kDeviceGinProxy, 0, nullptr, 0, 1};
    if (device) *device = &proxy;
    return {};
  });
}

NcclResult destroy_context(void* rma_context) {
  return answer("destroyContext", [&]() -> Status {
    WEFT_TRY_ASSIGN(const ContextEntry entry, Plugin::instance().contexts.take("rmaCtx", rma_context));
    return entry.team->destroy_context(entry.context);
  });
}

Status enroll(void* team, void* data, size_t bytes, int kind, uint64_t flags, void** memory) {
  WEFT_TRY(need("mhandle", memory));
  WEFT_TRY_ASSIGN(const TeamEntry entry, Plugin::instance().teams.find("collComm", team));
  WEFT_TRY_ASSIGN(const uint32_t region, entry.team->enroll(data, bytes, kind, flags));
  *memory = memory_handle(entry.serial, region);
  return {};
}

NcclResult enroll_14(void* team, void* data, size_t bytes, int kind, uint64_t flags, void** memory) {
  return answer("regMrSym", [&] { return enroll(team, data, bytes, kind, flags, memory); });
}

// The engine exports memory by itself, so NCCL's descriptor is not needed.
NcclResult enroll_dmabuf_14(void* team, void* data, size_t bytes, int kind, uint64_t, int, uint64_t flags,
                            void** memory) {
  return answer("regMrSymDmaBuf", [&] { return enroll(team, data, bytes, kind, flags, memory); });
}

NcclResult enroll_13(void* team, void* data, size_t bytes, int kind, uint64_t flags, void** memory,
                     void** device_memory) {
  return answer("regMrSym", [&]() -> Status {
    WEFT_TRY(enroll(team, data, bytes, kind, flags, memory));
    if (device_memory) *device_memory = *memory;
    return {};
  });
}

NcclResult enroll_dmabuf_13(void* team, void* data, size_t bytes, int kind, uint64_t, int, uint64_t flags,
                            void** memory, void** device_memory) {
  return enroll_13(team, data, bytes, kind, flags, memory, device_memory);
}

NcclResult deregister(void* team, void* memory) {
  return answer("deregMrSym", [&]() -> Status {
    WEFT_TRY_ASSIGN(const TeamEntry entry, Plugin::instance().teams.find("collComm", team));
    WEFT_TRY_ASSIGN(const uint32_t region, region_of("mhandle", memory, entry.serial));
    return entry.team->withdraw(region);
  });
}

NcclResult close_team(void* team) {
  return answer("closeColl", [&]() -> Status {
    WEFT_TRY_ASSIGN(const TeamEntry entry, Plugin::instance().teams.take("collComm", team));
    entry.team->close();  // also where NCCL keeps contexts of it
    return {};
  });
}

Status put_to(void* rma_context, int channel, uint64_t src_offset, void* src, size_t bytes,
              uint64_t dst_offset, void* dst, uint32_t rank, void** request, Put put, void* signal,
              bool has_signal) {
  WEFT_TRY(need("request", request));
  WEFT_TRY_ASSIGN(const ContextEntry entry, Plugin::instance().contexts.find("rmaCtx", rma_context));
  put.channel = static_cast<uint32_t>(channel);
  put.rank = rank;
  put.bytes = bytes;
  put.src_offset = src_offset;
  put.dst_offset = dst_offset;
  if (bytes > 0) {
    WEFT_TRY_ASSIGN(put.src, region_of("srcMhandle", src, entry.serial));
    WEFT_TRY_ASSIGN(put.dst, region_of("dstMhandle", dst, entry.serial));
  }
  if (has_signal) {
    WEFT_TRY_ASSIGN(put.signal, region_of("signalMhandle", signal, entry.serial));
  }
  WEFT_TRY_ASSIGN(const uint64_t made, entry.team->put(entry.context, put));
  *request = reinterpret_cast<void*>(made);
  return {};
}

NcclResult put(void* rma_context, int channel, uint64_t src_offset, void* src, size_t bytes,
               uint64_t dst_offset, void* dst, uint32_t rank, void** request) {
  return answer("iput", [&] {
    return put_to(rma_context, channel, src_offset, src, bytes, dst_offset, dst, rank, request, {}, nullptr,
                  false);
  });
}

NcclResult put_signal_13(void* rma_context, int channel, uint64_t src_offset, void* src, size_t bytes,
                         uint64_t dst_offset, void* dst, uint32_t rank, uint64_t signal_offset, void* signal,
                         uint64_t value, uint32_t op, void** request) {
  return answer("iputSignal", [&]() -> Status {
    if (op != kSignalInc && op != kSignalAdd)
      return Status::invalid("signalOp: got {}, allowed: {} (increment), {} (add)", op, uint32_t{kSignalInc},
                             uint32_t{kSignalAdd});
    Put put;
    put.signal_offset = signal_offset;
    put.value = op == kSignalInc ? 1 : value;
    return put_to(rma_context, channel, src_offset, src, bytes, dst_offset, dst, rank, request, put, signal,
                  true);
  });
}

// Every signal is a strong one, which is also a weak one.
NcclResult put_signal_14(void* rma_context, int channel, uint64_t src_offset, void* src, size_t bytes,
                         uint64_t dst_offset, void* dst, uint32_t rank, uint64_t signal_offset, void* signal,
                         uint64_t value, uint32_t op, bool, void** request) {
  return put_signal_13(rma_context, channel, src_offset, src, bytes, dst_offset, dst, rank, signal_offset,
                       signal, value, op, request);
}

NcclResult get(void* rma_context, int channel, uint64_t remote_offset, void* remote, size_t bytes,
               uint64_t local_offset, void* local, uint32_t rank, void** request) {
  return answer("iget", [&]() -> Status {
    WEFT_TRY(need("request", request));
    WEFT_TRY_ASSIGN(const ContextEntry entry, Plugin::instance().contexts.find("rmaCtx", rma_context));
    Get get{static_cast<uint32_t>(channel), rank, kNoRegion, remote_offset, bytes, kNoRegion, local_offset};
    WEFT_TRY_ASSIGN(get.src, region_of("remoteMhandle", remote, entry.serial));
    WEFT_TRY_ASSIGN(get.dst, region_of("localMhandle", local, entry.serial));
    WEFT_TRY_ASSIGN(const uint64_t made, entry.team->get(entry.context, get));
    *request = reinterpret_cast<void*>(made);
    return {};
  });
}

// A get that has ended is visible, so there is nothing to flush.
NcclResult flush(void* rma_context, int, void*, uint32_t, void** request) {
  return answer("iflush", [&]() -> Status {
    WEFT_TRY(need("request", request));
    WEFT_TRY_ASSIGN(const ContextEntry entry, Plugin::instance().contexts.find("rmaCtx", rma_context));
    WEFT_TRY_ASSIGN(const uint64_t made, entry.team->done_already(entry.context));
    *request = reinterpret_cast<void*>(made);
    return {};
  });
}

NcclResult test(void* team, void* request, int* done) {
  return answer("test", [&]() -> Status {
    WEFT_TRY(need("done", done));
    WEFT_TRY_ASSIGN(const TeamEntry entry, Plugin::instance().teams.find("collComm", team));
    WEFT_TRY_ASSIGN(const bool is_done, entry.team->test(reinterpret_cast<uint64_t>(request)));
    *done = is_done;
    return {};
  });
}

// A lost rank was logged when it was found, and not again on each round.
NcclResult progress(void* rma_context) {
  Status failed;
  const NcclResult result = answer("rmaProgress", [&]() -> Status {
    WEFT_TRY_ASSIGN(const ContextEntry entry, Plugin::instance().contexts.find("rmaCtx", rma_context));
    failed = entry.team->progress();
    return {};
  });
  return result == kNcclSuccess ? result_of(failed.code()) : result;
}

NcclResult query_last_error(void* rma_context, bool* has_error) {
  return answer("queryLastError", [&]() -> Status {
    WEFT_TRY(need("hasError", has_error));
    WEFT_TRY_ASSIGN(const ContextEntry entry, Plugin::instance().contexts.find("rmaCtx", rma_context));
    *has_error = !entry.team->status().ok();
    return {};
  });
}

}  // namespace
}  // namespace weft::nccl_rma

extern "C" {

#define WEFT_EXPORT __attribute__((visibility("default")))
using namespace weft::nccl_rma;

WEFT_EXPORT RmaV14 ncclRmaPlugin_v14 = {
    "Weft",
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context_14,
    enroll_14,
    enroll_dmabuf_14,
    deregister,
    destroy_context,
    close_team,
    close_listener,
    put,
    put_signal_14,
    get,
    flush,
    test,
    progress,
    query_last_error,
    finalize,
};

WEFT_EXPORT RmaV13 ncclRmaPlugin_v13 = {
    "Weft",
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context_13,
    enroll_13,
    enroll_dmabuf_13,
    deregister,
    destroy_context,
    close_team,
    close_listener,
    put,
    put_signal_13,
    get,
    flush,
    test,
    progress,
    query_last_error,
    finalize,
};

// NCCL 2.30.3 and 2.30.4 drive a GIN table of type PROXY as later ones do an RMA table.
WEFT_EXPORT extern RmaV13 ncclGinPlugin_v13 __attribute__((alias("ncclRmaPlugin_v13")));
}
