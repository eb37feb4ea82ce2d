// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine_stream.cuh: a token's rows go through shared memory by bulk copies, and are summed there. So more
// bytes are under way in an SM than its registers hold, and a row may come from another rank's window.
#pragma once

#include "kernels/moe/high_throughput_combine_sum.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
namespace weft {
namespace combine {

#ifndef WEFT_QUEUE_PIECE
#define WEFT_QUEUE_PIECE 2048
#endif
inline constexpr uint32_t kQueuePieceBytes = WEFT_QUEUE_PIECE;
inline constexpr uint64_t kMostWindowBytes = uint64_t{1} << 38;

// A token that a warp sums. Each lane has the row of its peer.
struct StreamedToken {
  uint64_t token;
  uint32_t count;
  uint32_t place;       // of the lane's row among the token's; count or more: it has none
  const std::byte* at;  // the lane's row
  bool is_there;
};

// Of x in this rank's window, one more than its offset there; 0: x is elsewhere, and nobody can read it.
template <class MeshT>
WEFT_DEVICE uint64_t pulled_at(const CombineArgs& a, const MeshT& mesh) {
#ifdef WEFT_COMBINE_PULL
  const auto offset = static_cast<uint64_t>(a.x - mesh.local());
  return a.topk_weights == nullptr && a.x >= mesh.local() && offset < kMostWindowBytes ? offset + 1 : 0;
#else
  return 0;
#endif
}

template <class MeshT, class Shape>
WEFT_DEVICE StreamedToken streamed_token(const CombineArgs& a, const Rendezvous& x, Warp warp,
                                         const MeshT& mesh, const Shape& shape, const Staging& staging,
                                         uint64_t epoch, uint64_t token, bool pulls) {
  const uint32_t peer = warp.rank();
  const int32_t sent = peer < mesh.ranks() ? a.send_row[token * mesh.ranks() + peer] : -1;
  const bool goes = sent >= 0;
  const uint32_t before = warp.count_below(goes);
  StreamedToken found{token, warp.count(goes), ~uint32_t{0}, nullptr, true};
  if (!goes) return found;
  found.place = a.sum_place ? static_cast<uint32_t>(a.sum_place[token * mesh.ranks() + peer]) : before;
  if (pulls || peer == mesh.rank()) {
    const uint64_t row = row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).first + static_cast<uint32_t>(sent);
    const std::byte* rows = a.x;
    if (peer != mesh.rank())
      rows = mesh.to(peer).mapped() + (rendezvous_record(x, mesh, epoch, peer)->reserved[0] - 1);
    found.at = rows + row * shape.row_bytes;
  } else {
    found.at = staging.rows + (static_cast<uint32_t>(a.slot_base[token]) + found.place) * shape.row_bytes;
  }
  return found;
}

// What is asked for next: pieces of the current token's rows, then of the next one's.
struct Asking {
  uint32_t piece = 0;
  uint32_t row = 0;
  bool of_next = false;
};

template <class Queue, class Shape>
WEFT_DEVICE void ask_ahead(Queue& queue, Asking& asking, const StreamedToken& current, const StreamedToken& next,
                           const Shape& shape) {
  const uint32_t row_bytes = static_cast<uint32_t>(shape.row_bytes);
  const uint32_t pieces = (row_bytes + kQueuePieceBytes - 1) / kQueuePieceBytes;
  while (queue.has_room()) {
    const uint32_t count = asking.of_next ? next.count : current.count;
    if (asking.piece == pieces || count == 0) {
      if (asking.of_next || !next.is_there) return;
      asking = {0, 0, true};
      continue;
    }
    const uint32_t place = asking.of_next ? next.place : current.place;
    const std::byte* at = asking.of_next ? next.at : current.at;
    const uint32_t offset = asking.piece * kQueuePieceBytes;
    const uint32_t left = row_bytes - offset;
    queue.ask(place == asking.row, at + offset, left < kQueuePieceBytes ? left : kQueuePieceBytes);
    if (++asking.row != count) continue;
    asking.row = 0;
    ++asking.piece;
  }
}

template <class Element, class Queue, class Shape>
WEFT_DEVICE void sum_queued(const CombineArgs& a, Warp warp, const Shape& shape, Queue& queue, Asking& asking,
                            const StreamedToken& current, const StreamedToken& next) {
  constexpr uint32_t kVecs = kQueuePieceBytes / 16 / Warp::kMaxSize;
  const uint32_t row_vecs = static_cast<uint32_t>(shape.row_bytes) / 16;
  WEFT_ROLLED
  for (uint32_t first = 0; first < row_vecs; first += kQueuePieceBytes / 16) {
    float sums[kVecs][Element::kPerVec] = {};
    const uint32_t v = first + warp.rank();
    for (const std::byte* bias : a.bias) {
      if (!bias) continue;
      const auto* vecs = reinterpret_cast<const Vec16*>(bias + current.token * shape.row_bytes);
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j)
        if (v + j * 32 < row_vecs) Element::add(sums[j], load_vec(vecs + v + j * 32));
    }
    WEFT_ROLLED
    for (uint32_t row = 0; row < current.count; ++row) {
      const Vec16* piece = queue.front();
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j)
        if (v + j * 32 < row_vecs) Element::add(sums[j], piece[warp.rank() + j * 32]);
      queue.pop();
      ask_ahead(queue, asking, current, next, shape);
    }
    auto* out = reinterpret_cast<Vec16*>(a.combined + current.token * shape.row_bytes) + v;
    WEFT_UNROLL
    for (uint32_t j = 0; j < kVecs; ++j)
      if (v + j * 32 < row_vecs) store_vec_streaming(out + j * 32, Element::round(sums[j]));
  }
}

