// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, opened at run time: Weft is built without a CUDA header and imports on machines without a
// driver.
//   WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
//   WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));  // the primary one, until scope end
//   WEFT_TRY(cuda_status(driver->cuMemUnmap(address, bytes), "unmapping a window"));
// Types and constants keep NVIDIA's names and values and live in namespace weft; tests/unit/test_cuda_abi.py
// compares each size, offset, value and signature with cuda.h where there is one. Threads: the table is
// constant once made; which calls may run at once is the driver's own rule. Streams: a null CUstream is the
// legacy default stream, as in PyTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace weft {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUhostFn = void (*)(void* user_data);

// The results that callers tell apart; every other non-zero one is just an error.
constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_OUT_OF_MEMORY = 2;
constexpr CUresult CUDA_ERROR_NO_DEVICE = 100;
constexpr CUresult CUDA_ERROR_INVALID_DEVICE = 101;
constexpr CUresult CUDA_ERROR_NOT_READY = 600;
constexpr CUresult CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704;
constexpr CUresult CUDA_ERROR_NOT_PERMITTED = 800;
constexpr CUresult CUDA_ERROR_NOT_SUPPORTED = 801;

// CUdevice_attribute
constexpr int CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10;
constexpr int CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13;  // kHz
constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
constexpr int CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33;
constexpr int CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34;
constexpr int CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38;
constexpr int CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95;
constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;
constexpr int CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102;
constexpr int CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103;
constexpr int CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110;
constexpr int CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED = 116;
constexpr int CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118;
constexpr int CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH = 120;
constexpr int CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122;
constexpr int CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124;
constexpr int CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128;
constexpr int CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134;

// CUdevice_P2PAttribute
constexpr int CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK = 1;
constexpr int CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED = 2;
constexpr int CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3;

// CUfunction_attribute
constexpr int CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0;
constexpr int CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1;
constexpr int CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3;
constexpr int CU_FUNC_ATTRIBUTE_NUM_REGS = 4;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;

// CUpointer_attribute, and the values of MEMORY_TYPE
constexpr int CU_POINTER_ATTRIBUTE_CONTEXT = 1;
constexpr int CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2;
constexpr int CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3;
constexpr int CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6;
constexpr int CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9;
constexpr int CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10;
constexpr int CU_MEMORYTYPE_HOST = 1;
constexpr int CU_MEMORYTYPE_DEVICE = 2;

// Virtual memory management
constexpr int CU_MEM_ALLOCATION_TYPE_PINNED = 1;
constexpr int CU_MEM_LOCATION_TYPE_DEVICE = 1;
constexpr int CU_MEM_LOCATION_TYPE_HOST_NUMA = 3;
constexpr int CU_MEM_HANDLE_TYPE_NONE = 0;
constexpr int CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1;
constexpr int CU_MEM_HANDLE_TYPE_FABRIC = 8;
constexpr int CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3;
constexpr int CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0;
constexpr int CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1;
constexpr int CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1;
constexpr int CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER = 100;

struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

// CUDA IPC, pinned memory, streams, events
constexpr unsigned CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1;
constexpr unsigned kCuMemHostAllocPortable =
    1;  // CU_MEMHOSTALLOC_* and CU_MEMHOSTREGISTER_* are macros in cuda.h
constexpr unsigned kCuMemHostAllocDeviceMap = 2;
constexpr unsigned kCuMemHostRegisterPortable = 1;
constexpr unsigned kCuMemHostRegisterDeviceMap = 2;
constexpr unsigned CU_STREAM_DEFAULT = 0;
constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
constexpr unsigned CU_EVENT_DEFAULT = 0;
constexpr unsigned CU_EVENT_BLOCKING_SYNC = 1;
constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
constexpr int CU_STREAM_CAPTURE_STATUS_NONE = 0;
constexpr int CU_STREAM_CAPTURE_STATUS_ACTIVE = 1;
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;

struct CUipcMemHandle {
  char reserved[64];
};
struct CUuuid {
  char bytes[16];
};

// Modules
constexpr int CU_MODULE_LAZY_LOADING = 2;

