// SPDX-License-Identifier: Apache-2.0
//
// RowPipe by loads and stores, straight from the source: for GPUs without an engine that a kernel could hand a whole row
// to. Included by a target's row_pipe.h, after its groups and memory.
#pragma once

namespace weft {

// Streams items (rows or pieces of rows) to one or more places each.
//   pipe.run(next, sink): next() -> RowItem, one without a source ends; sink(tag, stage) calls
//   pipe.store(dst, stage).
// All lanes call run(), next(), sink() and store(); each lane gives store() its own place, or null.
// After drain() every store made so far is visible to a peer that acquires a later release by lane 0 of this
// warp; drain_but() does the same here.
template <uint32_t kStages>
class RowPipe {
 public:
  WEFT_DEVICE RowPipe(Warp warp, std::byte* /*shared*/, uint32_t /*piece_bytes*/) : warp_(warp) {}

  WEFT_DEVICE void fence_acquired() const { warp_.sync(); }
  template <class Next, class Sink>
  WEFT_DEVICE void run(Next next, Sink sink) {
    for (auto item = next(); item.piece.src; item = next()) sink(item.tag, item.piece);
  }
  WEFT_DEVICE void store(std::byte* dst, RowPiece stage) {
    const auto* from = reinterpret_cast<const Vec16*>(stage.src);
    for (uint32_t lane = 0; lane < warp_.size(); ++lane) {
      auto* to = reinterpret_cast<Vec16*>(warp_.broadcast(reinterpret_cast<uint64_t>(dst), lane));
      if (!to) continue;
      for (uint32_t i = warp_.rank(); i < stage.bytes / 16; i += warp_.size())
        store_vec(to + i, load_vec(from + i));
    }
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
