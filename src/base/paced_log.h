// SPDX-License-Identifier: Apache-2.0
//
// A log for events that strangers can cause as often as they like: one line a second, which says how often it has
// happened.
//   refusals_.warn("transfer: drops a message: {}", why);   // "... (1204 times so far)"
// Threads: any.
#pragma once

#include "base/log.h"
#include "base/strangers.h"

namespace weft {

class PacedLog {
 public:
  template <class... Args>
  void warn(std::string_view pattern, const Args&... args) {
    if (const uint64_t times = limiter_.count())
      log_warn("{} ({} times so far)", text(pattern, args...), times);
  }

 private:
  LogLimiter limiter_;
};

}  // namespace weft
