// SPDX-License-Identifier: Apache-2.0
//
// What Weft uses of the CUDA driver 13.2: names and layouts of its headers.
// Written by tools/abi_headers.py, not to be edited. Functions are declared for their types alone: the library is opened
// at run time (docs/decisions/0008-providers-open-their-libraries-at-run-time.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {
// clang-format off

using CUaccessProperty = int;
using CUaccessPolicyWindow_v1 = struct CUaccessPolicyWindow_st;
using CUaccessPolicyWindow = CUaccessPolicyWindow_v1;
using CUsynchronizationPolicy = int;
using CUclusterSchedulingPolicy = int;
using CUevent = struct CUevent_st*;
using CUlaunchMemSyncDomainMap = struct CUlaunchMemSyncDomainMap_st;
using CUlaunchMemSyncDomain = int;
using CUgraphDeviceNode = struct CUgraphDeviceUpdatableNode_st*;
using CUlaunchAttributePortableClusterMode = int;
using CUsharedMemoryMode = int;
using CUlaunchAttributeID = int;
using CUlaunchAttributeValue = union CUlaunchAttributeValue_union;
using CUstream = struct CUstream_st*;
using CUlaunchAttribute = struct CUlaunchAttribute_st;
using CUmemLocationType = int;
using CUmemLocation_v1 = struct CUmemLocation_st;
using CUmemLocation = CUmemLocation_v1;
using CUmemAccess_flags = int;
using CUmemAllocationType = int;
using CUmemAllocationHandleType = int;
using CUcontext = struct CUctx_st*;
using CUdevice_v1 = int;
using CUdevice = CUdevice_v1;
using CUdeviceptr_v2 = unsigned long long;
using CUdeviceptr = CUdeviceptr_v2;
using CUfunction = struct CUfunc_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;
using CUipcMemHandle_v1 = struct CUipcMemHandle_st;
using CUipcMemHandle = CUipcMemHandle_v1;
using CUlaunchConfig = struct CUlaunchConfig_st;
using CUmemAccessDesc_v1 = struct CUmemAccessDesc_st;
using CUmemAccessDesc = CUmemAccessDesc_v1;
using CUmemAllocationProp_v1 = struct CUmemAllocationProp_st;
using CUmemAllocationProp = CUmemAllocationProp_v1;
using CUmemGenericAllocationHandle_v1 = unsigned long long;
using CUmemGenericAllocationHandle = CUmemGenericAllocationHandle_v1;
using CUmodule = struct CUmod_st*;
using CUresult = int;
using CUdevice_attribute = int;
using CUdevice_P2PAttribute = int;
using CUuuid = struct CUuuid_st;
using CUfunction_attribute = int;
using CUhostFn = void (*)(void*);
using CUmemAllocationGranularity_flags = int;
using CUmemRangeHandleType = int;
using CUmoduleLoadingMode = int;
using CUjit_option = int;
using CUpointer_attribute = int;
using CUstreamCaptureStatus = int;
using cuuint64_t = uint64_t;
using CUstreamCaptureMode = int;

constexpr int CU_MEMHOSTALLOC_PORTABLE = 1;
constexpr int CU_MEMHOSTREGISTER_PORTABLE = 1;
constexpr int CU_MEMHOSTALLOC_DEVICEMAP = 2;
constexpr int CU_MEMHOSTREGISTER_DEVICEMAP = 2;
// CUGPUDirectRDMAWritesOrdering_enum
constexpr int CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER = 100;
// CUdevice_P2PAttribute_enum
constexpr int CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED = 3;
// CUdevice_attribute_enum
constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;
constexpr int CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102;
constexpr int CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103;
constexpr int CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110;
constexpr int CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118;
constexpr int CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH = 120;
constexpr int CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122;
constexpr int CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124;
constexpr int CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128;
constexpr int CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134;
// CUevent_flags_enum
constexpr int CU_EVENT_DISABLE_TIMING = 2;
// CUfunction_attribute_enum
constexpr int CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0;
constexpr int CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1;
constexpr int CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3;
constexpr int CU_FUNC_ATTRIBUTE_NUM_REGS = 4;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
// CUipcMem_flags_enum
constexpr int CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1;
// CUlaunchAttributeID_enum
constexpr int CU_LAUNCH_ATTRIBUTE_COOPERATIVE = 2;
constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
// CUmemAccess_flags_enum
constexpr int CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3;
// CUmemAllocationGranularity_flags_enum
constexpr int CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0;
constexpr int CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1;
// CUmemAllocationHandleType_enum
constexpr int CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1;
// CUmemAllocationType_enum
constexpr int CU_MEM_ALLOCATION_TYPE_PINNED = 1;
// CUmemLocationType_enum
constexpr int CU_MEM_LOCATION_TYPE_DEVICE = 1;
constexpr int CU_MEM_LOCATION_TYPE_HOST_NUMA = 3;
// CUmemRangeHandleType_enum
constexpr int CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1;
// CUmemorytype_enum
constexpr int CU_MEMORYTYPE_DEVICE = 2;
// CUmoduleLoadingMode_enum
constexpr int CU_MODULE_LAZY_LOADING = 2;
// CUpointer_attribute_enum
constexpr int CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2;
constexpr int CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6;
constexpr int CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9;
constexpr int CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10;
// CUstreamCaptureMode_enum
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;
// CUstreamCaptureStatus_enum
constexpr int CU_STREAM_CAPTURE_STATUS_NONE = 0;
// CUstream_flags_enum
constexpr int CU_STREAM_NON_BLOCKING = 1;
// cudaError_enum
constexpr int CUDA_SUCCESS = 0;
constexpr int CUDA_ERROR_NOT_READY = 600;
constexpr int CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704;

