// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_dispatch.cuh: every row goes once to each rank that needs it, straight to its final place.
// Steps: 1 all ranks say where their rows go   2 row warps push rows, meta warps push ids, weights, scales
// and origins 3 the last block to finish signals every peer and waits for all of theirs. Waits: step 1 for
// every peer's address, step 3 for every peer's rows. No staging, no copy at the receiver. Cost: per (token,
// rank): row_bytes + 4 * scale_words + K * (id_bytes + 4) + 8 bytes; 2 signals per peer.
#pragma once

#include "kernels/moe/high_throughput_layout.cuh"
#include "kernels/moe/rendezvous.cuh"

namespace weft {
namespace dispatch {

// Where this rank's rows stand in the peer's window, by the peer's record.
template <class MeshT, class Shape>
WEFT_DEVICE void place_rows(PeerPlace& place, const RendezvousRecord& theirs, const DispatchArgs& a,
                            const MeshT& mesh, const Shape& shape, uint32_t peer) {
  const ReceiveLayout layout =
      receive_layout(theirs.capacity_rows, shape.row_bytes, shape.scale_words, shape.top_k, a.id_bytes);
  std::byte* window = near_window(mesh, peer);
  place.rows = window + theirs.rows_at;
  place.scales = place.rows + layout.scales;
  place.ids = window + theirs.meta_at;
  place.weights = place.ids + layout.weights;
  place.token = place.ids + layout.token;
  place.slot = place.ids + layout.slot;
  place.first_row = row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).first;
  place.capacity_rows = theirs.capacity_rows;
}

// Thread `peer` works out where this rank's rows start at that peer.
template <class MeshT, class Shape>
WEFT_DEVICE void place_peers(const DispatchArgs& a, const Rendezvous& x, Block block, const MeshT& mesh,
                             const Shape& shape, uint64_t epoch, PeerPlace* places) {
  for (uint32_t peer = block.rank(); peer < mesh.ranks(); peer += block.size()) {
    const RendezvousRecord theirs = *rendezvous_record(x, mesh, epoch, peer);
    place_rows(places[peer], theirs, a, mesh, shape, peer);
  }
  block.sync();
}

// The row at `peer` for this token, or -1 where it does not go or there is no room.
WEFT_DEVICE int64_t row_at(const DispatchArgs& a, const PeerPlace* places, uint32_t ranks, uint64_t token,
                           uint32_t peer) {
  const int32_t at = a.send_row[token * ranks + peer];
  if (at < 0) return -1;
  const uint64_t row = places[peer].first_row + static_cast<uint32_t>(at);
  return row < places[peer].capacity_rows ? static_cast<int64_t>(row) : -1;
}

template <class Shape>
WEFT_DEVICE void send_rows(const DispatchArgs& a, Block block, Warp warp, uint32_t ranks, const Shape& shape,
                           const PeerPlace* places) {
  const Share share = share_of(block, warp, a.row_warps);
  if (!share.active) return;
  const Span traced(a.wait.trace, Work::kPushRows, warp.rank() == 0);
  const Pieces pieces{static_cast<uint64_t>(shape.row_bytes), static_cast<uint64_t>(shape.piece_bytes)};
  std::byte* stages =
      block.shared() + pipes_at(ranks) + (warp.index() - a.row_warps.first) * pipe_bytes(shape.piece_bytes);
  RowPipe<kPipeStages> pipe(warp, stages, shape.piece_bytes);
  Tasks tokens(warp, share, a.state);
  uint64_t item = 0;
  uint64_t end = 0;  // of the token's items
  pipe.run(
      [&]() -> RowItem<uint64_t> {
        if (item == end) {
          item = tokens.take() * pieces.per_row();
          end = item + pieces.per_row();
        }
        if (item >= a.tokens * pieces.per_row()) return {};
        const std::byte* src = a.x + pieces.row(item) * pieces.row_bytes + pieces.offset(item);
        const uint64_t tag = item++;
        return {{src, pieces.bytes(tag)}, tag};
      },
      [&](uint64_t item, RowPiece stage) {
        for (uint32_t first = 0; first < ranks; first += warp.size()) {
          const uint32_t peer = first + warp.rank();
          const int64_t row = peer < ranks ? row_at(a, places, ranks, pieces.row(item), peer) : -1;
          pipe.store(row < 0 ? nullptr : places[peer].rows + row * pieces.row_bytes + pieces.offset(item),
                     stage);
        }
      });
  pipe.drain();
}

// One slot of a row: the local expert, or -1 where it is elsewhere, and its weight.
template <class Shape>
WEFT_DEVICE void send_route(const DispatchArgs& a, const Shape& shape, const PeerPlace& place, uint32_t peer,
                            uint64_t token, int64_t row, uint32_t k) {
  const int64_t expert =
      expert_at(a.topk_idx, a.id_bytes, token * shape.top_k + k) - int64_t{peer} * a.experts_per_rank;
  const float weight = a.topk_weights[token * shape.top_k + k];
  const bool is_local = expert >= 0 && expert < a.experts_per_rank;
  const uint64_t at = row * shape.top_k + k;
  if (a.id_bytes == 8) reinterpret_cast<int64_t*>(place.ids)[at] = is_local ? expert : -1;
  if (a.id_bytes == 4)
    reinterpret_cast<int32_t*>(place.ids)[at] = is_local ? static_cast<int32_t>(expert) : -1;
  reinterpret_cast<float*>(place.weights)[at] = is_local || a.keep_weights ? weight : 0.0f;
}

// Sends ids, weights, scales and origins of a token's rows to `count` peers, one lane each: `peer` is the
// lane's peer, `row` its row there or -1. Lanes share all slots of all peers, then all scales: memory is far,
// and loads wait for each other as little as can be.
template <class Shape>
WEFT_DEVICE void send_meta_of(const DispatchArgs& a, Warp warp, const Shape& shape, const PeerPlace* places,
                              uint64_t token, uint32_t first_peer, uint32_t count, int64_t row) {
  const auto top_k = static_cast<uint32_t>(shape.top_k);
  for (uint32_t first = 0; a.topk_idx && first < count * top_k; first += warp.size()) {
    const uint32_t slot = first + warp.rank();
    const uint32_t lane = slot < count * top_k ? slot / top_k : 0;
    const int64_t to = warp.broadcast(row, lane);
    if (to < 0 || slot >= count * top_k) continue;
    send_route(a, shape, places[first_peer + lane], first_peer + lane, token, to, slot % top_k);
  }
  for (uint32_t first = 0; first < shape.scale_words; first += warp.size()) {
    const uint32_t word = first + warp.rank();
    const bool is_word = word < shape.scale_words;
    const uint32_t scale =
        is_word ? a.scales[static_cast<int64_t>(token) * a.scale_token_stride + word * a.scale_word_stride]
                : 0;
    for (uint32_t lane = 0; lane < count; ++lane) {
      const int64_t to = warp.broadcast(row, lane);
      if (to < 0 || !is_word) continue;
      reinterpret_cast<uint32_t*>(places[first_peer + lane].scales)[to * shape.scale_words + word] = scale;
    }
  }
}

template <class Shape>
WEFT_DEVICE void send_meta(const DispatchArgs& a, Block block, Warp warp, uint32_t ranks, const Shape& shape,
                           const PeerPlace* places) {
  const Share share = share_of(block, warp, a.meta_warps);
  if (!share.active) return;
  const Span traced(a.wait.trace, Work::kPushMeta, warp.rank() == 0);
  for (uint64_t token = share.index; token < a.tokens; token += share.total) {
    uint32_t copies = 0;  // to peers before
    for (uint32_t first = 0; first < ranks; first += warp.size()) {
      const uint32_t peer = first + warp.rank();
      const bool goes = peer < ranks && a.send_row[token * ranks + peer] >= 0;
      const int64_t row = goes ? row_at(a, places, ranks, token, peer) : -1;
      const uint32_t before = copies + warp.scan_exclusive(goes ? 1u : 0u);
      copies += warp.sum(goes ? 1u : 0u);
      if (row >= 0) {
        const int32_t place = a.sum_place ? a.sum_place[token * ranks + peer] : static_cast<int32_t>(before);
        reinterpret_cast<int32_t*>(places[peer].token)[row] = static_cast<int32_t>(token);
        reinterpret_cast<int32_t*>(places[peer].slot)[row] = a.slot_base[token] + place;
      }
      const uint32_t left = ranks - first;
      send_meta_of(a, warp, shape, places, token, first, left < warp.size() ? left : warp.size(), row);
    }
  }
}

// Sets the experts of rows that no rank fills to none.
template <class Shape>
WEFT_DEVICE void fill_tail(const DispatchArgs& a, Block block, uint32_t ranks, uint32_t self,
                           const Shape& shape, const PeerPlace& mine) {
  const uint64_t received = static_cast<uint32_t>(a.prefix[(ranks - 1) * ranks + self]);
  if (received > mine.capacity_rows && block.index() == 0 && block.rank() == 0)
    raise(a.wait.fault, Site::kDispatchCapacity, self, self, mine.capacity_rows, received, 0);
  const uint64_t threads = uint64_t{block.count()} * block.size();
  for (uint64_t at = received * shape.top_k + uint64_t{block.index()} * block.size() + block.rank();
       at < mine.capacity_rows * shape.top_k; at += threads) {
    if (a.id_bytes == 8) reinterpret_cast<int64_t*>(mine.ids)[at] = -1;
    if (a.id_bytes == 4) reinterpret_cast<int32_t*>(mine.ids)[at] = -1;
  }
}

// The last block: everything of this rank is written.
template <class MeshT>
WEFT_DEVICE void signal_and_wait(const DispatchArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch) {
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size())
    mesh.to(peer).put_value(a.at.arrived_signal + mesh.rank() * 8, epoch);
  const auto* signals = reinterpret_cast<const uint64_t*>(mesh.local() + a.at.arrived_signal);
  wait_all_peers(warp, mesh.ranks(), epoch, Site::kDispatchRecv, a.wait,
                 [&](uint32_t peer) { return signals + peer; });
  if (warp.rank() == 0) advance(a.state);
}

