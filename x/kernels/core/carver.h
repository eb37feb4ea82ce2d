// SPDX-License-Identifier: Apache-2.0
//
// Carver lays out a range of memory: each take() gives the next piece's offset, end() the size of all.
//   Carver carver(begin);  layout.signal = carver.take(ranks * 8);  ...  layout.end = carver.end();
// Host and device carve alike, so an offset is described once.
#pragma once

#include "kernels/target/target.h"

namespace weft {

class Carver {
 public:
  WEFT_DEVICE constexpr explicit Carver(uint64_t begin = 0) : end_(begin) {}

  WEFT_DEVICE constexpr uint64_t take(uint64_t bytes, uint64_t alignment = 128) {
    const uint64_t at = (end_ + alignment - 1) / alignment * alignment;
    end_ = at + bytes;
    return at;
  }
  WEFT_DEVICE constexpr uint64_t end() const { return end_; }

 private:
  uint64_t end_;
};

}  // namespace weft
