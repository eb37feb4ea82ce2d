// SPDX-License-Identifier: Apache-2.0
#include "memory/device_memory.h"

#include "base/cuda_driver.h"

namespace weft {
namespace {

CUdeviceptr address(const void* at) {
  return reinterpret_cast<CUdeviceptr>(at);
}

// Runs `queue(driver, stream)` on a stream of its own, which waits for nobody, and waits until it is done.
template <class Queue>
Status run_apart(int ordinal, std::string_view what, Queue queue) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(ordinal));
  CUstream stream = nullptr;
  WEFT_TRY(cuda_status(driver->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0), what));
  CUresult result = queue(*driver, stream);
  if (result == CUDA_SUCCESS) result = driver->cuStreamSynchronize(stream);
  driver->cuStreamDestroy(stream);
  return cuda_status(result, what);
}

}  // namespace

Status zero_device_memory(int ordinal, std::byte* at, uint64_t bytes) {
  return run_apart(ordinal, "zeroing device memory", [&](const CudaDriver& driver, CUstream stream) {
    return driver.cuMemsetD8Async(address(at), 0, bytes, stream);
  });
}

Status copy_to_device(int ordinal, std::byte* dst, const void* src, uint64_t bytes) {
  return run_apart(ordinal, "copying to device memory", [&](const CudaDriver& driver, CUstream stream) {
    return driver.cuMemcpyAsync(address(dst), address(src), bytes, stream);
  });
}

Result<std::unique_ptr<DeviceCopy>> DeviceCopy::create(int ordinal, const void* src, uint64_t bytes) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(ordinal));
  CUdeviceptr at = 0;
  WEFT_TRY(
      cuda_status(driver->cuMemAlloc(&at, bytes), text("allocating {} bytes on cuda:{}", bytes, ordinal)));
  auto copy = std::unique_ptr<DeviceCopy>(new DeviceCopy(ordinal, reinterpret_cast<std::byte*>(at)));
  WEFT_TRY(copy_to_device(ordinal, copy->data(), src, bytes));
  return copy;
}

DeviceCopy::~DeviceCopy() {
  const Result<const CudaDriver*> driver = cuda_driver();
  const Result<CudaContext> context = CudaContext::enter(ordinal_);
  if (driver.ok() && context.ok()) (*driver)->cuMemFree(address(data_));
}

Status wait_for_device(int ordinal) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(ordinal));
  return cuda_status(driver->cuCtxSynchronize(), text("waiting for cuda:{}", ordinal));
}

}  // namespace weft
