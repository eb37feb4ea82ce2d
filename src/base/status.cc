// SPDX-License-Identifier: Apache-2.0
#include "base/status.h"

#include <system_error>

namespace weft {

const char* to_string(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalid:
      return "invalid";
    case Code::kCapacity:
      return "capacity";
    case Code::kPeerLost:
      return "peer_lost";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kSystem:
      return "system";
    case Code::kClosed:
      return "closed";
  }
  return "unknown";
}

std::string Status::errno_text(int error_number) {
  return std::generic_category().message(error_number);
}

namespace detail {

void append_until_braces(std::string& out, std::string_view& pattern) {
  const size_t at = pattern.find("{}");
  if (at == std::string_view::npos) return;
  out += pattern.substr(0, at);
  pattern.remove_prefix(at + 2);
}

}  // namespace detail
}  // namespace weft
