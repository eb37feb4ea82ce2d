// SPDX-License-Identifier: Apache-2.0
//
// What NCCL and a library that serves its RMA interface agree on: two tables of functions, versions 13 and 14, and
// what goes through them.
//   auto* table = static_cast<const RmaV14*>(dlsym(library, "ncclRmaPlugin_v14"));
//   table->init(&context, commId, logger); table->devices(&count); table->listen(...); table->connect(...);
// Source: NCCL 2.30.7 (github.com/NVIDIA/nccl, tag v2.30.7-1), src/include/plugin/rma/rma_v14.h, rma_v13.h,
// gin/gin_v13.h, net/net_v12.h, nccl_net.h, nccl_device/net_device.h, nccl_common.h. Names, order, types and values
// are that interface; all else here is Weft's. NCCL looks for "ncclRmaPlugin_v14", then "_v13"
// (src/plugin/rma.cc); the library of 2.32.3 names _v16 and _v15, too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::nccl_rma {

enum NcclResult : int {  // ncclResult_t
  kNcclSuccess = 0,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
};

enum NcclLogLevel : int { kNcclLogWarn = 2, kNcclLogInfo = 3 };         // ncclDebugLogLevel
enum NcclLogPart : unsigned long { kNcclInit = 0x1, kNcclNet = 0x10 };  // ncclDebugLogSubSys
using NcclLogger = void (*)(NcclLogLevel level, unsigned long parts, const char* file, int line,
                            const char* format, ...);

constexpr size_t kHandleBytes = 128;  // NCCL_NET_HANDLE_MAXSIZE
constexpr int kMaxRequests = 32;      // NCCL_NET_MAX_REQUESTS, times maxRecvs: the commands that a ring holds
constexpr int kDevicesPerNic = 8;     // NCCL_NET_MAX_DEVS_PER_NIC_V12

enum PointerKind : int { kPointerHost = 1, kPointerCuda = 2, kPointerDmabuf = 4 };
enum SignalOp : uint32_t { kSignalInc = 1, kSignalAdd = 2 };
enum MemoryFlag : uint64_t { kForceStrictOrder = 1, kSignalNeverReset = 2 };
enum DeviceType : int { kDeviceGinProxy = 2 };  // NCCL_NET_DEVICE_GIN_PROXY
constexpr int kUndefinedId = -1;                // NCCL_NET_ID_UNDEF

struct PropertiesV12 {
  char* name;
  char* pci_path;
  uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbps;
  int port;
  float latency_us;
  int comms_max;
  int receives_max;
  DeviceType device_type;
  int device_version;
  struct {
    int count;
    int devices[kDevicesPerNic];
  } parts;
  size_t p2p_bytes_max;
  size_t collective_bytes_max;
  int multi_request_max;
  int16_t rail;
  int16_t plane;
};
static_assert(sizeof(PropertiesV12) == 128);

struct ConfigV14 {
  int contexts;
  int traffic_class;
  int rank_stride;
};
struct ConfigV13 {
  int signals;
  int counters;
  int contexts;
  int queue_depth;
  int traffic_class;
};
struct DeviceHandle {  // ncclNetDeviceHandle_v11_t
  DeviceType type;
  int version;
  void* handle;
  size_t bytes;
  int needs_progress;
};

// The entries that both versions share: before, between and after the ones that differ.
#define WEFT_RMA_SET_UP                                                           \
  const char* name;                                                               \
  NcclResult (*init)(void** context, uint64_t comm_id, NcclLogger logger);        \
  NcclResult (*devices)(int* count);                                              \
  NcclResult (*get_properties)(int device, PropertiesV12* properties);            \
  NcclResult (*listen)(void* context, int device, void* handle, void** listener); \
  NcclResult (*connect)(void* context, void* handles[], int ranks, int rank, void* listener, void** team);
#define WEFT_RMA_CLOSE                                \
  NcclResult (*deregister)(void* team, void* memory); \
  NcclResult (*destroy_context)(void* rma_context);   \
  NcclResult (*close_team)(void* team);               \
  NcclResult (*close_listener)(void* listener);
#define WEFT_RMA_PUT                                                                              \
  NcclResult (*put)(void* rma_context, int channel, uint64_t src_offset, void* src, size_t bytes, \
                    uint64_t dst_offset, void* dst, uint32_t rank, void** request);
#define WEFT_RMA_REST                                                                                   \
  NcclResult (*get)(void* rma_context, int channel, uint64_t remote_offset, void* remote, size_t bytes, \
                    uint64_t local_offset, void* local, uint32_t rank, void** request);                 \
  NcclResult (*flush)(void* rma_context, int channel, void* memory, uint32_t rank, void** request);     \
  NcclResult (*test)(void* team, void* request, int* done);                                             \
  NcclResult (*progress)(void* rma_context);                                                            \
  NcclResult (*query_last_error)(void* rma_context, bool* has_error);                                   \
  NcclResult (*finalize)(void* context);

struct RmaV14 {
  WEFT_RMA_SET_UP
  NcclResult (*create_context)(void* team, ConfigV14* config, void** rma_context);
  NcclResult (*enroll)(void* team, void* data, size_t bytes, int pointer_kind, uint64_t flags, void** memory);
  NcclResult (*enroll_dmabuf)(void* team, void* data, size_t bytes, int pointer_kind, uint64_t offset, int fd,
                              uint64_t flags, void** memory);
  WEFT_RMA_CLOSE
  WEFT_RMA_PUT
  NcclResult (*put_signal)(void* rma_context, int channel, uint64_t src_offset, void* src, size_t bytes,
                           uint64_t dst_offset, void* dst, uint32_t rank, uint64_t signal_offset,
                           void* signal, uint64_t value, uint32_t op, bool is_strong, void** request);
  WEFT_RMA_REST
};

// Version 13 is GIN's table of that number: contexts and memory also have a handle for device code, and every signal is
// a strong one.
struct RmaV13 {
  WEFT_RMA_SET_UP
  NcclResult (*create_context)(void* team, ConfigV13* config, void** rma_context, DeviceHandle** device);
  NcclResult (*enroll)(void* team, void* data, size_t bytes, int pointer_kind, uint64_t flags, void** memory,
                       void** device_memory);
  NcclResult (*enroll_dmabuf)(void* team, void* data, size_t bytes, int pointer_kind, uint64_t offset, int fd,
                              uint64_t flags, void** memory, void** device_memory);
  WEFT_RMA_CLOSE
  WEFT_RMA_PUT
  NcclResult (*put_signal)(void* rma_context, int channel, uint64_t src_offset, void* src, size_t bytes,
                           uint64_t dst_offset, void* dst, uint32_t rank, uint64_t signal_offset,
                           void* signal, uint64_t value, uint32_t op, void** request);
  WEFT_RMA_REST
};

}  // namespace weft::nccl_rma
