// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, opened at run time: Weft is built without a CUDA header and imports on machines without a
// driver.
//   WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
//   WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));  // the primary one, until scope end
//   WEFT_TRY(cuda_status(driver->cuMemUnmap(address, bytes), "unmapping a window"));
// Types and constants have NVIDIA's names, in namespace weft. Threads: the table is constant once made; which calls may run
// at once is the driver's own rule. Streams: a null CUstream is the legacy default stream, as in PyTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/cuda_abi.h"
#include "base/status.h"

namespace weft {

// WEFT_CUDA_FUNCTION(member, symbol): in the version that drivers have since 12.0.
#define WEFT_CUDA_FUNCTIONS(WEFT_CUDA_FUNCTION)                                            \
  WEFT_CUDA_FUNCTION(cuInit, cuInit)                                                       \
  WEFT_CUDA_FUNCTION(cuDriverGetVersion, cuDriverGetVersion)                               \
  WEFT_CUDA_FUNCTION(cuGetErrorName, cuGetErrorName)                                       \
  WEFT_CUDA_FUNCTION(cuGetErrorString, cuGetErrorString)                                   \
  WEFT_CUDA_FUNCTION(cuDeviceGet, cuDeviceGet)                                             \
  WEFT_CUDA_FUNCTION(cuDeviceGetCount, cuDeviceGetCount)                                   \
  WEFT_CUDA_FUNCTION(cuDeviceGetName, cuDeviceGetName)                                     \
  WEFT_CUDA_FUNCTION(cuDeviceGetUuid, cuDeviceGetUuid)                                     \
  WEFT_CUDA_FUNCTION(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId)                             \
  WEFT_CUDA_FUNCTION(cuDeviceTotalMem, cuDeviceTotalMem_v2)                                \
  WEFT_CUDA_FUNCTION(cuDeviceGetAttribute, cuDeviceGetAttribute)                           \
  WEFT_CUDA_FUNCTION(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer)                         \
  WEFT_CUDA_FUNCTION(cuDeviceGetP2PAttribute, cuDeviceGetP2PAttribute)                     \
  WEFT_CUDA_FUNCTION(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                   \
  WEFT_CUDA_FUNCTION(cuCtxGetCurrent, cuCtxGetCurrent)                                     \
  WEFT_CUDA_FUNCTION(cuCtxCreate, cuCtxCreate_v2)                                          \
  WEFT_CUDA_FUNCTION(cuCtxPushCurrent, cuCtxPushCurrent_v2)                                \
  WEFT_CUDA_FUNCTION(cuCtxPopCurrent, cuCtxPopCurrent_v2)                                  \
  WEFT_CUDA_FUNCTION(cuCtxGetDevice, cuCtxGetDevice)                                       \
  WEFT_CUDA_FUNCTION(cuCtxSynchronize, cuCtxSynchronize)                                   \
  WEFT_CUDA_FUNCTION(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess)                         \
  WEFT_CUDA_FUNCTION(cuMemAlloc, cuMemAlloc_v2)                                            \
  WEFT_CUDA_FUNCTION(cuMemFree, cuMemFree_v2)                                              \
  WEFT_CUDA_FUNCTION(cuMemGetAddressRange, cuMemGetAddressRange_v2)                        \
  WEFT_CUDA_FUNCTION(cuMemHostAlloc, cuMemHostAlloc)                                       \
  WEFT_CUDA_FUNCTION(cuMemFreeHost, cuMemFreeHost)                                         \
  WEFT_CUDA_FUNCTION(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2)              \
  WEFT_CUDA_FUNCTION(cuMemHostRegister, cuMemHostRegister_v2)                              \
  WEFT_CUDA_FUNCTION(cuMemHostUnregister, cuMemHostUnregister)                             \
  WEFT_CUDA_FUNCTION(cuMemcpyAsync, cuMemcpyAsync)                                         \
  WEFT_CUDA_FUNCTION(cuMemsetD8Async, cuMemsetD8Async)                                     \
  WEFT_CUDA_FUNCTION(cuMemsetD32Async, cuMemsetD32Async)                                   \
  WEFT_CUDA_FUNCTION(cuMemCreate, cuMemCreate)                                             \
  WEFT_CUDA_FUNCTION(cuMemRelease, cuMemRelease)                                           \
  WEFT_CUDA_FUNCTION(cuMemAddressReserve, cuMemAddressReserve)                             \
  WEFT_CUDA_FUNCTION(cuMemAddressFree, cuMemAddressFree)                                   \
  WEFT_CUDA_FUNCTION(cuMemMap, cuMemMap)                                                   \
  WEFT_CUDA_FUNCTION(cuMemUnmap, cuMemUnmap)                                               \
  WEFT_CUDA_FUNCTION(cuMemSetAccess, cuMemSetAccess)                                       \
  WEFT_CUDA_FUNCTION(cuMemGetAccess, cuMemGetAccess)                                       \
  WEFT_CUDA_FUNCTION(cuMemExportToShareableHandle, cuMemExportToShareableHandle)           \
  WEFT_CUDA_FUNCTION(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle)       \
  WEFT_CUDA_FUNCTION(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle)             \
  WEFT_CUDA_FUNCTION(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity)         \
  WEFT_CUDA_FUNCTION(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange)         \
  WEFT_CUDA_FUNCTION(cuIpcGetMemHandle, cuIpcGetMemHandle)                                 \
  WEFT_CUDA_FUNCTION(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2)                            \
  WEFT_CUDA_FUNCTION(cuIpcCloseMemHandle, cuIpcCloseMemHandle)                             \
  WEFT_CUDA_FUNCTION(cuPointerGetAttribute, cuPointerGetAttribute)                         \
  WEFT_CUDA_FUNCTION(cuPointerSetAttribute, cuPointerSetAttribute)                         \
  WEFT_CUDA_FUNCTION(cuModuleLoadDataEx, cuModuleLoadDataEx)                               \
  WEFT_CUDA_FUNCTION(cuModuleGetFunction, cuModuleGetFunction)                             \
  WEFT_CUDA_FUNCTION(cuModuleGetLoadingMode, cuModuleGetLoadingMode)                       \
  WEFT_CUDA_FUNCTION(cuFuncGetAttribute, cuFuncGetAttribute)                               \
  WEFT_CUDA_FUNCTION(cuFuncSetAttribute, cuFuncSetAttribute)                               \
  WEFT_CUDA_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor,                          \
                     cuOccupancyMaxActiveBlocksPerMultiprocessor)                          \
  WEFT_CUDA_FUNCTION(cuLaunchKernelEx, cuLaunchKernelEx)                                   \
  WEFT_CUDA_FUNCTION(cuLaunchHostFunc, cuLaunchHostFunc)                                   \
  WEFT_CUDA_FUNCTION(cuStreamCreateWithPriority, cuStreamCreateWithPriority)               \
  WEFT_CUDA_FUNCTION(cuStreamDestroy, cuStreamDestroy_v2)                                  \
  WEFT_CUDA_FUNCTION(cuStreamSynchronize, cuStreamSynchronize)                             \
  WEFT_CUDA_FUNCTION(cuStreamQuery, cuStreamQuery)                                         \
  WEFT_CUDA_FUNCTION(cuStreamWaitEvent, cuStreamWaitEvent)                                 \
  WEFT_CUDA_FUNCTION(cuStreamIsCapturing, cuStreamIsCapturing)                             \
  WEFT_CUDA_FUNCTION(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode) \
  WEFT_CUDA_FUNCTION(cuStreamWriteValue64, cuStreamWriteValue64_v2)                        \
  WEFT_CUDA_FUNCTION(cuEventCreate, cuEventCreate)                                         \
  WEFT_CUDA_FUNCTION(cuEventDestroy, cuEventDestroy_v2)                                    \
  WEFT_CUDA_FUNCTION(cuEventRecord, cuEventRecord)                                         \
  WEFT_CUDA_FUNCTION(cuEventQuery, cuEventQuery)                                           \
  WEFT_CUDA_FUNCTION(cuEventSynchronize, cuEventSynchronize)                               \
  WEFT_CUDA_FUNCTION(cuEventElapsedTime, cuEventElapsedTime)

// One pointer per function, all set: a driver that lacks one (older than 12.0) is refused as a whole.
struct CudaDriver {
#define WEFT_CUDA_FUNCTION(member, symbol) decltype(&weft::symbol) member = nullptr;
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
