// SPDX-License-Identifier: Apache-2.0
#include "memory/local_memory.h"

#include <cstring>
#include <new>

#include "base/cuda_driver.h"
#include "base/log.h"

namespace weft {
namespace {

constexpr std::align_val_t kHostAlignment{4096};

Result<std::byte*> allocate_cuda(Device device, uint64_t bytes) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(device.ordinal));
  CUdeviceptr address = 0;
  WEFT_TRY(cuda_status(driver->cuMemAlloc(&address, bytes), "allocate device memory for collectives"));
  WEFT_TRY(cuda_status(driver->cuMemsetD8Async(address, 0, bytes, nullptr), "clear device memory"));
  WEFT_TRY(cuda_status(driver->cuCtxSynchronize(), "clear device memory"));
  return reinterpret_cast<std::byte*>(address);
}

}  // namespace

Result<std::unique_ptr<LocalMemory>> LocalMemory::create(Device device, uint64_t bytes) {
  std::byte* data = nullptr;
  if (device.is_host()) {
    data = static_cast<std::byte*>(operator new(bytes, kHostAlignment, std::nothrow));
    if (!data) return logged(Status::make(Code::kSystem, "no memory for {} bytes of scratch", bytes));
    std::memset(data, 0, bytes);
  } else {
    WEFT_TRY_ASSIGN(data, allocate_cuda(device, bytes));
  }
  return std::unique_ptr<LocalMemory>(new LocalMemory(device, data, bytes));
}

LocalMemory::~LocalMemory() {
  if (device_.is_host()) {
    operator delete(data_, kHostAlignment);
    return;
  }
  auto driver = cuda_driver();
  if (!driver.ok()) return;
  auto current = CudaContext::enter(device_.ordinal);
  if (current.ok()) (*driver)->cuMemFree(reinterpret_cast<CUdeviceptr>(data_));
}

Status LocalMemory::write(uint64_t offset, const void* src, uint64_t bytes) {
  if (bytes == 0) return {};  // of an empty list, whose address may be null
  if (device_.is_host()) {
    std::memcpy(data_ + offset, src, bytes);
    return {};
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(device_.ordinal));
  WEFT_TRY(cuda_status(driver->cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(data_ + offset),
                                             reinterpret_cast<CUdeviceptr>(src), bytes, nullptr),
                       "copy a collective program to the device"));
  return cuda_status(driver->cuCtxSynchronize(), "copy a collective program to the device");
}

// The driver stages pageable memory before it returns, so `src` is free again.
Status LocalMemory::write_in_order(uint64_t offset, const void* src, uint64_t bytes, void* stream) {
  if (device_.is_host()) return write(offset, src, bytes);
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(device_.ordinal));
  return cuda_status(
      driver->cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(data_ + offset), reinterpret_cast<CUdeviceptr>(src),
                            bytes, static_cast<CUstream>(stream)),
      "copy sizes to the device");
}

}  // namespace weft