struct CUaccessPolicyWindow_st {
  void* base_ptr;
  size_t num_bytes;
  float hitRatio;
  CUaccessProperty hitProp, missProp;
};

struct CUipcMemHandle_st {
  char reserved[64];
};

struct CUlaunchMemSyncDomainMap_st {
  unsigned char default_, remote;
};

union CUlaunchAttributeValue_union {
  char pad[64];
  CUaccessPolicyWindow accessPolicyWindow;
  int cooperative;
  CUsynchronizationPolicy syncPolicy;
  struct {
    unsigned int x, y, z;
  } clusterDim;
  CUclusterSchedulingPolicy clusterSchedulingPolicyPreference;
  int programmaticStreamSerializationAllowed;
  struct {
    CUevent event;
    int flags, triggerAtBlockStart;
  } programmaticEvent;
  struct {
    CUevent event;
    int flags;
  } launchCompletionEvent;
  int priority;
  CUlaunchMemSyncDomainMap memSyncDomainMap;
  CUlaunchMemSyncDomain memSyncDomain;
  struct {
    unsigned int x, y, z;
  } preferredClusterDim;
  struct {
    int deviceUpdatable;
    CUgraphDeviceNode devNode;
  } deviceUpdatableKernelNode;
  unsigned int sharedMemCarveout, nvlinkUtilCentricScheduling;
  CUlaunchAttributePortableClusterMode portableClusterSizeMode;
  CUsharedMemoryMode sharedMemoryMode;
};

struct CUlaunchAttribute_st {
  CUlaunchAttributeID id;
  char pad[4];
  CUlaunchAttributeValue value;
};

struct CUlaunchConfig_st {
  unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned int numAttrs;
};

struct CUmemLocation_st {
  CUmemLocationType type;
  union {
    int id;
  };
};

struct CUmemAccessDesc_st {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

struct CUmemAllocationProp_st {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType, gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct CUuuid_st {
  char bytes[16];
};

CUresult cuCtxCreate_v2(CUcontext* pctx, unsigned int flags, CUdevice dev);
CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags);
CUresult cuCtxGetCurrent(CUcontext* pctx);
CUresult cuCtxGetDevice(CUdevice* device);
CUresult cuCtxPopCurrent_v2(CUcontext* pctx);
CUresult cuCtxPushCurrent_v2(CUcontext ctx);
CUresult cuCtxSynchronize();
CUresult cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev);
CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev);
CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGetName(char* name, int len, CUdevice dev);
CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attrib, CUdevice srcDevice,
    CUdevice dstDevice);
CUresult cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev);
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice dev);
CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev);
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev);
CUresult cuDriverGetVersion(int* driverVersion);
CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags);
CUresult cuEventDestroy_v2(CUevent hEvent);
CUresult cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd);
CUresult cuEventQuery(CUevent hEvent);
CUresult cuEventRecord(CUevent hEvent, CUstream hStream);
CUresult cuEventSynchronize(CUevent hEvent);
CUresult cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc);
CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value);
CUresult cuGetErrorName(CUresult error, const char** pStr);
CUresult cuGetErrorString(CUresult error, const char** pStr);
CUresult cuInit(unsigned int Flags);
CUresult cuIpcCloseMemHandle(CUdeviceptr dptr);
CUresult cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pdptr, CUipcMemHandle handle, unsigned int Flags);
CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData);
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra);
CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size);
CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr,
    unsigned long long flags);
CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize);
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
    unsigned long long flags);
CUresult cuMemExportToShareableHandle(void* shareableHandle, CUmemGenericAllocationHandle handle,
    CUmemAllocationHandleType handleType, unsigned long long flags);
CUresult cuMemFreeHost(void* p);
CUresult cuMemFree_v2(CUdeviceptr dptr);
CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr);
CUresult cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr);
CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
    CUmemAllocationGranularity_flags option);
CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr dptr, size_t size,
    CUmemRangeHandleType handleType, unsigned long long flags);
CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags);
CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags);
CUresult cuMemHostUnregister(void* p);
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* osHandle,
    CUmemAllocationHandleType shHandleType);
CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
    unsigned long long flags);
CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr);
CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count);
CUresult cuMemUnmap(CUdeviceptr ptr, size_t size);
CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream);
CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream);
CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream);
CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name);
CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode);
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int numOptions,
    CUjit_option* options, void** optionValues);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func, int blockSize,
    size_t dynamicSMemSize);
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr);
CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr ptr);
CUresult cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority);
CUresult cuStreamDestroy_v2(CUstream hStream);
CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus);
CUresult cuStreamQuery(CUstream hStream);
CUresult cuStreamSynchronize(CUstream hStream);
CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags);
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr addr, cuuint64_t value, unsigned int flags);
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode);

// clang-format on
}  // namespace weft
