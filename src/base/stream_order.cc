// SPDX-License-Identifier: Apache-2.0
#include "base/stream_order.h"

#include "base/cuda_driver.h"

namespace weft {

StreamOrder::~StreamOrder() {
  const Result<const CudaDriver*> driver = cuda_driver();
  if (event_ && driver.ok()) (*driver)->cuEventDestroy(static_cast<CUevent>(event_));
}

// The wait is for the record before it, whatever is recorded later: calls may share one event.
Status StreamOrder::wait(void* stream, void* first) {
  if (device_.is_host() || stream == first) return {};
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(device_.ordinal));
  const CudaDriver& driver = context.driver();
  if (!event_) {
    CUevent made = nullptr;
    WEFT_TRY(cuda_status(driver.cuEventCreate(&made, CU_EVENT_DISABLE_TIMING), "making an event"));
    event_ = made;
  }
  const auto event = static_cast<CUevent>(event_);
  WEFT_TRY(cuda_status(driver.cuEventRecord(event, static_cast<CUstream>(first)), "recording an event"));
  return cuda_status(driver.cuStreamWaitEvent(static_cast<CUstream>(stream), event, 0),
                     "making a stream wait for another");
}

Result<bool> is_capturing(Device device, void* stream) {
  if (device.is_host()) return false;
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  int state = CU_STREAM_CAPTURE_STATUS_NONE;
  WEFT_TRY(cuda_status(driver->cuStreamIsCapturing(static_cast<CUstream>(stream), &state),
                       "ask whether a stream is captured"));
  return state != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace weft