// Kernel launch
constexpr int CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2;
constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
constexpr int CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

union CUlaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct CUlaunchAttribute {
  int id;
  char pad[4];
  CUlaunchAttributeValue value;
};
struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

// WEFT_CUDA_FUNCTION(member, symbol, parameters). Symbols name the version whose parameters stand here.
#define WEFT_CUDA_FUNCTIONS(WEFT_CUDA_FUNCTION)                                                             \
  WEFT_CUDA_FUNCTION(cuInit, cuInit, (unsigned))                                                            \
  WEFT_CUDA_FUNCTION(cuDriverGetVersion, cuDriverGetVersion, (int*))                                        \
  WEFT_CUDA_FUNCTION(cuGetErrorName, cuGetErrorName, (CUresult, const char**))                              \
  WEFT_CUDA_FUNCTION(cuGetErrorString, cuGetErrorString, (CUresult, const char**))                          \
  WEFT_CUDA_FUNCTION(cuDeviceGet, cuDeviceGet, (CUdevice*, int))                                            \
  WEFT_CUDA_FUNCTION(cuDeviceGetCount, cuDeviceGetCount, (int*))                                            \
  WEFT_CUDA_FUNCTION(cuDeviceGetName, cuDeviceGetName, (char*, int, CUdevice))                              \
  WEFT_CUDA_FUNCTION(cuDeviceGetUuid, cuDeviceGetUuid, (CUuuid*, CUdevice))                                 \
  WEFT_CUDA_FUNCTION(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, (char*, int, CUdevice))                      \
  WEFT_CUDA_FUNCTION(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t*, CUdevice))                            \
  WEFT_CUDA_FUNCTION(cuDeviceGetAttribute, cuDeviceGetAttribute, (int*, int, CUdevice))                     \
  WEFT_CUDA_FUNCTION(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, (int*, CUdevice, CUdevice))              \
  WEFT_CUDA_FUNCTION(cuDeviceGetP2PAttribute, cuDeviceGetP2PAttribute, (int*, int, CUdevice, CUdevice))     \
  WEFT_CUDA_FUNCTION(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))            \
  WEFT_CUDA_FUNCTION(cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext*))                                        \
  WEFT_CUDA_FUNCTION(cuCtxCreate, cuCtxCreate_v2, (CUcontext*, unsigned, CUdevice))                         \
  WEFT_CUDA_FUNCTION(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext))                                    \
  WEFT_CUDA_FUNCTION(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext*))                                     \
  WEFT_CUDA_FUNCTION(cuCtxGetDevice, cuCtxGetDevice, (CUdevice*))                                           \
  WEFT_CUDA_FUNCTION(cuCtxSynchronize, cuCtxSynchronize, ())                                                \
  WEFT_CUDA_FUNCTION(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, (CUcontext, unsigned))                   \
  WEFT_CUDA_FUNCTION(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr*, size_t))                                     \
  WEFT_CUDA_FUNCTION(cuMemFree, cuMemFree_v2, (CUdeviceptr))                                                \
  WEFT_CUDA_FUNCTION(cuMemGetAddressRange, cuMemGetAddressRange_v2, (CUdeviceptr*, size_t*, CUdeviceptr))   \
  WEFT_CUDA_FUNCTION(cuMemHostAlloc, cuMemHostAlloc, (void**, size_t, unsigned))                            \
  WEFT_CUDA_FUNCTION(cuMemFreeHost, cuMemFreeHost, (void*))                                                 \
  WEFT_CUDA_FUNCTION(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2,                               \
                     (CUdeviceptr*, void*, unsigned))                                                       \
  WEFT_CUDA_FUNCTION(cuMemHostRegister, cuMemHostRegister_v2, (void*, size_t, unsigned))                    \
  WEFT_CUDA_FUNCTION(cuMemHostUnregister, cuMemHostUnregister, (void*))                                     \
  WEFT_CUDA_FUNCTION(cuMemcpyAsync, cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))            \
  WEFT_CUDA_FUNCTION(cuMemsetD8Async, cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))      \
  WEFT_CUDA_FUNCTION(cuMemsetD32Async, cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream))         \
  WEFT_CUDA_FUNCTION(                                                                                       \
      cuMemCreate, cuMemCreate,                                                                             \
      (CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long))              \
  WEFT_CUDA_FUNCTION(cuMemRelease, cuMemRelease, (CUmemGenericAllocationHandle))                            \
  WEFT_CUDA_FUNCTION(cuMemAddressReserve, cuMemAddressReserve,                                              \
                     (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))                       \
  WEFT_CUDA_FUNCTION(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr, size_t))                             \
  WEFT_CUDA_FUNCTION(cuMemMap, cuMemMap,                                                                    \
                     (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))       \
  WEFT_CUDA_FUNCTION(cuMemUnmap, cuMemUnmap, (CUdeviceptr, size_t))                                         \
  WEFT_CUDA_FUNCTION(cuMemSetAccess, cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t)) \
  WEFT_CUDA_FUNCTION(cuMemGetAccess, cuMemGetAccess,                                                        \
                     (unsigned long long*, const CUmemLocation*, CUdeviceptr))                              \
  WEFT_CUDA_FUNCTION(cuMemExportToShareableHandle, cuMemExportToShareableHandle,                            \
                     (void*, CUmemGenericAllocationHandle, int, unsigned long long))                        \
  WEFT_CUDA_FUNCTION(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle,                        \
                     (CUmemGenericAllocationHandle*, void*, int))                                           \
  WEFT_CUDA_FUNCTION(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle,                              \
                     (CUmemGenericAllocationHandle*, void*))                                                \
  WEFT_CUDA_FUNCTION(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity,                          \
                     (size_t*, const CUmemAllocationProp*, int))                                            \
  WEFT_CUDA_FUNCTION(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange,                          \
                     (void*, CUdeviceptr, size_t, int, unsigned long long))                                 \
  WEFT_CUDA_FUNCTION(cuIpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle*, CUdeviceptr))                  \
  WEFT_CUDA_FUNCTION(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr*, CUipcMemHandle, unsigned))   \
  WEFT_CUDA_FUNCTION(cuIpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr))                               \
  WEFT_CUDA_FUNCTION(cuPointerGetAttribute, cuPointerGetAttribute, (void*, int, CUdeviceptr))               \
  WEFT_CUDA_FUNCTION(cuPointerSetAttribute, cuPointerSetAttribute, (const void*, int, CUdeviceptr))         \
  WEFT_CUDA_FUNCTION(cuModuleLoadDataEx, cuModuleLoadDataEx,                                                \
                     (CUmodule*, const void*, unsigned, int*, void**))                                      \
  WEFT_CUDA_FUNCTION(cuModuleGetFunction, cuModuleGetFunction, (CUfunction*, CUmodule, const char*))        \
  WEFT_CUDA_FUNCTION(cuModuleGetLoadingMode, cuModuleGetLoadingMode, (int*))                                \
  WEFT_CUDA_FUNCTION(cuFuncGetAttribute, cuFuncGetAttribute, (int*, int, CUfunction))                       \
  WEFT_CUDA_FUNCTION(cuFuncSetAttribute, cuFuncSetAttribute, (CUfunction, int, int))                        \
  WEFT_CUDA_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                           \
                     cuOccupancyMaxActiveBlocksPerMultiprocessor, (int*, CUfunction, int, size_t))          \
  WEFT_CUDA_FUNCTION(cuLaunchKernelEx, cuLaunchKernelEx,                                                    \
                     (const CUlaunchConfig*, CUfunction, void**, void**))                                   \
  WEFT_CUDA_FUNCTION(cuLaunchHostFunc, cuLaunchHostFunc, (CUstream, CUhostFn, void*))                       \
  WEFT_CUDA_FUNCTION(cuStreamCreateWithPriority, cuStreamCreateWithPriority, (CUstream*, unsigned, int))    \
  WEFT_CUDA_FUNCTION(cuStreamDestroy, cuStreamDestroy_v2, (CUstream))                                       \
  WEFT_CUDA_FUNCTION(cuStreamSynchronize, cuStreamSynchronize, (CUstream))                                  \
  WEFT_CUDA_FUNCTION(cuStreamQuery, cuStreamQuery, (CUstream))                                              \
  WEFT_CUDA_FUNCTION(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream, CUevent, unsigned))                   \
  WEFT_CUDA_FUNCTION(cuStreamIsCapturing, cuStreamIsCapturing, (CUstream, int*))                            \
  WEFT_CUDA_FUNCTION(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int*))          \
  WEFT_CUDA_FUNCTION(cuStreamWriteValue64, cuStreamWriteValue64_v2,                                         \
                     (CUstream, CUdeviceptr, uint64_t, unsigned))                                           \
  WEFT_CUDA_FUNCTION(cuEventCreate, cuEventCreate, (CUevent*, unsigned))                                    \
  WEFT_CUDA_FUNCTION(cuEventDestroy, cuEventDestroy_v2, (CUevent))                                          \
  WEFT_CUDA_FUNCTION(cuEventRecord, cuEventRecord, (CUevent, CUstream))                                     \
  WEFT_CUDA_FUNCTION(cuEventQuery, cuEventQuery, (CUevent))                                                 \
  WEFT_CUDA_FUNCTION(cuEventSynchronize, cuEventSynchronize, (CUevent))                                     \
  WEFT_CUDA_FUNCTION(cuEventElapsedTime, cuEventElapsedTime, (float*, CUevent, CUevent))

