// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_bulk.cuh: the dispatch of low_latency_dispatch.cuh for launches on few SMs: the same messages and
// words, but no lines. A block there has many tokens, one after the other; here each of its warps has tokens of its own, and
// rows go through shared memory by bulk copies, so that an SM has many under way.
// Send:    1 a block counts what is chosen before its tokens, and each warp counts on; the last one tells all counts
//          2 every warp takes consecutive batches: finds a token's places, writes heads and scales there, and has the row
//            copied to all of them; then the batch's words move
// Receive: 3 as there
//          4 every warp takes (source, batch) pairs, and has each message's row copied to its places
// Waits, order: as there.
//
// A warp has a token, or a message, of its own: BulkDispatch is Dispatch with the warp's part of shared memory in place of
// the block's. Rows go through the warp's pipe piece by piece.
#pragma once

#include "kernels/moe/low_latency_dispatch.cuh"
#include "kernels/moe/low_latency_dispatch_receive.cuh"
#include "kernels/moe/low_latency_dispatch_send.cuh"
#include "kernels/moe/low_latency_layout.h"

namespace weft {
namespace low_latency {

template <class MeshT, class Shape>
struct BulkDispatch : Dispatch<MeshT, Shape> {
  using Base = Dispatch<MeshT, Shape>;
  uint32_t current = 0;  // which of the batches that are sent together

  // The same with what the block has: its prefix() counts for all warps.
  WEFT_DEVICE const Base& of_block() const { return *this; }

  WEFT_DEVICE DispatchBulkShared bulk() const {
    return dispatch_bulk_shared(this->shared().bytes, this->shape.ranks, this->shape.experts_per_rank,
                                this->shape.top_k, this->block.warps(), this->shape.row_bytes);
  }
  template <class T>
  WEFT_DEVICE T* own(uint64_t offset) const {
    return this->template at<T>(bulk().parts + this->warp.index() * bulk().part_bytes + offset);
  }
  WEFT_DEVICE int32_t* slot_choice() const { return own<int32_t>(bulk().slot); }
  WEFT_DEVICE uint32_t* slot_rank() const { return own<uint32_t>(bulk().slot) + this->top_k(); }
  WEFT_DEVICE uint32_t* slot_expert() const { return slot_rank() + this->top_k(); }
  WEFT_DEVICE uint32_t* slot_place() const { return slot_expert() + this->top_k(); }
  WEFT_DEVICE uint32_t* targets() const { return own<uint32_t>(bulk().targets); }
  WEFT_DEVICE uint32_t* target() const { return own<uint32_t>(bulk().target); }
  WEFT_DEVICE std::byte** place() const { return own<std::byte*>(bulk().place); }
  WEFT_DEVICE uint32_t* sent() const { return own<uint32_t>(bulk().sent) + current * this->ranks(); }
  WEFT_DEVICE uint32_t* prefix() const { return own<uint32_t>(bulk().prefix); }

  WEFT_DEVICE uint32_t piece_bytes() const { return bulk_piece_bytes(this->shape.row_bytes); }
  WEFT_DEVICE std::byte* pipe() const {
    return this->template at<std::byte>(bulk().pipes + this->warp.index() * pipe_bytes(piece_bytes()));
  }
};

// Where a row goes: its places are dealt out to the lanes.
inline constexpr uint32_t kPlacesOfLane = (kMostBulkTopK + Warp::kMaxSize - 1) / Warp::kMaxSize;
struct RowPlaces {
  std::byte* at[kPlacesOfLane];
};
template <class PlaceOf>
WEFT_DEVICE RowPlaces row_places(Warp warp, uint32_t count, PlaceOf place_of) {
  RowPlaces places{};
  WEFT_UNROLL
  for (uint32_t i = 0; i < kPlacesOfLane; ++i) {
    const uint32_t number = warp.rank() + i * warp.size();
    if (number < count) places.at[i] = place_of(number);
  }
  return places;
}

// A row on its way through a pipe.
struct RowInPieces {
  const std::byte* src = nullptr;
  RowPlaces to{};
  uint32_t bytes = 0;
  uint32_t next = 0;

