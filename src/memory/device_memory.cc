// SPDX-License-Identifier: Apache-2.0
#include "memory/device_memory.h"

#include "base/cuda_driver.h"
#include "base/log.h"

namespace weft {
namespace {

CUdeviceptr address(const void* at) {
  return reinterpret_cast<CUdeviceptr>(at);
}

// Runs `queue(driver, stream)` on a stream of its own, which waits for nobody, and waits until it is done.
template <class Queue>
Status run_apart(int ordinal, std::string_view what, Queue queue) {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));
  WEFT_TRY_ASSIGN(auto stream, OwnStream::create(ordinal));
  WEFT_TRY(logged(cuda_status(queue(current.driver(), static_cast<CUstream>(stream->get())), what)));
  return stream->wait();
}

}  // namespace

Status zero_device_memory(int ordinal, std::byte* at, uint64_t bytes) {
  return run_apart(ordinal, "zero device memory", [&](const CudaDriver& driver, CUstream stream) {
    return driver.cuMemsetD8Async(address(at), 0, bytes, stream);
  });
}

Status copy_from_device(int ordinal, void* dst, const std::byte* src, uint64_t bytes) {
  return run_apart(ordinal, "copy from device memory", [&](const CudaDriver& driver, CUstream stream) {
    return driver.cuMemcpyAsync(address(dst), address(src), bytes, stream);
  });
}

Status copy_to_device(int ordinal, std::byte* dst, const void* src, uint64_t bytes) {
  return run_apart(ordinal, "copy to device memory", [&](const CudaDriver& driver, CUstream stream) {
    return driver.cuMemcpyAsync(address(dst), address(src), bytes, stream);
  });
}

Result<std::unique_ptr<DeviceCopy>> DeviceCopy::create(int ordinal, const void* src, uint64_t bytes) {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));
  CUdeviceptr at = 0;
  WEFT_TRY(logged(
      cuda_status(current.driver().cuMemAlloc(&at, bytes), "allocate {} bytes on cuda:{}", bytes, ordinal)));
  auto copy = std::unique_ptr<DeviceCopy>(new DeviceCopy(ordinal, reinterpret_cast<std::byte*>(at)));
  WEFT_TRY(copy_to_device(ordinal, copy->data(), src, bytes));
  return copy;
}

DeviceCopy::~DeviceCopy() {
  Result<CudaContext> current = CudaContext::enter(ordinal_);
  if (current.ok()) current->driver().cuMemFree(address(data_));
}

Result<std::unique_ptr<OwnStream>> OwnStream::create(int ordinal) {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));
  CUstream stream = nullptr;
  WEFT_TRY(logged(cuda_status(current.driver().cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0),
                              "make a stream on cuda:{}", ordinal)));
  return std::unique_ptr<OwnStream>(new OwnStream(ordinal, stream));
}

OwnStream::~OwnStream() {
  Result<CudaContext> current = CudaContext::enter(ordinal_);
  if (current.ok()) current->driver().cuStreamDestroy(static_cast<CUstream>(stream_));
}

Status OwnStream::wait() const {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal_));
  return logged(cuda_status(current.driver().cuStreamSynchronize(static_cast<CUstream>(stream_)),
                            "wait for a stream of cuda:{}", ordinal_));
}

Status wait_for_device(int ordinal) {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));
  return cuda_status(current.driver().cuCtxSynchronize(), "wait for cuda:{}", ordinal);
}

}  // namespace weft
