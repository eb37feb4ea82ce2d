// SPDX-License-Identifier: Apache-2.0
//
// Windows in GPU memory that travel as CUDA IPC handles: the fallback where memory cannot be exported as a
// file descriptor. One allocation, which cannot grow; CUDA picks the address; between processes only. CUDA
// leaves undefined what a peer sees after the owner has freed the memory, so such windows must be destroyed
// after everybody is done.
#include <cstring>

#include "base/cuda_driver.h"
#include "base/log.h"
#include "memory/device_memory.h"
#include "memory/range.h"

namespace weft {
namespace {

// CUDA shares whole blocks of this size, so an allocation of whole blocks shares nothing else.
constexpr uint64_t kBlockBytes = uint64_t{2} << 20;

class IpcRange : public MappedRange {
 public:
  explicit IpcRange(int ordinal) : ordinal_(ordinal) {}
  ~IpcRange() override { cut(0); }

  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  uint64_t bytes() const override { return bytes_; }
  uint64_t granularity() const override { return kBlockBytes; }

  Result<FdMessage> extend(uint64_t bytes) override {
    WEFT_TRY(check_empty());
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal_));
    CUdeviceptr at = 0;
    WEFT_TRY(logged(cuda_status(current.driver().cuMemAlloc(&at, bytes),
                                "allocate a window of {} bytes on cuda:{}", bytes, ordinal_)));
    base_ = at;
    bytes_ = bytes;
    is_owner_ = true;
    Result<FdMessage> offer = export_handle(current.driver());
    if (!offer.ok()) cut(0);
    return offer;
  }

  Status import(const FdMessage& offer, uint64_t bytes) override {
    WEFT_TRY(check_empty());
    CUipcMemHandle handle;
    if (offer.bytes.size() != sizeof handle)
      return logged(Status::make(Code::kSystem, "a peer's window came without its CUDA IPC handle"));
    std::memcpy(&handle, offer.bytes.data(), sizeof handle);
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal_));
    CUdeviceptr at = 0;
    WEFT_TRY(logged(
        cuda_status(current.driver().cuIpcOpenMemHandle(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                    "open a peer's window on cuda:{} by CUDA IPC", ordinal_)));
    base_ = at;
    bytes_ = bytes;
    return Status();
  }

  void cut(uint64_t bytes) override {
    if (bytes >= bytes_) return;
    Result<CudaContext> current = CudaContext::enter(ordinal_);
    if (!current.ok()) return;  // the process is ending; the driver frees everything
    if (is_owner_) {
      current->driver().cuMemFree(base_);
    } else {
      current->driver().cuIpcCloseMemHandle(base_);
    }
    base_ = 0;
    bytes_ = 0;
  }

 private:
  Status check_empty() const {
    if (bytes_ == 0) return Status();
    return Status::make(Code::kUnsupported,
                        "window: memory shared by CUDA IPC cannot grow beyond its {} bytes", bytes_);
  }
  Result<FdMessage> export_handle(const CudaDriver& driver) {
    WEFT_TRY(zero_device_memory(ordinal_, base(), bytes_));
    CUipcMemHandle handle;
    WEFT_TRY(logged(cuda_status(driver.cuIpcGetMemHandle(&handle, base_),
                                "share a window of cuda:{} by CUDA IPC", ordinal_)));
    return FdMessage{std::string(handle.reserved, sizeof handle.reserved), {}};
  }

  const int ordinal_;
  CUdeviceptr base_ = 0;
  uint64_t bytes_ = 0;
  bool is_owner_ = false;
};

}  // namespace

Result<std::shared_ptr<MappedRange>> make_ipc_range(const RangeOptions& options) {
  WEFT_TRY(cuda_driver().status());
  if (options.host_bytes > 0)
    return Status::make(Code::kUnsupported, "memory of host and GPU in one range: not with CUDA IPC");
  return std::shared_ptr<MappedRange>(std::make_shared<IpcRange>(options.device.ordinal));
}

}  // namespace weft
