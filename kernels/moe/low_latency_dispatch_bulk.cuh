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
#pragma once

#include "kernels/moe/low_latency_dispatch.cuh"
#include "kernels/moe/low_latency_dispatch_bulk_receive.cuh"

namespace weft {
namespace low_latency {

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
      store_watched(reinterpret_cast<uint32_t*>(d.place()[t] + scales) + i, word);
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
