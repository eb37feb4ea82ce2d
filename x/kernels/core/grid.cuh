// SPDX-License-Identifier: Apache-2.0
//
// grid.cuh: what the blocks of one launch agree on without a barrier between them.
#pragma once

#include "kernels/target/target.h"

namespace weft {

// Kept in local device memory, zero before the first launch. `epoch` numbers the finished launches of one
// kernel, so a captured graph that is replayed goes on counting.
struct GridState {
  uint64_t epoch;
  uint32_t arrived;
  uint32_t taken;  // Tasks of this launch
};
static_assert(sizeof(GridState) == 16);

// True in every thread of the block that arrives last; what other blocks wrote before is visible to it.
WEFT_DEVICE bool last_block(Block block, uint32_t* arrived, uint32_t* shared_flag) {
  block.sync();
  if (block.rank() == 0) {
    fence_system();
    const bool last = add_local_acq_rel(arrived, uint32_t{1}) + 1 == block.count();
    if (last) store_relaxed(arrived, uint32_t{0});
    *shared_flag = last ? 1 : 0;
  }
  block.sync();
  const bool last = *shared_flag != 0;
  block.sync();
  return last;
}

// By one thread of the last block: every block has read the epoch and taken its tasks.
WEFT_DEVICE void advance(GridState* state) {
  state->taken = 0;
  state->epoch += 1;
}

// Ends a launch: the last block to come advances the epoch.
WEFT_DEVICE void finish_launch(Block block, GridState* state, uint32_t* shared_flag) {
  if (last_block(block, &state->arrived, shared_flag) && block.rank() == 0) advance(state);
}

}  // namespace weft
