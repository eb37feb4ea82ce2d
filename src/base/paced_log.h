// SPDX-License-Identifier: Apache-2.0
//
// A log for what strangers can cause as often as they like: one line a second, which says how often it has happened.
//   refusals_.warn("transfer: drops a message: {}", why);   // "... (1204 times so far)"
// Threads: one at a time.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/log.h"

namespace weft {

class PacedLog {
 public:
  template <class... Args>
  void warn(std::string_view pattern, const Args&... args) {
    ++count_;
    const auto now = std::chrono::steady_clock::now();
    if (count_ > 1 && now - said_ < std::chrono::seconds(1)) return;
    said_ = now;
    log_warn("{} ({} times so far)", text(pattern, args...), count_);
  }
  uint64_t count() const { return count_; }

 private:
  uint64_t count_ = 0;
  std::chrono::steady_clock::time_point said_{};
};

}  // namespace weft