// Whether rows may go; where it returns false the kernel returns. epoch: of this dispatch. flags: u32[2], shared.
template <class MeshT>
WEFT_DEVICE bool begin(const DispatchArgs& a, const Rendezvous& rendezvous, Block block, Warp warp,
                       const MeshT& mesh, uint64_t epoch, uint32_t* flags) {
  if (a.report && a.report->disagreeing_word != kAgreedWords) {
    if (block.index() == 0 && block.rank() == 0)
      raise(a.wait.fault, Site::kCountsDisagree, mesh.rank(), a.report->disagreeing_rank, a.report->mine,
            a.report->theirs, a.report->disagreeing_word);
    return false;
  }
  return begin_rendezvous(a, rendezvous, block, warp, mesh, epoch, flags);
}

}  // namespace dispatch

template <class MeshT, class Shape>
WEFT_KERNEL void dispatch_rows(const DispatchArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  const BlockSpan traced(a.wait.trace, Work::kDispatch);
  auto* flags = reinterpret_cast<uint32_t*>(block.shared());
  auto* places = reinterpret_cast<PeerPlace*>(block.shared() + 128);
  const uint64_t epoch = a.state->epoch + 1;
  const Rendezvous rendezvous = rendezvous_of(a);
  if (!dispatch::begin(a, rendezvous, block, warp, mesh, epoch, flags)) return;
  dispatch::place_peers(a, rendezvous, block, mesh, shape, epoch, places);
  dispatch::send_rows(a, block, warp, mesh.ranks(), shape, places);
  dispatch::send_meta(a, block, warp, mesh.ranks(), shape, places);
  if (a.fill_tail) dispatch::fill_tail(a, block, mesh.ranks(), mesh.rank(), shape, places[mesh.rank()]);
  if (!last_block(block, &a.state->arrived, &flags[1])) return;
  if (warp.index() == 0) dispatch::signal_and_wait(a, warp, mesh, epoch);
}

}  // namespace weft
