// SPDX-License-Identifier: Apache-2.0
//
// roles.cuh: which warps of a block do what. A launch gives each role a range of warps; where a block has too
// few (the host often has one), ranges overlap and a warp takes its roles one after the other.
#pragma once

#include "kernels/core/grid.cuh"

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
};

WEFT_DEVICE Share share_of(Block block, Warp warp, WarpRange role) {
  const bool active = warp.index() >= role.first && warp.index() < role.first + role.count;
  return {uint64_t{block.index()} * role.count + (warp.index() - role.first),
          uint64_t{block.count()} * role.count, active};
}

// A role's items, taken by its warps as they get to them: SMs do not push at the same speed. One role of a
// launch may do so. The next item is asked for one ahead, since the answer takes a while.
class Tasks {
 public:
  WEFT_DEVICE Tasks(Warp warp, const Share& share, GridState* state)
      : warp_(warp), taken_(&state->taken), next_(share.index), total_(share.total) {}

  WEFT_DEVICE uint64_t take() {
    const uint64_t task = is_first_ ? next_ : total_ + warp_.broadcast(asked_);
    is_first_ = false;
    if (warp_.rank() == 0) asked_ = add_local(taken_, uint32_t{1});
    return task;
  }

 private:
  Warp warp_;
  uint32_t* taken_;
  uint64_t next_;
  uint64_t total_;
  uint32_t asked_ = 0;
  bool is_first_ = true;
};

}  // namespace weft
