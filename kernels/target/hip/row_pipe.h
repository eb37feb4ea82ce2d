// SPDX-License-Identifier: Apache-2.0
//
// RowPipe: rows by loads and stores.
#pragma once

#include "kernels/target/hip/groups.h"
#include "kernels/target/hip/memory.h"

namespace weft {

inline constexpr bool kHasBulkCopies = false;

// Streams items (rows or pieces of rows) to one or more places each, with loads and stores straight from the
// source: CDNA has no engine that a kernel could hand a whole row to.
//   pipe.run(next, sink): next() -> RowItem, one without a source ends; sink(tag, stage) calls
//   pipe.store(dst, stage) for each place.
// After drain() every store made so far is visible to a peer that acquires a later release by lane 0 of this
// warp; drain_but() does the same here.
template <uint32_t kStages>
class RowPipe {
 public:
  WEFT_DEVICE RowPipe(Warp warp, std::byte* /*shared*/, uint32_t /*piece_bytes*/) : warp_(warp) {}

  WEFT_DEVICE void sees_arrived() const { warp_.sync(); }
  template <class Next, class Sink>
  WEFT_DEVICE void run(Next next, Sink sink) {
    for (auto item = next(); item.piece.src; item = next()) sink(item.tag, item.piece);
  }
  WEFT_DEVICE void store(std::byte* dst, RowPiece stage) {
    const auto* from = reinterpret_cast<const Vec16*>(stage.src);
    auto* to = reinterpret_cast<Vec16*>(dst);
    for (uint32_t i = warp_.rank(); i < stage.bytes / 16; i += warp_.size())
      store_vec(to + i, load_vec_streaming(from + i));
  }
  template <uint32_t kItems>
  WEFT_DEVICE void drain_but() {
    fence_system();
    warp_.sync();
  }
  WEFT_DEVICE void drain() { drain_but<0>(); }

 private:
  Warp warp_;
};

}  // namespace weft
