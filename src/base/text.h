// SPDX-License-Identifier: Apache-2.0
//
// text("rank {} waited for {}", 3, peer) replaces each {} in order. std::format arrives with g++ 13; Weft
// builds with 12.
#pragma once

#include <sstream>
#include <string>
#include <string_view>

namespace weft {

namespace detail {
void append_until_braces(std::string& out, std::string_view& pattern);
}

template <class... Args>
std::string text(std::string_view pattern, const Args&... args) {
  std::string out;
  [[maybe_unused]] auto one = [&](const auto& arg) {
    detail::append_until_braces(out, pattern);
    std::ostringstream stream;
    stream << std::boolalpha << arg;
    out += stream.str();
  };
  (one(args), ...);
  out += pattern;
  return out;
}

}  // namespace weft
