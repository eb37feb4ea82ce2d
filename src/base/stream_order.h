// SPDX-License-Identifier: Apache-2.0
//
// StreamOrder makes CUDA streams of one device wait for one another, by an event that is made once.
//   StreamOrder order(device);
//   WEFT_TRY(order.wait(comm_stream, current_stream));   // the first waits for what the second has got so
//   far
// May be captured in a graph. Threads: one caller at a time.
#pragma once

#include "base/device.h"
#include "base/status.h"

namespace weft {

class StreamOrder {
 public:
  explicit StreamOrder(Device device) : device_(device) {}
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;

  // What `stream` gets from now on waits for what `first` has got. Nothing to do for one stream, nor on the
  // host. Errors: kSystem from the driver.
  Status wait(void* stream, void* first);

 private:
  const Device device_;
  void* event_ = nullptr;  // CUevent, made at first use
};

// Whether a stream records a graph; false on the host. Errors: kSystem from the driver.
Result<bool> is_capturing(Device device, void* stream);

}  // namespace weft
