// SPDX-License-Identifier: Apache-2.0
#include "transfer/copier.h"

#include <cstring>
#include <map>
#include <mutex>

#include "base/cuda_copies.h"

namespace weft::transfer {
namespace {

// One stream per device, made on first use and kept: copies neither wait for nor hold up the user's streams.
Result<CUstream> copy_stream(const CudaDriver& driver, int device) {
  static std::mutex mutex;
  static std::map<int, CUstream> streams;
  std::lock_guard lock(mutex);
  if (auto found = streams.find(device); found != streams.end()) return found->second;
  CUstream stream = nullptr;
  WEFT_TRY(cuda_status(driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0),
                       "making a copy stream on device {}", device));
  streams[device] = stream;
  return stream;
}

CUdeviceptr address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

Status cuda_copy(void* to, const void* from, uint64_t bytes, int device) {
  CopyQueue queue(device);
  WEFT_TRY(queue.copy(to, from, bytes));
  return queue.finish();
}

}  // namespace

Status copy_to_host(void* host, const void* from, uint64_t bytes, const provider::Range& range) {
  if (range.kind == provider::MemoryKind::kCuda) return cuda_copy(host, from, bytes, range.device);
  if (bytes) std::memcpy(host, from, bytes);
  return {};
}

Status copy_from_host(void* to, const void* host, uint64_t bytes, const provider::Range& range) {
  if (range.kind == provider::MemoryKind::kCuda) return cuda_copy(to, host, bytes, range.device);
  if (bytes) std::memcpy(to, host, bytes);
  return {};
}

CopyQueue::CopyQueue(int device) : device_(device) {}

CopyQueue::~CopyQueue() {
  if (!event_) return;
  const auto driver = cuda_driver();
  auto context = enter_copy_context(device_);
  if (!driver.ok() || !context.ok()) return;
  const RelaxedCapture relaxed(**driver);
  (*driver)->cuEventDestroy(static_cast<CUevent>(event_));
}

Status CopyQueue::copy(void* to, const void* from, uint64_t bytes) {
  if (bytes == 0) return {};
  if (device_ < 0) {
    std::memcpy(to, from, bytes);
    return {};
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(CudaContext context, enter_copy_context(device_));
  const RelaxedCapture relaxed(*driver);
  WEFT_TRY_ASSIGN(CUstream stream, copy_stream(*driver, device_));
  WEFT_TRY(cuda_status(driver->cuMemcpyAsync(address(to), address(from), bytes, stream), "copying {} bytes",
                       bytes));
  is_pending_ = true;
  return {};
}

Status CopyQueue::seal() {
  if (!is_pending_) return {};
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  WEFT_TRY_ASSIGN(CudaContext context, enter_copy_context(device_));
  const RelaxedCapture relaxed(*driver);
  WEFT_TRY_ASSIGN(CUstream stream, copy_stream(*driver, device_));
  CUevent event = static_cast<CUevent>(event_);
  if (!event)
    WEFT_TRY(cuda_status(driver->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "making a copy event"));
  event_ = event;
  return cuda_status(driver->cuEventRecord(event, stream), "recording a copy event");
}

Result<bool> CopyQueue::is_done() {
  if (!is_pending_) return true;
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  const RelaxedCapture relaxed(*driver);
  const CUresult state = driver->cuEventQuery(static_cast<CUevent>(event_));
  if (state == CUDA_ERROR_NOT_READY) return false;
  is_pending_ = false;
  WEFT_TRY(cuda_status(state, "copying between host and device {}", device_));
  return true;
}

Status CopyQueue::finish() {
  if (!is_pending_) return {};
  WEFT_TRY(seal());
  is_pending_ = false;
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  const RelaxedCapture relaxed(*driver);
  return cuda_status(driver->cuEventSynchronize(static_cast<CUevent>(event_)),
                     "copying between host and device {}", device_);
}

Result<char*> PinnedBuffer::allocate(uint64_t bytes, int device) {
  release();
  if (device >= 0) {
    WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
    WEFT_TRY_ASSIGN(CudaContext context, enter_copy_context(device));
    const RelaxedCapture relaxed(*driver);
    void* made = nullptr;
    WEFT_TRY(cuda_status(driver->cuMemHostAlloc(&made, bytes, CU_MEMHOSTALLOC_PORTABLE), "pinning {} bytes",
                         bytes));
    pinned_ = made;
    return static_cast<char*>(made);
  }
  plain_ = std::make_unique<char[]>(bytes);
  return plain_.get();
}

void PinnedBuffer::release() {
  plain_.reset();
  if (!pinned_) return;
  if (const auto driver = cuda_driver(); driver.ok()) {
    const RelaxedCapture relaxed(**driver);
    (*driver)->cuMemFreeHost(pinned_);
  }
  pinned_ = nullptr;
}

}  // namespace weft::transfer
