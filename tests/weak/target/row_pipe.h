// SPDX-License-Identifier: Apache-2.0
//
// RowPipe, RowQueue and RowWriter of the CUDA target, over bulk copies of the weak machine.
#pragma once

#include "weak/target/groups.h"
#include "weak/target/memory.h"

namespace weft {

inline constexpr bool kHasBulkCopies = true, kHasRowQueue = true;

namespace bulk {

using weak::Spot;

inline void barrier_init(uint64_t* barrier, Spot spot = Spot::current()) {
  weak::machine().barrier_init(barrier, {"barrier_init", spot, nullptr});
}
inline void fence_async_shared(Spot spot = Spot::current()) {
  weak::machine().fence_async(true, {"fence_async_shared", spot, nullptr});
}
inline void fence_async(Spot spot = Spot::current()) {
  weak::machine().fence_async(false, {"fence_async", spot, nullptr});
}
inline void load(std::byte* stage, const std::byte* src, uint32_t bytes, uint64_t* barrier,
                 Spot spot = Spot::current()) {
  weak::machine().bulk_load(stage, src, bytes, barrier, {"bulk::load", spot, nullptr});
}
inline void wait_loaded(uint64_t* barrier, uint32_t parity, Spot spot = Spot::current()) {
  weak::machine().wait_loaded(barrier, parity, {"wait_loaded", spot, nullptr});
}
inline void store(std::byte* dst, const std::byte* stage, uint32_t bytes, Spot spot = Spot::current()) {
  weak::machine().bulk_store(dst, stage, bytes, {"bulk::store", spot, nullptr});
}
inline void commit() {
  weak::machine().bulk_commit();
}
template <uint32_t kPending>
void wait_read(Spot spot = Spot::current()) {
  weak::machine().wait_groups(kPending, true, {"wait_read", spot, nullptr});
}
template <uint32_t kPending>
void wait_written(Spot spot = Spot::current()) {
  weak::machine().wait_groups(kPending, false, {"wait_written", spot, nullptr});
  fence_async(spot);
}

}  // namespace bulk
}  // namespace weft

#include "kernels/target/row_pipe_in_bulk.h"
