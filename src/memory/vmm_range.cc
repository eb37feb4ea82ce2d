// SPDX-License-Identifier: Apache-2.0
//
// Windows in GPU memory: CUDA's virtual memory management. Each segment is one physical allocation that
// travels as a POSIX file descriptor; every rank maps it into addresses it has set aside, readable and
// writable by its own GPU.
#include <algorithm>
#include <cstring>

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

// Of the host part: on the GPU's own NUMA node.
Result<CUmemAllocationProp> shareable_host_memory(int ordinal) {
  WEFT_TRY_ASSIGN(const int node, cuda_device_attribute(ordinal, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID));
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, std::max(node, 0)};  // -1: a machine without nodes
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
  // `base`: before it, addresses for `host_bytes` are set aside, too.
  VmmRange(int ordinal, CUdeviceptr base, uint64_t reserved, uint64_t host_bytes, uint64_t granularity)
      : ordinal_(ordinal),
        base_(base),
        reserved_(reserved),
        host_bytes_(host_bytes),
        before_(before_base(host_bytes)),
        granularity_(granularity) {}
  ~VmmRange() override {
    cut(0);
    Result<CudaContext> current = CudaContext::enter(ordinal_);
    if (!current.ok()) return;
    if (has_host_part_) current->driver().cuMemUnmap(host_at(), host_bytes_);
    current->driver().cuMemAddressFree(base_ - before_, before_ + reserved_);
  }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  uint64_t bytes() const override { return bytes_; }
  uint64_t granularity() const override { return granularity_; }

  Result<FdMessage> extend(uint64_t bytes) override {
    WEFT_TRY(check_room(*this, bytes, reserved_));
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal_));
    const CudaDriver& driver = current.driver();
    const bool is_host_part = awaits_host_part();
    CUmemAllocationProp properties = shareable_memory(ordinal_);
    if (is_host_part) {
      WEFT_TRY_ASSIGN(properties, shareable_host_memory(ordinal_));
    }
    Allocation segment(driver);
    WEFT_TRY(logged(cuda_status(
        driver.cuMemCreate(&segment.handle, bytes, &properties, 0),
        "allocate a window segment of {} bytes on {}", bytes,
        is_host_part ? text("the host's node {}", properties.location.id) : text("cuda:{}", ordinal_))));
    int fd = -1;
    WEFT_TRY(logged(cuda_status(
        driver.cuMemExportToShareableHandle(&fd, segment.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "share a window segment of cuda:{}", ordinal_)));
    FdMessage offer{"", FileDescriptor(fd)};
    WEFT_TRY(map(driver, segment.handle, bytes, true));
    if (is_host_part) {
      std::memset(reinterpret_cast<void*>(host_at()), 0, bytes);
      return offer;
    }
    const Status zeroed = zero_device_memory(ordinal_, base() + bytes_ - bytes, bytes);
    if (!zeroed.ok()) {
      cut(bytes_ - bytes);
      return zeroed;
    }
    return offer;
  }

  Status import(const FdMessage& offer, uint64_t bytes) override {
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
    return map(driver, segment.handle, bytes, false);
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
  // The first segment is the host part, where there is one.
  bool awaits_host_part() const { return host_bytes_ > 0 && !has_host_part_; }
  CUdeviceptr host_at() const { return base_ - before_; }

  Status map(const CudaDriver& driver, CUmemGenericAllocationHandle handle, uint64_t bytes, bool is_owner) {
    const bool is_host_part = awaits_host_part();
    if (is_host_part && bytes != host_bytes_)
      return Status::invalid("window: got a host part of {} bytes, allowed: {}", bytes, host_bytes_);
    const CUdeviceptr at = is_host_part ? host_at() : base_ + bytes_;
    WEFT_TRY(logged(
        cuda_status(driver.cuMemMap(at, bytes, 0, handle, 0), "map a window segment of {} bytes", bytes)));
    CUmemAccessDesc access[2] = {
        {{CU_MEM_LOCATION_TYPE_DEVICE, ordinal_}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {}};
    Status granted;
    if (is_host_part && is_owner) {  // its host, too
      const Result<CUmemAllocationProp> memory = shareable_host_memory(ordinal_);
      granted = memory.status();
      if (granted.ok()) access[1] = {memory->location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    }
    if (granted.ok())
      granted = cuda_status(driver.cuMemSetAccess(at, bytes, access, is_host_part && is_owner ? 2 : 1),
                            "let cuda:{} access a window segment", ordinal_);
    if (!granted.ok()) {
      driver.cuMemUnmap(at, bytes);
      return logged(granted);
    }
    if (is_host_part) {
      has_host_part_ = true;
      return Status();
    }
    segments_.push_back(bytes);
    bytes_ += bytes;
    return Status();
  }

  const int ordinal_;
  const CUdeviceptr base_;
  const uint64_t reserved_;
  const uint64_t host_bytes_, before_;
  const uint64_t granularity_;
  bool has_host_part_ = false;
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
  if (options.host_bytes > 0) {
    WEFT_TRY_ASSIGN(const CUmemAllocationProp host, shareable_host_memory(ordinal));
    size_t host_granularity = 0;
    WEFT_TRY(cuda_status(
        driver.cuMemGetAllocationGranularity(&host_granularity, &host, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "read the allocation granularity of the host's node {}", host.location.id));
    if (host_granularity == 0 || kPartMultiple % host_granularity != 0 || kPartMultiple % granularity != 0)
      return Status::make(Code::kUnsupported,
                          "memory of host and GPU in one range: granularities of {} and {} bytes, allowed: "
                          "what divides {}",
                          host_granularity, granularity, kPartMultiple);
  }
  const uint64_t before = before_base(options.host_bytes);
  CUdeviceptr base = 0;
  for (uint64_t bytes = std::max(options.reserve_bytes, options.least_bytes);;
       bytes = std::max(bytes / 2 / granularity * granularity, options.least_bytes)) {
    const Status reserved = cuda_status(driver.cuMemAddressReserve(&base, before + bytes, 0, 0, 0),
                                        "reserve {} bytes of addresses", bytes);
    if (reserved.ok())
      return std::shared_ptr<MappedRange>(
          std::make_shared<VmmRange>(ordinal, base + before, bytes, options.host_bytes, granularity));
    if (bytes == options.least_bytes) return logged(reserved);
  }
}

}  // namespace weft
