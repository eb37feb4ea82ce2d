// SPDX-License-Identifier: Apache-2.0
#include "moe/returned_pieces.h"

#include "base/cuda_driver.h"
#include "base/stream_order.h"

namespace weft {

ReturnedPieces::~ReturnedPieces() {
  if (device_.is_host()) return;
  const Result<const CudaDriver*> driver = cuda_driver();
  if (!driver.ok()) return;
  for (const Piece& piece : pieces_) spare_events_.push_back(piece.event);
  for (void* event : spare_events_) (*driver)->cuEventDestroy(static_cast<CUevent>(event));
}

Result<void*> ReturnedPieces::new_event() {
  if (!spare_events_.empty()) {
    void* event = spare_events_.back();
    spare_events_.pop_back();
    return event;
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  CUevent made = nullptr;
  WEFT_TRY(cuda_status(driver->cuEventCreate(&made, CU_EVENT_DISABLE_TIMING), "making an event"));
  return static_cast<void*>(made);
}

Result<bool> ReturnedPieces::give_back(uint64_t offset, void* stream) {
  if (device_.is_host()) return heap_.give(offset);
  WEFT_TRY_ASSIGN(const bool is_captured, is_capturing(device_, stream));
  if (is_captured) return false;
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(device_.ordinal));
  std::lock_guard lock(mutex_);
  WEFT_TRY_ASSIGN(void* event, new_event());
  const CUresult recorded =
      context.driver().cuEventRecord(static_cast<CUevent>(event), static_cast<CUstream>(stream));
  if (recorded != CUDA_SUCCESS) {
    spare_events_.push_back(event);
    return cuda_failure(recorded, "recording an event");
  }
  pieces_.push_back({offset, event, stream});
  return true;
}

Result<bool> ReturnedPieces::reclaim(void* stream) {
  std::lock_guard lock(mutex_);
  if (pieces_.empty()) return false;
  WEFT_TRY_ASSIGN(const CudaContext context, CudaContext::enter(device_.ordinal));
  while (!pieces_.empty()) {
    const Piece piece = pieces_.back();
    if (piece.stream != stream)
      WEFT_TRY(cuda_status(context.driver().cuStreamWaitEvent(static_cast<CUstream>(stream),
                                                              static_cast<CUevent>(piece.event), 0),
                           "making a stream wait for another"));
    pieces_.pop_back();
    spare_events_.push_back(piece.event);
    heap_.give(piece.offset);
  }
  return true;
}

}  // namespace weft