  WEFT_DEVICE bool is_over() const { return next >= bytes; }
  WEFT_DEVICE RowItem<RowPlaces> take(uint32_t piece_bytes) {
    const uint32_t left = bytes - next;
    RowItem<RowPlaces> item{{src + next, left < piece_bytes ? left : piece_bytes}, {}};
    WEFT_UNROLL
    for (uint32_t i = 0; i < kPlacesOfLane; ++i) item.tag.at[i] = to.at[i] ? to.at[i] + next : nullptr;
    next += piece_bytes;
    return item;
  }
};

// Sends the rows that find(row) brings, until it returns false, through the pipe. The warp.
template <class Pipe, class Find>
WEFT_DEVICE void stream_rows(Pipe& pipe, uint32_t piece_bytes, Find find) {
  RowInPieces row;
  auto next = [&]() -> RowItem<RowPlaces> {
    while (row.is_over())
      if (!find(row)) return {};
    return row.take(piece_bytes);
  };
  pipe.run(next, [&](const RowPlaces& to, RowPiece piece) {
    WEFT_UNROLL
    for (uint32_t i = 0; i < kPlacesOfLane; ++i) pipe.store(to.at[i], piece);
  });
}

// ---- steps 3 and 4

// The messages of a warp's (source, batch) pairs, in order. The warp.
template <class D>
class Messages {
 public:
  WEFT_DEVICE explicit Messages(const D& d)
      : d_(d), share_(warp_share(d.block, d.warp)), job_(share_.index) {}

  // The row of the next message, when it has come and all else of it was unpacked. False: there are no more.
  template <class Pipe>
  WEFT_DEVICE bool find(RowInPieces& row, const Pipe& pipe) {
    while (true) {
      if (unpacked_ < arrived_) {
        row = unpack();
        return true;
      }
      if (!has_batch_) {
        if (!begin_batch()) return false;
      } else if ((word_ & kWordDone) != 0 || !await_more(pipe)) {
        end_batch();
      }
    }
  }

 private:
  WEFT_DEVICE bool begin_batch() {
    if (job_ >= d_.a.source_jobs.value * d_.ranks()) return false;
    source_ = (d_.mesh.rank() + job_ / d_.a.source_jobs) % d_.ranks();
    batch_ = job_ % d_.a.source_jobs;
    job_ += share_.total;
    unpacked_ = arrived_ = 0;
    word_ = d_.present()[source_] == 0 ? kWordDone : 0;
    has_batch_ = true;
    return true;
  }
  WEFT_DEVICE void end_batch() {
    if (d_.warp.rank() == 0)
      d_.a.routes[d_.routes().counts + uint64_t{source_} * d_.batches().count + batch_] =
          static_cast<int32_t>(unpacked_);
    has_batch_ = false;
  }
  template <class Pipe>
  WEFT_DEVICE bool await_more(const Pipe& pipe) {
    const uint64_t want = d_.epoch.number * kWordEpoch + unpacked_ + 1;
    const uint64_t start = cycles();
    uint64_t word = 0;
    if (d_.warp.rank() == 0) {
      if (!await(d_.a.call, d_.mesh, batch_word(d_.of_block(), source_, batch_), want, source_,
                 Site::kLowLatencyDispatchRecv, kWordEpoch, word))
        word = 0;
      if (word != 0 && unpacked_ == 0 && batch_ == 0 && d_.a.wait_cycles)
        add_local(&d_.a.wait_cycles[source_], cycles() - start);
    }
    word_ = d_.warp.broadcast(word);
    if (word_ < want) return false;
    arrived_ = static_cast<uint32_t>(word_ & kMaxBatchTokens);
    pipe.fence_acquired();
    return true;
  }

  WEFT_DEVICE RowInPieces unpack() {
    const Span traced(d_.a.call.wait.trace, Work::kUnpack, d_.warp.rank() == 0, source_);
    const std::byte* message = d_.inbox(source_) + d_.message_at(source_, batch_, unpacked_);
    const auto* vecs = reinterpret_cast<const Vec16*>(message);
    const uint32_t head_vecs = d_.message().head_vecs(), lane = d_.warp.rank();
    const auto row_vecs = static_cast<uint32_t>(d_.shape.row_bytes / sizeof(Vec16));
    const uint32_t scale_vecs = d_.message().body_vecs() - row_vecs;
    const Vec16* scales = vecs + head_vecs + row_vecs;
    // Both at once: memory is far.
    Vec16 held{};
    if (lane < scale_vecs) held = load_vec_fresh(scales + lane);
    for (uint32_t i = lane; i < head_vecs; i += d_.warp.size()) d_.head()[i] = load_vec_fresh(vecs + i);
    d_.warp.sync();
    const uint32_t count = place_message(d_.of_block(), source_);
    WEFT_ROLLED
    for (uint32_t i = lane; i < scale_vecs; i += d_.warp.size()) {
      if (i != lane) held = load_vec_fresh(scales + i);
      store_scales(d_.of_block(), count, row_vecs + i, held);
    }
    const RoutesLayout routes = d_.routes();
    const uint64_t slot =
        (uint64_t{source_} * d_.batches().count + batch_) * d_.batches().capacity + unpacked_;
    note_message(d_.of_block(), source_, d_.a.routes + routes.records + slot * routes.record_words);
    RowInPieces row{message + d_.message().row,
                    row_places(d_.warp, count,
                               [&](uint32_t i) {
                                 return d_.a.out + static_cast<uint64_t>(d_.rows()[i]) * d_.shape.row_bytes;
                               }),
                    count == 0 ? 0 : static_cast<uint32_t>(d_.shape.row_bytes)};
    d_.warp.sync();
    ++unpacked_;
    return row;
  }

