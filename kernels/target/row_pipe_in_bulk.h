// SPDX-License-Identifier: Apache-2.0
//
// RowPipe: rows through shared memory by bulk copies. RowQueue, RowWriter: rows into shared memory, and out of it.
// Included by a target's row_pipe.h, after its groups, its memory, and the functions of namespace bulk.
#pragma once

namespace weft {

// Streams items (rows or pieces of rows) to one or more places each.
//   pipe.run(next, sink): next() -> RowItem, one without a source ends; sink(tag, stage) calls
//   pipe.store(dst, stage).
// All lanes call run(), next(), sink() and store(); each lane gives store() its own place, or null. Loads
// of run() are ahead of stores by half the stages. After drain() every store is visible to a peer that acquires a later
// release by lane 0 of this warp; after drain_but<n>() every store but those of the last n items. A relaxed
// store may overtake drained rows on NVLink (seen on H200).
template <uint32_t kStages>
class RowPipe {
 public:
  static constexpr uint32_t kAhead = kStages / 2;
  static_assert(kStages * 8 <= kPipeBarrierBytes && kStages >= 2);

  WEFT_DEVICE RowPipe(Warp warp, std::byte* shared, uint32_t piece_bytes)
      : barriers_(reinterpret_cast<uint64_t*>(shared)),
        stages_(shared + kPipeBarrierBytes),
        piece_bytes_(piece_bytes),
        warp_(warp) {
    if (warp_.rank() == 0) {
      for (uint32_t i = 0; i < kStages; ++i) bulk::barrier_init(&barriers_[i]);
      bulk::fence_async_shared();
    }
    warp_.sync();
  }

  // A fence: later loads read what the warp has acquired.
  WEFT_DEVICE void fence_acquired() const {
    warp_.sync();
    bulk::fence_async();
  }
  template <class Next, class Sink>
  WEFT_DEVICE void run(Next next, Sink sink) {
    decltype(next()) loading[kAhead] = {};  // oldest first
    for (bool more = true; more || stored_ != loaded_;) {
      const auto oldest = loading[0];
      WEFT_UNROLL
      for (uint32_t i = 1; i < kAhead; ++i) loading[i - 1] = loading[i];
      loading[kAhead - 1] = {};
      if (more) loading[kAhead - 1] = next();
      more = more && loading[kAhead - 1].piece.src;
      if (more) load(loading[kAhead - 1].piece);
      if (oldest.piece.src) store_oldest(oldest, sink);
    }
  }
  WEFT_DEVICE void store(std::byte* dst, RowPiece stage) {
    if (dst) bulk::store(dst, stage.src, stage.bytes);
  }
  template <uint32_t kItems>
  WEFT_DEVICE void drain_but() {
    bulk::wait_written<kItems>();
    warp_.sync();
  }
  WEFT_DEVICE void drain() { drain_but<0>(); }

 private:
  WEFT_DEVICE void load(RowPiece piece) {
    // The stage was last stored kStages items ago; at most kStages - kAhead - 1 items were committed since.
    bulk::wait_read<kStages - kAhead - 1>();
    warp_.sync();
    if (warp_.rank() == 0)
      bulk::load(stages_ + (loaded_ % kStages) * piece_bytes_, piece.src, piece.bytes,
                 &barriers_[loaded_ % kStages]);
    ++loaded_;
  }
  template <class Item, class Sink>
  WEFT_DEVICE void store_oldest(const Item& item, Sink& sink) {
    bulk::wait_loaded(&barriers_[stored_ % kStages], (stored_ / kStages) & 1);
    sink(item.tag, RowPiece{stages_ + (stored_ % kStages) * piece_bytes_, item.piece.bytes});
    bulk::commit();
    ++stored_;
  }

