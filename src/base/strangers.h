// SPDX-License-Identifier: Apache-2.0
//
// Protects a log from strangers, who can choose words and cause a line as often as they like.
//   if (const uint64_t times = refused_.count()) log_warn("... {} is refused ({} so far)", printable(name), times);
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

// Counts, and lets one line a second through.
class LogLimiter {
 public:
  uint64_t count();  // how often so far, where a line is due; else 0

 private:
  std::atomic<uint64_t> times_ = 0;
  std::atomic<int64_t> next_ns_ = 0;  // when the next line is due, by the steady clock
};

// Words that somebody else chose: control characters and bytes beyond ASCII as \xNN.
std::string printable(std::string_view words);

}  // namespace weft
