// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine_pull.cuh: an experiment. Rows are not pushed: owners copy them from the windows of those who have
// them into shared memory, and sum them there.
#pragma once

#include "kernels/moe/high_throughput_combine_stream.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && defined(WEFT_COMBINE_PULL)
namespace weft {
namespace combine {

// A token that a warp sums. Each lane has the row of its peer.
struct PulledToken {
  uint64_t token;
  uint32_t count;
  uint32_t place;       // of the lane's row among the token's; count or more: it has none
  const std::byte* at;  // the lane's row
  bool is_there;
};

// Of x in this rank's window, one more than its offset there; 0: x is elsewhere, and nobody can read it.
template <class MeshT>
WEFT_DEVICE uint64_t pulled_at(const CombineArgs& a, const MeshT& mesh) {
  const auto offset = static_cast<uint64_t>(a.x - mesh.local());
  return a.topk_weights == nullptr && a.x >= mesh.local() && offset < (uint64_t{1} << 38) ? offset + 1 : 0;
}

template <class MeshT, class Shape>
WEFT_DEVICE PulledToken pulled_token(const CombineArgs& a, const Rendezvous& x, Warp warp, const MeshT& mesh,
                                     const Shape& shape, uint64_t epoch, uint64_t token) {
  const uint32_t peer = warp.rank();
  const int32_t sent = peer < mesh.ranks() ? a.send_row[token * mesh.ranks() + peer] : -1;
  const bool goes = sent >= 0;
  const uint32_t before = warp.count_below(goes);
  PulledToken found{token, warp.count(goes), ~uint32_t{0}, nullptr, true};
  if (!goes) return found;
  found.place = a.sum_place ? static_cast<uint32_t>(a.sum_place[token * mesh.ranks() + peer]) : before;
  const uint64_t row = row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).first + static_cast<uint32_t>(sent);
  const std::byte* rows = a.x;
  if (peer != mesh.rank())
    rows = mesh.to(peer).mapped() + (rendezvous_record(x, mesh, epoch, peer)->reserved[0] - 1);
  found.at = rows + row * shape.row_bytes;
  return found;
}

template <class Queue, class Shape>
WEFT_DEVICE void pull_ahead(Queue& queue, Asking& asking, const PulledToken& current, const PulledToken& next,
                            const Shape& shape) {
  const uint32_t row_bytes = static_cast<uint32_t>(shape.row_bytes);
  while (queue.has_room()) {
    const uint32_t count = asking.of_next ? next.count : current.count;
    if (asking.offset >= row_bytes || count == 0) {
      if (asking.of_next || !next.is_there) return;
      asking = {0, 0, true};
      continue;
    }
    const uint32_t place = asking.of_next ? next.place : current.place;
    const std::byte* at = asking.of_next ? next.at : current.at;
    const uint32_t left = row_bytes - asking.offset;
    queue.ask_by(place == asking.row, at + asking.offset, left < kQueuePieceBytes ? left : kQueuePieceBytes);
    if (++asking.row != count) continue;
    asking.row = 0;
    asking.offset += kQueuePieceBytes;
  }
}

template <class Element, class Queue, class Shape>
WEFT_DEVICE void sum_pulled(const CombineArgs& a, Warp warp, const Shape& shape, Queue& queue, Asking& asking,
                            const PulledToken& current, const PulledToken& next) {
  constexpr uint32_t kPieceVecs = kQueuePieceBytes / 16, kVecs = kPieceVecs / Warp::kMaxSize;
  const uint32_t row_vecs = static_cast<uint32_t>(shape.row_bytes) / 16;
  const uint64_t token_at = current.token * shape.row_bytes;
  WEFT_ROLLED
  for (uint32_t first = 0; first < row_vecs; first += kPieceVecs) {
    float sums[kVecs][Element::kPerVec] = {};
    auto in_piece = [&](uint32_t j) { return warp.rank() + j * Warp::kMaxSize; };
    for (const std::byte* bias : a.bias) {
      if (!bias) continue;
      const auto* vecs = reinterpret_cast<const Vec16*>(bias + token_at) + first;
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j)
        if (first + in_piece(j) < row_vecs) Element::add(sums[j], load_vec(vecs + in_piece(j)));
    }
    WEFT_ROLLED
    for (uint32_t row = 0; row < current.count; ++row) {
      const Vec16* piece = queue.front();
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j)
        if (first + in_piece(j) < row_vecs) Element::add(sums[j], piece[in_piece(j)]);
      queue.pop();
      pull_ahead(queue, asking, current, next, shape);
    }
    auto* out = reinterpret_cast<Vec16*>(a.combined + token_at) + first;
    WEFT_UNROLL
    for (uint32_t j = 0; j < kVecs; ++j)
      if (first + in_piece(j) < row_vecs) store_vec_streaming(out + in_piece(j), Element::round(sums[j]));
  }
}

template <class MeshT, class Shape>
WEFT_DEVICE void pull_tokens(const CombineArgs& a, const Rendezvous& x, Block block, Warp warp,
                             const MeshT& mesh, const Shape& shape, uint64_t epoch) {
  const WarpRange all{0, block.warps()};
  const Share share = share_of(block, warp, all);
  const uint32_t room = a.push_warps.count * pipe_bytes(static_cast<uint32_t>(shape.piece_bytes)) +
                        a.sum_warps.count * queue_bytes(a.sum_slots);
  const uint32_t mine = room / all.count / 128 * 128;
  const uint32_t slots = (mine - kPipeBarrierBytes) / kQueuePieceBytes;
  RowQueue queue(warp, block.shared() + pipes_at(mesh.ranks()) + warp.index() * mine,
                 slots < kMostQueueSlots ? slots : kMostQueueSlots);
  queue.sees_arrived();
  Tasks tasks(warp, share, a.state);
  const auto take = [&] {
    const uint64_t token = tasks.take();
    return token >= a.tokens ? PulledToken{} : pulled_token(a, x, warp, mesh, shape, epoch, token);
  };
  Asking asking;
  PulledToken next{};
  for (PulledToken current = take(); current.is_there; current = next) {
    pull_ahead(queue, asking, current, PulledToken{}, shape);
    next = take();
    pull_ahead(queue, asking, current, next, shape);
    if (shape.element == kElementFp32)
      sum_pulled<Fp32>(a, warp, shape, queue, asking, current, next);
    else
      sum_pulled<Bf16>(a, warp, shape, queue, asking, current, next);
    asking = asking.of_next ? Asking{asking.offset, asking.row, false} : Asking{};
  }
}

// The last block: nobody reads this rank's x any more when it returns.
template <class MeshT>
WEFT_DEVICE void part_from_peers(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch) {
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size())
    mesh.to(peer).put_value(a.at.chunk_signal + uint64_t{mesh.rank()} * kMaxChunks * 8, epoch);
  wait_all_peers(warp, mesh.ranks(), epoch, Site::kCombineRecv, a.wait,
                 [&](uint32_t peer) { return chunk_signal(a, mesh, peer, 0); });
}

}  // namespace combine
}  // namespace weft
#endif
