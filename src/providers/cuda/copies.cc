// SPDX-License-Identifier: Apache-2.0
#include "providers/cuda/copies.h"

#include <algorithm>

#include "base/cuda_copies.h"
#include "base/deadline.h"
#include "base/log.h"

namespace weft::provider::cuda {
namespace {

constexpr unsigned kStoreAfterCopies =
    0;  // CU_STREAM_WRITE_VALUE_DEFAULT: what came before it is visible to all
constexpr double kLastCopies_s = 5;
constexpr uint64_t kListBytes = sizeof(Stretch) * kRequests;

std::atomic<Status (*)(int device)> prepare_given_kernel = nullptr;
std::atomic<CopyStretches> given_kernel = nullptr;

CUdeviceptr address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

}  // namespace

Result<std::unique_ptr<Copies>> Copies::open(int device) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  std::unique_ptr<Copies> made(new Copies(*driver, device));
  WEFT_TRY(made->make_streams());
  WEFT_TRY(made->prepare_kernel());
  return made;
}

Status Copies::make_streams() {
  WEFT_TRY_ASSIGN(CudaContext current, enter());
  const RelaxedCapture relaxed(driver_);
  void* pinned = nullptr;
  WEFT_TRY(cuda_status(driver_.cuMemHostAlloc(&pinned, sizeof *passed_ * kStreams,
                                              CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                       "pinning {} words for copies of cuda:{}", kStreams, device_));
  passed_ = static_cast<std::atomic<uint64_t>*>(pinned);
  for (uint32_t i = 0; i < kStreams; ++i) passed_[i].store(0, std::memory_order_relaxed);
  for (CUstream& stream : streams_)
    WEFT_TRY(cuda_status(driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0),
                         "making a copy stream on cuda:{}", device_));
  return {};
}

Status Copies::prepare_kernel() {
  const CopyStretches given = given_kernel.load();
  if (!given || copies_in_own_context()) return {};
  if (const Status prepared = prepare_given_kernel.load()(device_); !prepared.ok()) {
    log_info("cuda: pages are copied by copy engines: {}", prepared.message());
    return {};
  }
  WEFT_TRY_ASSIGN(CudaContext current, enter());
  const RelaxedCapture relaxed(driver_);
  void* pinned = nullptr;
  WEFT_TRY(
      cuda_status(driver_.cuMemHostAlloc(&pinned, kListBytes * kLists * kStreams, CU_MEMHOSTALLOC_PORTABLE),
                  "pinning lists of pages for cuda:{}", device_));
  host_lists_ = static_cast<Stretch*>(pinned);
  WEFT_TRY(cuda_status(driver_.cuMemAlloc(&gpu_lists_, kListBytes * kStreams),
                       "allocating lists of pages on cuda:{}", device_));
  kernel_ = given;
  return {};
}

Copies::~Copies() {
  Result<CudaContext> current = enter();
  if (!current.ok() || !drain(kLastCopies_s)) return;  // what still runs keeps its memory
  const RelaxedCapture relaxed(driver_);
  for (CUstream stream : streams_)
    if (stream) driver_.cuStreamDestroy(stream);
  if (passed_) driver_.cuMemFreeHost(passed_);
  if (host_lists_) driver_.cuMemFreeHost(host_lists_);
  if (gpu_lists_) driver_.cuMemFree(gpu_lists_);
}

Result<CudaContext> Copies::enter() const {
  return enter_copy_context(device_);
}

