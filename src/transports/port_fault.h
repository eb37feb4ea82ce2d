// SPDX-License-Identifier: Apache-2.0
//
// Faults that all ports report alike.
#pragma once

#include "base/status.h"
#include "kernels/core/fault.h"

namespace weft {

// Of Site::kPortRange, which a channel of `transport` raised.
inline Status outside_window(const char* transport, const FaultBox& fault) {
  return Status::invalid(
      "rank {}, {}: a put or signal to rank {} lies outside the window or is not aligned: window of {} "
      "bytes, offset {}",
      fault.self, transport, fault.peer, fault.expected, fault.seen);
}

}  // namespace weft
