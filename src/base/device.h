// SPDX-License-Identifier: Apache-2.0
//
// Device names what a rank computes on: the host, or one GPU.
#pragma once

#include <compare>
#include <string>

#include "base/text.h"

namespace weft {

struct Device {
  enum class Kind { kHost, kCuda } kind = Kind::kHost;
  int ordinal = 0;  // CUDA's number within this process; 0 for the host

  auto operator<=>(const Device&) const = default;
};

inline std::string to_string(Device device) {
  return device.kind == Device::Kind::kHost ? "host" : text("cuda:{}", device.ordinal);
}

}  // namespace weft
