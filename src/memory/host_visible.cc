// SPDX-License-Identifier: Apache-2.0
#include "memory/host_visible.h"

#include <cstring>
#include <new>

#include "base/cuda_driver.h"

namespace weft {
namespace {

constexpr std::align_val_t kAlignment{128};

}  // namespace

Result<std::unique_ptr<HostVisible>> HostVisible::create(Device device, uint64_t bytes) {
  void* data = nullptr;
  if (device.kind == Device::Kind::kCuda) {
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(device.ordinal));
    WEFT_TRY(cuda_status(
        current.driver().cuMemHostAlloc(&data, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
        "allocate pinned host memory"));
  } else {
    data = ::operator new(bytes, kAlignment);
  }
  std::memset(data, 0, bytes);
  return std::unique_ptr<HostVisible>(new HostVisible(device, static_cast<std::byte*>(data)));
}

HostVisible::~HostVisible() {
  if (device_.kind == Device::Kind::kCuda) {
    Result<CudaContext> current = CudaContext::enter(device_.ordinal);
    if (current.ok()) current->driver().cuMemFreeHost(data_);
  } else {
    ::operator delete(data_, kAlignment);
  }
}

}  // namespace weft
