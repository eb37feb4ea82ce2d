// SPDX-License-Identifier: Apache-2.0
//
// ReturnedPieces frees ranges of a heap that streams may still use. The stream that writes there next waits for them.
//   ReturnedPieces pieces(device, heap);
//   WEFT_TRY_ASSIGN(const bool noted, pieces.give_back(offset, stream));   // the last stream that used it
//   WEFT_TRY_ASSIGN(const bool any, pieces.reclaim(stream));               // free; `stream` waits
// Events come from a pool, whose events live as long as this. Threads: any.
#pragma once

#include <mutex>
#include <vector>

#include "base/device.h"
#include "base/status.h"
#include "memory/heap.h"

namespace weft {

class ReturnedPieces {
 public:
  ReturnedPieces(Device device, Heap& heap) : device_(device), heap_(heap) {}
  ~ReturnedPieces();
  ReturnedPieces(const ReturnedPieces&) = delete;

  // Notes what `stream` has got so far. false, and nothing is noted, while a graph captures the stream.
  // Errors: kSystem from the driver.
  Result<bool> give_back(uint64_t offset, void* stream);
  // Makes `stream` wait for what was noted, and the ranges free; returns whether there were any. Not while a graph
  // captures the stream. Errors: kSystem from the driver; what was not waited for stays.
  Result<bool> reclaim(void* stream);

 private:
  struct Piece {
    uint64_t offset;
    void* event;
    void* stream;  // that the event was recorded on
  };
  Result<void*> new_event();

  const Device device_;
  Heap& heap_;
  std::mutex mutex_;
  std::vector<Piece> pieces_;
  std::vector<void*> spare_events_;
};

}  // namespace weft
