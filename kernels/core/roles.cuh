// SPDX-License-Identifier: Apache-2.0
//
// roles.cuh: which warps of a block do what. A launch gives each role a range of warps; where a block has too
// few (the host often has one), ranges overlap and a warp takes its roles one after the other.
#pragma once

#include "kernels/target/target.h"

namespace weft {

struct WarpRange {
  uint32_t first;
  uint32_t count;
};

// One warp's share of a role's work over the whole grid: items index, index + total, index + 2 * total, ...
struct Share {
  uint64_t index;
  uint64_t total;
  bool active;

  // How many of `items` fall to this warp.
  WEFT_DEVICE uint64_t count(uint64_t items) const {
    return active && items > index ? (items - index - 1) / total + 1 : 0;
  }
};

WEFT_DEVICE Share share_of(Block block, Warp warp, WarpRange role) {
  const bool active = warp.index() >= role.first && warp.index() < role.first + role.count;
  return {uint64_t{block.index()} * role.count + (warp.index() - role.first),
          uint64_t{block.count()} * role.count, active};
}

}  // namespace weft