  uint64_t* barriers_;
  std::byte* stages_;
  uint32_t piece_bytes_;
  Warp warp_;
  uint32_t loaded_ = 0;  // items so far: stages and barrier phases continue across runs
  uint32_t stored_ = 0;
};

// Pieces of rows that a warp reads in shared memory, in the order in which it asked for them. All lanes call all functions,
// with the same arguments.
//   queue.fence_acquired(): a fence, after which copies read what the warp has acquired
//   queue.ask(src, bytes): where has_room(); src is 16-byte aligned, bytes a multiple of 16, kQueuePieceBytes at most
//   queue.front(): waits for the oldest piece; pop(): all lanes have read it
// Before the warp ends it pops all that it asked for.
class RowQueue {
 public:
  // shared: queue_bytes(slots) of this warp, 128-byte aligned; slots: kMostQueueSlots at most.
  WEFT_DEVICE RowQueue(Warp warp, std::byte* shared, uint32_t slots)
      : barriers_(reinterpret_cast<uint64_t*>(shared)),
        pieces_(shared + kPipeBarrierBytes),
        slots_(slots),
        warp_(warp) {
    if (warp_.rank() == 0) {
      for (uint32_t i = 0; i < slots; ++i) bulk::barrier_init(&barriers_[i]);
      bulk::fence_async_shared();
    }
    warp_.sync();
  }
  WEFT_DEVICE void fence_acquired() const {
    warp_.sync();
    bulk::fence_async();
  }
  WEFT_DEVICE bool has_room() const { return waiting_ != slots_; }
  WEFT_DEVICE void ask(const std::byte* src, uint32_t bytes) {
    if (warp_.rank() == 0) bulk::load(pieces_ + back_ * kQueuePieceBytes, src, bytes, &barriers_[back_]);
    back_ = back_ + 1 == slots_ ? 0 : back_ + 1;
    ++waiting_;
  }
  WEFT_DEVICE const Vec16* front() const {
    bulk::wait_loaded(&barriers_[front_], parity_);
    return reinterpret_cast<const Vec16*>(pieces_ + front_ * kQueuePieceBytes);
  }
  WEFT_DEVICE void pop() {
    // The next load into the slot comes by another proxy than what lanes have read.
    bulk::fence_async_shared();
    warp_.sync();
    --waiting_;
    parity_ ^= front_ + 1 == slots_ ? 1 : 0;
    front_ = front_ + 1 == slots_ ? 0 : front_ + 1;
  }

 private:
  uint64_t* barriers_;
  std::byte* pieces_;
  uint32_t slots_;
  Warp warp_;
  uint32_t back_ = 0;
  uint32_t front_ = 0;
  uint32_t waiting_ = 0;
  uint32_t parity_ = 0;
};

// Pieces of rows that a warp makes, on their way to where they go. All lanes call all functions, with the same arguments.
//   writer.begin(dst): where the piece for dst is to be written, of kQueuePieceBytes at most
//   writer.finish(dst, bytes): when all lanes have written; dst is 16-byte aligned, bytes a multiple of 16
// After drain() every piece is visible to a peer that acquires a later release by lane 0 of this warp; after
// drain_but<n>() every piece but the last n.
class RowWriter {
 public:
  // shared: kWriterBytes of this warp, 128-byte aligned.
  WEFT_DEVICE RowWriter(Warp warp, std::byte* shared) : pieces_(shared), warp_(warp) {}

  WEFT_DEVICE Vec16* begin(std::byte* /*dst*/) {
    bulk::wait_read<kWriterSlots - 1>();
    warp_.sync();
    return reinterpret_cast<Vec16*>(piece());
  }
  WEFT_DEVICE void finish(std::byte* dst, uint32_t bytes) {
    bulk::fence_async_shared();
    warp_.sync();
    if (warp_.rank() == 0) {
      bulk::store(dst, piece(), bytes);
      bulk::commit();
    }
    slot_ = slot_ + 1 == kWriterSlots ? 0 : slot_ + 1;
  }
  template <uint32_t kPieces>
  WEFT_DEVICE void drain_but() {
    bulk::wait_written<kPieces>();
    warp_.sync();
  }
  WEFT_DEVICE void drain() { drain_but<0>(); }

 private:
  WEFT_DEVICE std::byte* piece() const { return pieces_ + slot_ * kQueuePieceBytes; }

  std::byte* pieces_;
  Warp warp_;
  uint32_t slot_ = 0;
};

}  // namespace weft
