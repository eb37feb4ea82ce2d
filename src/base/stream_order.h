// SPDX-License-Identifier: Apache-2.0
//
// What makes CUDA streams of one device wait for one another, by an event that is made once.
//   StreamOrder order(device);
//   WEFT_TRY(order.wait(comm_stream, current_stream));  // the first waits for what the second has got so far
//   StreamMark mark(device);
//   WEFT_TRY(mark.note(stream));    // `stream` may be gone
//   WEFT_TRY(mark.wait(another));   // by now
//   CaptureLooks looks;             // until it goes, this thread's is_capturing() asks the driver once for each stream
// On the host there is nothing to wait for. Threads: one caller at a time. Errors: kSystem from the driver.
#pragma once

#include "base/device.h"
#include "base/status.h"

namespace weft {

class StreamMark {
 public:
  explicit StreamMark(Device device) : device_(device) {}
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;

  // Keeps what `stream` has got so far, in place of what was noted before. Until some stream has waited, the default
  // stream's event is put off until one does: that one then waits for what has come to the default stream since, too.
  Status note(void* stream);
  // What `stream` gets from now on waits for what was noted last, whatever is noted later. Nothing to do where that
  // was of the same stream, or where nothing was. Captured in a graph only with its note().
  Status wait(void* stream);

 private:
  Status record();

  const Device device_;
  void* event_ = nullptr;   // CUevent, made at first use
  void* stream_ = nullptr;  // that was noted last
  bool is_noted_ = false;
  bool is_recorded_ = false;
  bool is_waited_for_ = false;  // by another stream, at any time
};

class StreamOrder {
 public:
  explicit StreamOrder(Device device) : mark_(device) {}

  // What `stream` gets from now on waits for what `first` has got. May be captured in a graph.
  Status wait(void* stream, void* first);

 private:
  StreamMark mark_;
};

// Whether a stream records a graph; false on the host. Errors: kSystem from the driver.
Result<bool> is_capturing(Device device, void* stream);

// For the length of one call, which neither begins nor ends a capture. May be nested.
class CaptureLooks {
 public:
  CaptureLooks();
  ~CaptureLooks();
  CaptureLooks(const CaptureLooks&) = delete;
};

}  // namespace weft
