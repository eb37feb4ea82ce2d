// SPDX-License-Identifier: Apache-2.0
#include "base/stream_order.h"

#include <vector>

#include "base/cuda_driver.h"

namespace weft {
namespace {

// CUDA's legacy default stream: it is always there, and no graph can capture it.
// https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html
constexpr void* kDefaultStream = nullptr;

}  // namespace

StreamMark::~StreamMark() {
  if (!event_) return;  // on the CPU, too: no driver is opened for it
  const Result<const CudaDriver*> driver = cuda_driver();
  if (driver.ok()) (*driver)->cuEventDestroy(static_cast<CUevent>(event_));
}

Status StreamMark::note(void* stream) {
  if (device_.is_host()) return {};
  stream_ = stream;
  is_noted_ = true;
  is_recorded_ = false;
  return stream == kDefaultStream && !is_waited_for_ ? Status() : record();
}

Status StreamMark::wait(void* stream) {
  if (!is_noted_ || stream == stream_) return {};
  is_waited_for_ = true;
  if (!is_recorded_) WEFT_TRY(record());
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(device_.ordinal));
  return cuda_status(
      context.driver().cuStreamWaitEvent(static_cast<CUstream>(stream), static_cast<CUevent>(event_), 0),
      "making a stream wait for another");
}

Status StreamMark::record() {
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(device_.ordinal));
  const CudaDriver& driver = context.driver();
  if (!event_) {
    CUevent made = nullptr;
    WEFT_TRY(cuda_status(driver.cuEventCreate(&made, CU_EVENT_DISABLE_TIMING), "making an event"));
    event_ = made;
  }
  WEFT_TRY(cuda_status(driver.cuEventRecord(static_cast<CUevent>(event_), static_cast<CUstream>(stream_)),
                       "recording an event"));
  is_recorded_ = true;
  return {};
}

Status StreamOrder::wait(void* stream, void* first) {
  if (stream == first) return {};
  WEFT_TRY(mark_.note(first));
  return mark_.wait(stream);
}

namespace {

struct Look {
  int ordinal;
  void* stream;
  bool is_captured;
};
thread_local int looks_alive = 0;
thread_local std::vector<Look> looks;

}  // namespace

CaptureLooks::CaptureLooks() {
  ++looks_alive;
}
CaptureLooks::~CaptureLooks() {
  if (--looks_alive == 0) looks.clear();
}

Result<bool> is_capturing(Device device, void* stream) {
  if (device.is_host() || stream == kDefaultStream) return false;
  for (const Look& look : looks)
    if (look.ordinal == device.ordinal && look.stream == stream) return look.is_captured;
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  int state = CU_STREAM_CAPTURE_STATUS_NONE;
  WEFT_TRY(cuda_status(driver->cuStreamIsCapturing(static_cast<CUstream>(stream), &state),
                       "ask whether a stream is captured"));
  const bool is_captured = state != CU_STREAM_CAPTURE_STATUS_NONE;
  if (looks_alive) looks.push_back({device.ordinal, stream, is_captured});
  return is_captured;
}

}  // namespace weft