// One pointer per function, all set: a driver that lacks one (older than 12.0) is refused as a whole.
struct CudaDriver {
#define WEFT_CUDA_FUNCTION(member, symbol, parameters) CUresult(*member) parameters = nullptr;
  WEFT_CUDA_FUNCTIONS(WEFT_CUDA_FUNCTION)
#undef WEFT_CUDA_FUNCTION
  int version = 0;       // 13000 for CUDA 13.0
  int device_count = 0;  // at least 1
};

// The initialised driver. kUnsupported, with the reason, where there is no library, no device or too old a
// driver; the answer never changes within a process. A child that was forked after the first call gets
// kUnsupported: the driver does not work there.
Result<const CudaDriver*> cuda_driver();

// kSystem with what was being done and the driver's own name and text for `result`.
Status cuda_failure(CUresult result, const std::string& what);

// Ok for CUDA_SUCCESS, else cuda_failure(). The pattern is filled in only then: this stands on launch paths.
//   WEFT_TRY(cuda_status(driver->cuMemUnmap(address, bytes), "unmapping {} bytes", bytes));
template <class... Args>
Status cuda_status(CUresult result, std::string_view pattern, const Args&... args) {
  return result == CUDA_SUCCESS ? Status() : cuda_failure(result, text(pattern, args...));
}

