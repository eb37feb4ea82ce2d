// SPDX-License-Identifier: Apache-2.0
#include "base/cuda_driver.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "base/log.h"
#include "base/owner_process.h"

namespace weft {
namespace {

// Fills the table from an open library; the first missing symbol is the error.
Status load_functions(void* library, CudaDriver& driver) {
#define WEFT_CUDA_FUNCTION(member, symbol)                                                              \
  driver.member = reinterpret_cast<decltype(driver.member)>(dlsym(library, #symbol));                   \
  if (!driver.member)                                                                                   \
    return Status::make(Code::kUnsupported, "the CUDA driver has no {}: Weft needs CUDA 12.0 or newer", \
                        #symbol);
  WEFT_CUDA_FUNCTIONS(WEFT_CUDA_FUNCTION)
#undef WEFT_CUDA_FUNCTION
  return Status();
}

std::string error_text(const CudaDriver& driver, CUresult result) {
  const char* name = nullptr;
  const char* sentence = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &sentence);
  return text("{} ({})", name ? name : text("CUDA error {}", result), sentence ? sentence : "no text");
}

Result<CudaDriver> open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return Status::make(Code::kUnsupported, "no CUDA driver: {}", dlerror());
  CudaDriver driver;
  WEFT_TRY(load_functions(library, driver));
  if (const CUresult result = driver.cuInit(0); result != CUDA_SUCCESS)
    return Status::make(Code::kUnsupported, "no usable CUDA device: {}", error_text(driver, result));
  driver.cuDriverGetVersion(&driver.version);
  driver.cuDeviceGetCount(&driver.device_count);
  if (driver.device_count == 0) return Status::make(Code::kUnsupported, "no CUDA device is visible");
  return driver;
}

constexpr size_t kMostDevices = 64;  // whose contexts are found without a lock

Result<CUcontext> retain_primary_context(const CudaDriver& driver, int ordinal) {
  static std::mutex mutex;
  static std::map<int, CUcontext> contexts;
  std::lock_guard lock(mutex);
  if (auto known = contexts.find(ordinal); known != contexts.end()) return known->second;
  CUdevice device = 0;
  WEFT_TRY(cuda_status(driver.cuDeviceGet(&device, ordinal), "finding CUDA device {}", ordinal));
  CUcontext context = nullptr;
  WEFT_TRY(cuda_status(driver.cuDevicePrimaryCtxRetain(&context, device), "opening CUDA device {}", ordinal));
  contexts[ordinal] = context;
  return context;
}

// The primary context of a device, retained at first use: launches ask for it.
Result<CUcontext> primary_context(const CudaDriver& driver, int ordinal) {
  static std::array<std::atomic<CUcontext>, kMostDevices> known{};
  const auto place = static_cast<size_t>(ordinal);
  if (place >= kMostDevices) return retain_primary_context(driver, ordinal);
  if (CUcontext context = known[place].load(std::memory_order_acquire)) return context;
  WEFT_TRY_ASSIGN(CUcontext context, retain_primary_context(driver, ordinal));
  known[place].store(context, std::memory_order_release);
  return context;
}

}  // namespace

Result<const CudaDriver*> cuda_driver() {
  static const OwnerProcess owner;
  static const Result<CudaDriver> once = open_driver();
  if (!once.ok()) return once.status();
  if (!owner.is_this())
    return Status::make(Code::kUnsupported,
                        "no CUDA: process {} opened the driver before it forked this one, allowed: a process "
                        "that was spawned, or forked before",
                        owner.pid());
  return &*once;
}

Status cuda_failure(CUresult result, const std::string& what) {
  const Result<const CudaDriver*> driver = cuda_driver();
  const std::string why = driver.ok() ? error_text(**driver, result) : text("CUDA error {}", result);
  return logged(Status::make(Code::kSystem, "{}: {}", what, why));
}

bool cuda_loads_lazily() {
  const Result<const CudaDriver*> driver = cuda_driver();
  int mode = 0;
  return driver.ok() && (*driver)->cuModuleGetLoadingMode(&mode) == CUDA_SUCCESS &&
         mode == CU_MODULE_LAZY_LOADING;
}

Result<int> cuda_device_attribute(int ordinal, int attribute) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  CUdevice device = 0;
  WEFT_TRY(cuda_status(driver->cuDeviceGet(&device, ordinal), "finding CUDA device {}", ordinal));
  int value = 0;
  WEFT_TRY(cuda_status(driver->cuDeviceGetAttribute(&value, attribute, device),
                       "asking CUDA device {} for attribute {}", ordinal, attribute));
  return value;
}

Result<CudaContext> CudaContext::enter(int ordinal) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(CUcontext context, primary_context(*driver, ordinal));
  return enter(context);
}

Result<CudaContext> CudaContext::enter(CUcontext context) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  CUcontext current = nullptr;
  if (driver->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == context)
    return CudaContext(driver, false);  // as in a thread that has used torch on this device
  WEFT_TRY(cuda_status(driver->cuCtxPushCurrent(context), "entering a CUDA context"));
  return CudaContext(driver, true);
}

CudaContext::~CudaContext() {
  CUcontext popped = nullptr;
  if (is_pushed_) driver_->cuCtxPopCurrent(&popped);
}

}  // namespace weft