Result<bool> Copies::copy_all(uint32_t stream, const std::vector<Stretch>& stretches, bool for_kernel) {
  if (!kernel_ || !for_kernel) {
    for (const Stretch& each : stretches)
      WEFT_TRY(
          copy(stream, reinterpret_cast<void*>(each.dst), reinterpret_cast<void*>(each.src), each.bytes));
    return true;
  }
  const uint32_t turn = next_list_[stream];
  if (!has_passed(stream, list_marks_[stream][turn])) return false;
  Stretch* list = host_lists_ + (stream * kLists + turn) * kRequests;
  uint64_t longest_bytes = 0;
  for (size_t i = 0; i < stretches.size(); ++i) {
    list[i] = stretches[i];
    longest_bytes = std::max(longest_bytes, stretches[i].bytes);
  }
  const CUdeviceptr there = gpu_lists_ + stream * kListBytes;
  WEFT_TRY(copy(stream, reinterpret_cast<void*>(there), list, stretches.size() * sizeof(Stretch)));
  WEFT_TRY(kernel_(device_, streams_[stream], reinterpret_cast<const Stretch*>(there),
                   static_cast<uint32_t>(stretches.size()), longest_bytes));
  list_marks_[stream][turn] = marks_[stream] + 1;  // the caller asks for that mark next
  next_list_[stream] = (turn + 1) % kLists;
  return true;
}

Status Copies::copy(uint32_t stream, void* to, const void* from, uint64_t bytes) {
  WEFT_TRY_ASSIGN(CudaContext current, enter());
  const RelaxedCapture relaxed(driver_);
  return cuda_status(driver_.cuMemcpyAsync(address(to), address(from), bytes, streams_[stream]),
                     "copying {} bytes on cuda:{}", bytes, device_);
}

Status Copies::store(uint32_t stream, CUdeviceptr word, uint64_t value) {
  WEFT_TRY_ASSIGN(CudaContext current, enter());
  const RelaxedCapture relaxed(driver_);
  return cuda_status(driver_.cuStreamWriteValue64(streams_[stream], word, value, kStoreAfterCopies),
                     "storing a word behind copies of cuda:{}", device_);
}

Result<uint64_t> Copies::mark(uint32_t stream) {
  WEFT_TRY(store(stream, address(&passed_[stream]), marks_[stream] + 1));
  return ++marks_[stream];
}

Status Copies::health() const {
  for (uint32_t i = 0; i < kStreams; ++i) {
    if (has_passed(i, marks_[i])) continue;
    WEFT_TRY_ASSIGN(CudaContext current, enter());
    const RelaxedCapture relaxed(driver_);
    const CUresult state = driver_.cuStreamQuery(streams_[i]);
    if (state != CUDA_ERROR_NOT_READY) WEFT_TRY(cuda_status(state, "copying on cuda:{}", device_));
  }
  return {};
}

bool Copies::drain(double seconds) const {
  return wait_until(Deadline::after_s(seconds), [this] {
    for (uint32_t i = 0; i < kStreams; ++i)
      if (passed_ && !has_passed(i, marks_[i])) return false;
    return true;
  });
}

Pinned& Pinned::operator=(Pinned&& other) noexcept {
  if (this == &other) return *this;
  release();
  copies_ = std::exchange(other.copies_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  device_ = std::exchange(other.device_, 0);
  return *this;
}

Result<Pinned> Pinned::make(const Copies& copies, void* data, uint64_t bytes) {
  WEFT_TRY_ASSIGN(CudaContext current, copies.enter());
  const CudaDriver& driver = current.driver();
  const RelaxedCapture relaxed(driver);
  const CUresult pinned =
      driver.cuMemHostRegister(data, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (pinned != CUDA_SUCCESS)  // no log line: some callers do without
    return Status::make(Code::kSystem, "pinning {} bytes for cuda:{}: CUDA error {}", bytes, copies.device(),
                        pinned);
  Pinned made;
  made.copies_ = &copies;
  made.data_ = data;
  WEFT_TRY(cuda_status(driver.cuMemHostGetDevicePointer(&made.device_, data, 0),
                       "finding {} pinned bytes on cuda:{}", bytes, copies.device()));
  return made;
}

void Pinned::release() {
  if (!data_) return;
  if (Result<CudaContext> current = copies_->enter(); current.ok()) {
    const RelaxedCapture relaxed(current->driver());
    current->driver().cuMemHostUnregister(data_);
  }
  data_ = nullptr;
}

}  // namespace weft::provider::cuda

namespace weft::provider {

void give_copy_kernel(Status (*prepare)(int device), CopyStretches copy) {
  cuda::prepare_given_kernel.store(prepare);
  cuda::given_kernel.store(copy);
}

}  // namespace weft::provider
