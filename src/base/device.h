// SPDX-License-Identifier: Apache-2.0
//
// Device names what a rank computes on: this machine's CPUs, or one GPU.
//   Device{Device::Kind::kCuda, 3}      // "cuda:3"
// Threads: a value.
#pragma once

#include <compare>
#include <ostream>

namespace weft {

struct Device {
  enum class Kind { kHost, kCuda };
  Kind kind = Kind::kHost;
  int ordinal = 0;  // CUDA's number within this process; 0 for kHost

  bool is_host() const { return kind == Kind::kHost; }
  friend auto operator<=>(const Device&, const Device&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Device& device) {
    return device.is_host() ? out << "cpu" : out << "cuda:" << device.ordinal;
  }
};

}  // namespace weft
