// SPDX-License-Identifier: Apache-2.0
//
// Makes CUDA streams of one device wait for one another, by an event that is made once.
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

  // Marks the work that `stream` has got so far, in place of the earlier mark. For the default stream the event is
  // recorded only when another stream first waits; that stream then also waits for work that the default stream has
  // got since. After the first wait each mark records its event at once.
  Status note(void* stream);
  // Later work of `stream` waits for the last mark, whatever is marked later. Does nothing if the mark is of the
  // same stream, or if there is none. Captured in a graph only together with its note().
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

  // Later work of `stream` waits for the work that `first` has got so far. May be captured in a graph.
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
