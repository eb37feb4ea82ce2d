// SPDX-License-Identifier: Apache-2.0
#include "base/cuda_copies.h"

#include <atomic>
#include <map>
#include <mutex>

namespace weft {
namespace {

std::atomic<bool> in_own_context = false;

// Made on first use and kept.
Result<CUcontext> own_context(const CudaDriver& driver, int ordinal) {
  static std::mutex mutex;
  static std::map<int, CUcontext> contexts;
  std::lock_guard lock(mutex);
  if (auto found = contexts.find(ordinal); found != contexts.end()) return found->second;
  CUdevice device = 0;
  CUcontext context = nullptr, popped = nullptr;
  WEFT_TRY(cuda_status(driver.cuDeviceGet(&device, ordinal), "finding CUDA device {}", ordinal));
  WEFT_TRY(cuda_status(driver.cuCtxCreate(&context, 0, device), "making a context for copies on device {}",
                       ordinal));
  WEFT_TRY(cuda_status(driver.cuCtxPopCurrent(&popped), "leaving the context for copies"));
  contexts[ordinal] = context;
  return context;
}

}  // namespace

void copy_in_own_context() {
  in_own_context.store(true, std::memory_order_relaxed);
}

bool copies_in_own_context() {
  return in_own_context.load(std::memory_order_relaxed);
}

Result<CudaContext> enter_copy_context(int device) {
  if (!copies_in_own_context()) return CudaContext::enter(device);
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(CUcontext context, own_context(*driver, device));
  return CudaContext::enter(context);
}

}  // namespace weft