// Whether kernels, everybody's in this process, are loaded when they are first launched: a launch may then wait until all
// that runs has ended. False without a driver.
bool cuda_loads_lazily();

// An attribute of device `ordinal`, such as CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
Result<int> cuda_device_attribute(int ordinal, int attribute);

// Makes the primary context of a device (the one that PyTorch uses) current on this thread; the previous one
// returns when this goes out of scope. The context is retained once per process and never released.
class CudaContext {
 public:
  static Result<CudaContext> enter(int ordinal);
  static Result<CudaContext> enter(CUcontext context);  // another one than the primary
  CudaContext(CudaContext&& other) noexcept
      : driver_(other.driver_), is_pushed_(std::exchange(other.is_pushed_, false)) {}
  CudaContext& operator=(CudaContext&&) = delete;
  ~CudaContext();

  const CudaDriver& driver() const { return *driver_; }

 private:
  CudaContext(const CudaDriver* driver, bool is_pushed) : driver_(driver), is_pushed_(is_pushed) {}
  const CudaDriver* driver_;
  bool is_pushed_;  // else it was current already
};

// While it lives, this thread may allocate and ask for events although some thread captures a CUDA graph. The driver
// refuses such calls otherwise, and ends the capture with an error.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaDriver& driver) : driver_(driver) {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  const CudaDriver& driver_;
  int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // after the exchange: the mode to restore
};

}  // namespace weft