// Where the tokens of a warp come from: those of a launch that pulls take them as they get to them.
template <class MeshT, class Shape>
WEFT_DEVICE void stream_tokens(const CombineArgs& a, const Rendezvous& x, Block block, Warp warp,
                               const MeshT& mesh, const Shape& shape, uint64_t epoch, const Progress& progress,
                               bool pulls) {
  const WarpRange all{0, block.warps()};
  const Share share = share_of(block, warp, pulls ? all : a.sum_warps);
  if (!share.active) return;
  // Pushes have half of the shared memory then: pieces half as long.
  const uint32_t all_room = a.push_warps.count * pipe_bytes(static_cast<uint32_t>(shape.piece_bytes));
  const uint32_t pushes_room = pulls ? 0 : a.push_warps.count * pipe_bytes(push_piece_bytes(shape));
  const WarpRange summing = pulls ? all : a.sum_warps;
  const uint32_t mine = (all_room - pushes_room) / summing.count / 128 * 128;
  const uint32_t slots = (mine - kPipeBarrierBytes) / kQueuePieceBytes;
  RowQueue<kQueuePieceBytes> queue(warp,
                                   block.shared() + pipes_at(mesh.ranks()) + pushes_room +
                                       (warp.index() - summing.first) * mine,
                                   slots < 16 ? slots : 16);
  const Staging staging = staging_of(x, mesh, epoch, mesh.rank());
  Tasks tasks(warp, share, a.state);
  uint64_t taken = share.index;
  const auto take = [&] {
    uint64_t token = taken;
    if (pulls)
      token = tasks.take();
    else
      taken += share.total;
    if (token >= a.tokens || (!pulls && !wait_for_token(a, warp, mesh, epoch, progress, token)))
      return StreamedToken{};
    bulk::fence_async();
    return streamed_token(a, x, warp, mesh, shape, staging, epoch, token, pulls);
  };
  Asking asking;
  StreamedToken current = take(), next{};
  while (current.is_there) {
    ask_ahead(queue, asking, current, StreamedToken{}, shape);
    next = take();
    ask_ahead(queue, asking, current, next, shape);
    const Span traced(a.wait.trace, Work::kSum, warp.rank() == 0);
    if (shape.element == kElementFp32)
      sum_queued<Fp32>(a, warp, shape, queue, asking, current, next);
    else
      sum_queued<Bf16>(a, warp, shape, queue, asking, current, next);
    if (a.topk_weights) {
      const TokenRows rows = rows_of_token(a, warp, mesh, shape, staging, current.token, share.total);
      sum_weights(a, warp, shape, staging, rows, current.token);
    }
    current = next;
    asking = asking.of_next ? Asking{asking.piece, asking.row, false} : Asking{};
  }
}

// The last block, when rows were pulled: nobody reads this rank's x any more when it returns.
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
