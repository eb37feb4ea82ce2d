// SPDX-License-Identifier: Apache-2.0
//
// Windows in GPU memory: CUDA's virtual memory management. Each segment is one physical allocation that
// travels as a POSIX file descriptor; every rank maps it into addresses it has set aside, readable and
// writable by its own GPU.
#include <algorithm>

#include "base/cuda_driver.h"
#include "base/log.h"
#include "memory/device_memory.h"
#include "memory/range.h"

namespace weft {
namespace {

// NICs can register the memory too, where the GPU allows it.
CUmemAllocationProp shareable_memory(int ordinal) {
  const Result<int> can_rdma =
      cuda_device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  properties.allocFlags.gpuDirectRDMACapable = can_rdma.ok() && *can_rdma != 0 ? 1 : 0;
  return properties;
}

// A handle to physical memory. Released when it goes out of scope: mappings keep the memory alive.
class Allocation {
 public:
  explicit Allocation(const CudaDriver& driver) : driver_(driver) {}
  ~Allocation() {
    if (handle) driver_.cuMemRelease(handle);
  }
  Allocation(const Allocation&) = delete;

  CUmemGenericAllocationHandle handle = 0;

 private:
  const CudaDriver& driver_;
};

class VmmRange : public MappedRange {
 public:
  VmmRange(int ordinal, CUdeviceptr base, uint64_t reserved, uint64_t granularity)
      : ordinal_(ordinal), base_(base), reserved_(reserved), granularity_(granularity) {}
  ~VmmRange() override {
    cut(0);
    Result<CudaContext> current = CudaContext::enter(ordinal_);
    if (current.ok()) current->driver().cuMemAddressFree(base_, reserved_);
  }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  uint64_t bytes() const override { return bytes_; }
  uint64_t granularity() const override { return granularity_; }

  Result<Parcel> extend(uint64_t bytes) override {
    WEFT_TRY(check_room(*this, bytes, reserved_));
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal_));
    const CudaDriver& driver = current.driver();
    const CUmemAllocationProp properties = shareable_memory(ordinal_);
    Allocation segment(driver);
    WEFT_TRY(logged(cuda_status(driver.cuMemCreate(&segment.handle, bytes, &properties, 0),
                                "allocate a window segment of {} bytes on cuda:{}", bytes, ordinal_)));
    int fd = -1;
    WEFT_TRY(logged(cuda_status(
        driver.cuMemExportToShareableHandle(&fd, segment.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "share a window segment of cuda:{}", ordinal_)));
    Parcel offer{"", FileDescriptor(fd)};
    WEFT_TRY(map(driver, segment.handle, bytes));
    const Status zeroed = zero_device_memory(ordinal_, base() + bytes_ - bytes, bytes);
    if (!zeroed.ok()) {
      cut(bytes_ - bytes);
      return zeroed;
    }
    return offer;
  }

  Status import(const Parcel& offer, uint64_t bytes) override {
    WEFT_TRY(check_room(*this, bytes, reserved_));
    if (!offer.fd.is_open())
      return logged(
          Status::make(Code::kSystem, "a peer's window segment came without its {} bytes of memory", bytes));
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal_));
    const CudaDriver& driver = current.driver();
    Allocation segment(driver);
    auto* descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(offer.fd.get()));
    WEFT_TRY(logged(cuda_status(driver.cuMemImportFromShareableHandle(
                                    &segment.handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                                "import a peer's window segment of {} bytes on cuda:{}", bytes, ordinal_)));
    return map(driver, segment.handle, bytes);
  }

  void cut(uint64_t bytes) override {
    Result<CudaContext> current = CudaContext::enter(ordinal_);
    if (!current.ok()) return;
    while (!segments_.empty() && bytes_ > bytes) {
      bytes_ -= segments_.back();
      current->driver().cuMemUnmap(base_ + bytes_, segments_.back());
      segments_.pop_back();
    }
  }

 private:
  Status map(const CudaDriver& driver, CUmemGenericAllocationHandle handle, uint64_t bytes) {
    const CUdeviceptr at = base_ + bytes_;
    WEFT_TRY(logged(
        cuda_status(driver.cuMemMap(at, bytes, 0, handle, 0), "map a window segment of {} bytes", bytes)));
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, ordinal_}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const Status granted = cuda_status(driver.cuMemSetAccess(at, bytes, &access, 1),
                                       "let cuda:{} access a window segment", ordinal_);
    if (!granted.ok()) {
      driver.cuMemUnmap(at, bytes);
      return logged(granted);
    }
    segments_.push_back(bytes);
    bytes_ += bytes;
    return Status();
  }

  const int ordinal_;
  const CUdeviceptr base_;
  const uint64_t reserved_;
  const uint64_t granularity_;
  std::vector<uint64_t> segments_;  // bytes of each
  uint64_t bytes_ = 0;
};

}  // namespace

Result<std::shared_ptr<MappedRange>> make_vmm_range(const RangeOptions& options) {
  const int ordinal = options.device.ordinal;
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));
  const CudaDriver& driver = current.driver();
  const CUmemAllocationProp properties = shareable_memory(ordinal);
  size_t granularity = 0;
  WEFT_TRY(cuda_status(
      driver.cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      "read the allocation granularity of cuda:{}", ordinal));
  CUdeviceptr base = 0;
  for (uint64_t bytes = std::max(options.reserve_bytes, options.least_bytes);;
       bytes = std::max(bytes / 2 / granularity * granularity, options.least_bytes)) {
    const Status reserved = cuda_status(driver.cuMemAddressReserve(&base, bytes, 0, 0, 0),
                                        "reserve {} bytes of addresses", bytes);
    if (reserved.ok())
      return std::shared_ptr<MappedRange>(std::make_shared<VmmRange>(ordinal, base, bytes, granularity));
    if (bytes == options.least_bytes) return logged(reserved);
  }
}

}  // namespace weft
