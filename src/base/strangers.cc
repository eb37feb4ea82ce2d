// SPDX-License-Identifier: Apache-2.0
#include "base/strangers.h"

#include <chrono>

namespace weft {

uint64_t LogLimiter::count() {
  const uint64_t times = ++times_;
  const int64_t now_ns =
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  int64_t due_ns = next_ns_;
  return now_ns >= due_ns && next_ns_.compare_exchange_strong(due_ns, now_ns + 1'000'000'000) ? times : 0;
}

std::string printable(std::string_view words) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char letter : words) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte >= 0x20 && byte < 0x7f)
      out += letter;
    else
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return out;
}

}  // namespace weft