  const D& d_;
  WarpShare share_;
  uint32_t job_;
  uint32_t source_ = 0;
  uint32_t batch_ = 0;
  uint32_t unpacked_ = 0;
  uint32_t arrived_ = 0;
  uint64_t word_ = 0;
  bool has_batch_ = false;
};

template <class D, class Pipe>
WEFT_DEVICE void receive_in_bulk(const D& d, Pipe& pipe) {
  Messages<D> messages(d);
  stream_rows(pipe, d.piece_bytes(), [&](RowInPieces& row) { return messages.find(row, pipe); });
  pipe.drain();
}

// ---- steps 1 and 2

// The warps of all blocks, so that a block's are neighbours.
template <class D>
WEFT_DEVICE WarpShare neighbouring_share(const D& d) {
  return {d.block.index() * d.block.warps() + d.warp.index(), d.block.count() * d.block.warps()};
}
// How many batches have tokens: the first ones.
template <class D>
WEFT_DEVICE uint32_t filled_batches(const D& d) {
  return (d.a.call.tokens + d.a.call.batch_tokens.value - 1) / d.a.call.batch_tokens;
}
// Those of warp `index`.
template <class D>
WEFT_DEVICE Range batches_of_warp(const D& d, uint32_t index) {
  const uint32_t filled = filled_batches(d), total = d.block.count() * d.block.warps();
  return {filled * index / total, filled * (index + 1) / total};
}
template <class D>
WEFT_DEVICE uint32_t first_token_of(const D& d, uint32_t warp_index) {
  return batch_tokens(d, batches_of_warp(d, warp_index).first).first;
}

// While the first warp finds the call, unless there is but one: the block's prefix() becomes what is chosen before its tokens.
template <class D>
WEFT_DEVICE void count_before(const D& d) {
  const uint32_t apart = d.block.warps() > 1 ? d.warp.size() : 0;
  if (d.block.rank() < apart) return;
  add_choices(d.of_block(), 0, first_token_of(d, d.block.index() * d.block.warps()) * d.top_k(),
              d.block.rank() - apart, d.block.size() - apart);
}

// After that: the warp's becomes what is chosen before the warp's.
template <class D>
WEFT_DEVICE void count_on(const D& d) {
  const uint32_t known = first_token_of(d, d.block.index() * d.block.warps());
  const uint32_t* before = d.of_block().prefix();
  for (uint32_t i = d.warp.rank(); i < d.ranks() * d.local_experts(); i += d.warp.size())
    d.prefix()[i] = before[i];
  d.warp.sync();
  add_choices(d, known * d.top_k(), first_token_of(d, neighbouring_share(d).index) * d.top_k(), d.warp.rank(),
              d.warp.size());
  d.warp.sync();
}

// The blocks that tell counts: the block's prefix() becomes all that is chosen. Needed no more.
template <class D>
WEFT_DEVICE void tell_counts(const D& d) {
  if (d.block.index() < counting_blocks(d).first) return;
  d.block.sync();
  add_choices(d.of_block(), first_token_of(d, d.block.index() * d.block.warps()) * d.top_k(),
              d.a.call.tokens * d.top_k(), d.block.rank(), d.block.size());
  d.block.sync();
  send_counts(d.of_block(), true);
}

// The scales of a token, at the places of its messages. The warp.
template <class D>
WEFT_DEVICE void write_scales(const D& d, uint32_t token) {
  const uint64_t scales = d.message().scales;
  const uint32_t targets = *d.targets();
  const auto words = static_cast<uint32_t>(d.shape.scale_bytes / 4);
  const auto* from = reinterpret_cast<const uint32_t*>(d.a.x_scales) + uint64_t{token} * words;
  WEFT_ROLLED
  for (uint32_t i = d.warp.rank(); i < words; i += d.warp.size()) {
    const uint32_t word = from[i];
    for (uint32_t t = 0; t < targets; ++t)
      store_unordered(reinterpret_cast<uint32_t*>(d.place()[t] + scales) + i, word);
  }
}

// All of a token's messages but the row, and where that goes. The warp.
template <class D>
WEFT_DEVICE RowInPieces begin_messages(const D& d, uint32_t batch, uint32_t token) {
  read_choices(d, token);
  route_token(d, batch);
  d.warp.sync();
  write_heads(d, token);
  write_scales(d, token);
  const uint32_t targets = *d.targets();
  RowInPieces row{d.a.x + token * d.a.x_row_bytes,
                  row_places(d.warp, targets, [&](uint32_t t) { return d.place()[t] + d.message().row; }),
                  targets == 0 ? 0 : static_cast<uint32_t>(d.shape.row_bytes)};
  d.warp.sync();
  count_token(d);
  return row;
}

template <class D>
WEFT_DEVICE void clear_sent(const D& d) {
  for (uint32_t peer = d.warp.rank(); peer < d.ranks(); peer += d.warp.size()) d.sent()[peer] = 0;
  d.warp.sync();
}

// Batches [first, last), kBatchesTogether at most: their rows, then, when these have arrived, their words. The warp.
template <class D, class Pipe>
WEFT_DEVICE void send_batches_together(D& d, Pipe& pipe, uint32_t first, uint32_t last) {
  const Span traced(d.a.call.wait.trace, Work::kSendBatch, d.warp.rank() == 0);
  uint32_t batch = first;
  d.current = 0;
  clear_sent(d);
  Range tokens = batch_tokens(d, batch);
  stream_rows(pipe, d.piece_bytes(), [&](RowInPieces& row) {
    while (tokens.first == tokens.last) {
      if (++batch == last) return false;
      d.current = batch - first;
      clear_sent(d);
      tokens = batch_tokens(d, batch);
    }
    row = begin_messages(d, batch, tokens.first++);
    return true;
  });
  pipe.drain();
  for (batch = first; batch < last; ++batch) {
    d.current = batch - first;
    move_words(d, batch, kWordDone);
  }
  d.warp.sync();
}

template <class D, class Pipe>
WEFT_DEVICE void send_batches_in_bulk(D& d, Pipe& pipe) {
  const WarpShare share = neighbouring_share(d);
  const Range batches = batches_of_warp(d, share.index);
  const uint32_t together = d.a.call.batch_tokens.value == 1 ? kBatchesTogether : 1;
  WEFT_ROLLED
  for (uint32_t batch = batches.first; batch < batches.last; batch += together)
    send_batches_together(d, pipe, batch, batch + together < batches.last ? batch + together : batches.last);
  d.current = 0;
  clear_sent(d);
  WEFT_ROLLED
  for (uint32_t batch = filled_batches(d) + share.index; batch < d.batches().count; batch += share.total)
    move_empty_words(d, batch);
}

template <class MeshT, class Shape>
WEFT_DEVICE void dispatch_in_bulk(const LowLatencyDispatchArgs& a, const MeshT& mesh, const Shape& shape) {
  BulkDispatch<MeshT, Shape> d{{a, mesh, shape, workers_of(a.call, mesh), Warp{}, {}, {}}, 0};
  d.keep_layouts();
  const BlockSpan traced(a.call.wait.trace, Work::kLowLatencyCall);
  const Joined joined = join(a.call, Block{}, d.warp, mesh);
  const bool sends = (a.call.phases & kPhaseSend) != 0;
  if (sends) clear_choices(d.of_block());
  if (d.block.rank() == 0) *d.found() = 0;
  RowPipe<kPipeStages> pipe(d.warp, d.pipe(), d.piece_bytes());
  d.block.sync();
  d.epoch = begin_call(a.call, d.block, d.warp, mesh, joined, d.template at<uint64_t>(0), d.present(),
                       Site::kLowLatencyDispatchSlot, [&] {
                         if (sends) count_before(d);
                       });
  if (sends) {
    count_on(d);
    tell_counts(d);
    send_batches_in_bulk(d, pipe);
  }
  if (a.call.phases & kPhaseReceive) {
    if (d.warp.index() == (d.block.warps() > 1 ? 1 : 0)) find_segments(d.of_block());
    receive_in_bulk(d, pipe);
  }
}

}  // namespace low_latency

template <class MeshT, class Shape>
WEFT_KERNEL void low_latency_dispatch_bulk(const LowLatencyDispatchArgs& a, const MeshT& mesh,
                                           const Shape& shape) {
  if constexpr (kHasRowQueue)
    low_latency::dispatch_in_bulk(a, mesh, shape);
  else
    low_latency_dispatch(a, mesh, shape);
}

}  // namespace weft
