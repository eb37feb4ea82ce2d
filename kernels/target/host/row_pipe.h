// SPDX-License-Identifier: Apache-2.0
//
// RowPipe: rows by copies of one thread. RowQueue, RowWriter: rows where they are.
#pragma once

#include "kernels/target/host/groups.h"
#include "kernels/target/host/memory.h"

namespace weft {

inline constexpr bool kHasBulkCopies = false, kHasRowQueue = true;

// Streams items (rows or pieces of rows) to one or more places each. On the host the source itself is the
// stage.
//   pipe.run(next, sink): next() -> RowItem, one without a source ends; sink(tag, stage) calls
//   pipe.store(dst, stage).
// All lanes call run(), next(), sink() and store(); each lane gives store() its own place, or null.
// After drain() every store is visible to a peer that acquires a later release by this warp; after
// drain_but<n>() every store but those of the last n items.
template <uint32_t kStages>
class RowPipe {
 public:
  RowPipe(Warp, std::byte* /*shared*/, uint32_t /*piece_bytes*/) {}

  void fence_acquired() const {}
  template <class Next, class Sink>
  void run(Next next, Sink sink) {
    for (auto item = next(); item.piece.src; item = next()) sink(item.tag, item.piece);
  }
  void store(std::byte* dst, RowPiece stage) {
    if (!dst) return;
    stored_ += stage.bytes;
    if (stored_ > kCachedBytes / 4)
      copy_past_caches(dst, stage.src, stage.bytes);
    else
      copy_cold(dst, stage.src, stage.bytes);
  }
  template <uint32_t kItems>
  void drain_but() {
    drain();
  }
  void drain() { publish_streaming_stores(); }

 private:
  uint64_t stored_ = 0;  // by this thread, of several
};

// As on GPUs (kernels/target/cuda/row_pipe.h), in the same order, without copies.
class RowQueue {
 public:
  RowQueue(Warp, std::byte* /*shared*/, uint32_t slots) : slots_(slots) {}
  void fence_acquired() const {}
  bool has_room() const { return waiting_ != slots_; }
  void ask(const std::byte* src, uint32_t /*bytes*/) { pieces_[(front_ + waiting_++) % slots_] = src; }
  const Vec16* front() const { return reinterpret_cast<const Vec16*>(pieces_[front_]); }
  void pop() {
    front_ = (front_ + 1) % slots_;
    --waiting_;
  }

 private:
  const std::byte* pieces_[kMostQueueSlots] = {};
  uint32_t slots_;
  uint32_t front_ = 0;
  uint32_t waiting_ = 0;
};

class RowWriter {
 public:
  RowWriter(Warp, std::byte* /*shared*/) {}
  Vec16* begin(std::byte* dst) { return reinterpret_cast<Vec16*>(dst); }
  void finish(std::byte* /*dst*/, uint32_t /*bytes*/) {}
  template <uint32_t kPieces>
  void drain_but() {}
  void drain() {}
};

}  // namespace weft
