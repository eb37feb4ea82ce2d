// SPDX-License-Identifier: Apache-2.0
//
// Windows in GPU memory that travel as file descriptors: CUDA's virtual memory management. One physical
// allocation per segment, mapped into reserved addresses by its owner and by every peer.
#include <algorithm>
#include <vector>

#include "base/cuda_driver.h"
#include "base/log.h"
#include "memory/device_memory.h"
#include "memory/range.h"

namespace weft {
namespace {

uint64_t round_up(uint64_t bytes, uint64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

CUmemAllocationProp allocation_of(int ordinal, bool can_rdma) {
  CUmemAllocationProp allocation{};
  allocation.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  allocation.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  allocation.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  allocation.allocFlags.gpuDirectRDMACapable = can_rdma ? 1 : 0;
  return allocation;
}

// A reference to physical memory; mappings hold their own, so it is released as soon as the memory is mapped.
class Allocation {
 public:
  Allocation(const CudaDriver& driver, CUmemGenericAllocationHandle handle)
      : driver_(driver), handle_(handle) {}
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() { driver_.cuMemRelease(handle_); }
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  const CudaDriver& driver_;
  const CUmemGenericAllocationHandle handle_;
};

class VmmRange : public MappedRange {
 public:
  VmmRange(const CudaDriver& driver, int ordinal, const CUmemAllocationProp& allocation, uint64_t granularity,
           CUdeviceptr base, uint64_t reserved)
      : driver_(driver),
        ordinal_(ordinal),
        allocation_(allocation),
        granularity_(granularity),
        base_(base),
        reserved_(reserved) {}
  ~VmmRange() override {
    cut(0);
    driver_.cuMemAddressFree(base_, reserved_);
  }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  uint64_t bytes() const override { return bytes_; }
  uint64_t granularity() const override { return granularity_; }

  Result<Parcel> extend(uint64_t bytes) override {
    WEFT_TRY(check_room(bytes));
    WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(ordinal_));
    CUmemGenericAllocationHandle handle = 0;
    WEFT_TRY(cuda_status(driver_.cuMemCreate(&handle, bytes, &allocation_, 0),
                         text("allocating {} bytes on cuda:{} for a window", bytes, ordinal_)));
    const Allocation memory(driver_, handle);
    int fd = -1;
    WEFT_TRY(cuda_status(driver_.cuMemExportToShareableHandle(&fd, memory.handle(),
                                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                         "exporting a window segment"));
    Parcel offer{"", FileDescriptor(fd)};
    WEFT_TRY(map(memory, bytes));
    if (Status zeroed = zero_device_memory(ordinal_, base() + bytes_ - bytes, bytes); !zeroed.ok()) {
      cut(bytes_ - bytes);
      return zeroed;
    }
    return offer;
  }

  Status import(const Parcel& offer, uint64_t bytes) override {
    WEFT_TRY(check_room(bytes));
    if (!offer.fd.is_open())
      return logged(
          Status::make(Code::kSystem, "a peer's window segment came without its {} bytes of memory", bytes));
    WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(ordinal_));
    CUmemGenericAllocationHandle handle = 0;
    void* const descriptor = reinterpret_cast<void*>(static_cast<uintptr_t>(offer.fd.get()));
    WEFT_TRY(cuda_status(
        driver_.cuMemImportFromShareableHandle(&handle, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        text("importing a peer's window segment on cuda:{}", ordinal_)));
    const Allocation memory(driver_, handle);
    return map(memory, bytes);
  }

  // Unmaps whole segments from the end: a mapping cannot be split.
  void cut(uint64_t bytes) override {
    while (!segments_.empty() && bytes_ > bytes) {
      bytes_ -= segments_.back();
      if (Status unmapped =
              cuda_status(driver_.cuMemUnmap(base_ + bytes_, segments_.back()), "unmapping a window");
          !unmapped.ok())
        log_warn("{}", unmapped.message());
      segments_.pop_back();
    }
  }

 private:
  Status check_room(uint64_t bytes) const {
    if (bytes <= reserved_ - bytes_) return Status();
    return Status::make(Code::kCapacity,
                        "window: got {} bytes, allowed: at most the {} bytes of reserved addresses",
                        bytes_ + bytes, reserved_);
  }

  // Maps `memory` after what is mapped already and lets this rank's GPU read and write it.
  Status map(const Allocation& memory, uint64_t bytes) {
    const CUdeviceptr at = base_ + bytes_;
    WEFT_TRY(cuda_status(driver_.cuMemMap(at, bytes, 0, memory.handle(), 0), "mapping a window segment"));
    segments_.push_back(bytes);
    bytes_ += bytes;
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, ordinal_}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    Status status = cuda_status(driver_.cuMemSetAccess(at, bytes, &access, 1),
                                text("giving cuda:{} access to a window segment", ordinal_));
    if (!status.ok()) cut(bytes_ - bytes);
    return status;
  }

  const CudaDriver& driver_;
  const int ordinal_;
  const CUmemAllocationProp allocation_;
  const uint64_t granularity_;
  const CUdeviceptr base_;
  const uint64_t reserved_;
  uint64_t bytes_ = 0;
  std::vector<uint64_t> segments_;  // bytes of each, from the front
};

// Sets addresses aside: the wanted bytes, or the half, a quarter, ... where the driver has fewer.
Result<std::pair<CUdeviceptr, uint64_t>> reserve(const CudaDriver& driver, const RangeOptions& options,
                                                 uint64_t granularity) {
  const uint64_t least = round_up(options.least_bytes, granularity);
  uint64_t bytes = std::max(round_up(options.reserve_bytes, granularity), least);
  for (;; bytes = std::max(round_up(bytes / 2, granularity), least)) {
    CUdeviceptr base = 0;
    const CUresult result = driver.cuMemAddressReserve(&base, bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) return std::pair{base, bytes};
    if (bytes == least)
      return cuda_status(result, text("reserving {} bytes of GPU addresses for a window", bytes));
  }
}

}  // namespace

Result<std::shared_ptr<MappedRange>> make_vmm_range(const RangeOptions& options) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  const int ordinal = options.device.ordinal;
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(ordinal));
  const Result<int> can_rdma =
      cuda_device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  const CUmemAllocationProp allocation = allocation_of(ordinal, can_rdma.ok() && *can_rdma != 0);
  size_t granularity = 0;
  WEFT_TRY(cuda_status(
      driver->cuMemGetAllocationGranularity(&granularity, &allocation, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      text("asking cuda:{} for its page size", ordinal)));
  WEFT_TRY_ASSIGN(const auto addresses, reserve(*driver, options, granularity));
  return std::shared_ptr<MappedRange>(std::make_shared<VmmRange>(*driver, ordinal, allocation, granularity,
                                                                 addresses.first, addresses.second));
}

}  // namespace weft
