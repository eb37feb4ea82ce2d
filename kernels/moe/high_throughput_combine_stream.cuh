// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine_stream.cuh: the sums of high_throughput_combine_sum.cuh for targets with bulk copies. Pieces of
// a token's rows go through a queue in shared memory and are added there.
// So more bytes are under way in an SM than its registers hold: while one token is summed, the next one's rows come.
#pragma once

#include "kernels/moe/high_throughput_combine_sum.cuh"

namespace weft {
namespace combine {

// A token whose rows have come, or none.
struct ArrivedToken {
  uint64_t token;
  TokenRows rows;
  bool is_there;
};

// The next piece to load: each piece of all rows of the current token before the next piece, then those of the next
// token.
struct Asking {
  uint32_t offset = 0;
  uint32_t row = 0;
  bool of_next = false;
};

// Fills the queue.
template <class Queue, class Shape>
WEFT_DEVICE void ask_ahead(Queue& queue, Asking& asking, const ArrivedToken& current,
                           const ArrivedToken& next, const Shape& shape) {
  const uint32_t row_bytes = static_cast<uint32_t>(shape.row_bytes);
  while (queue.has_room()) {
    const TokenRows& rows = asking.of_next ? next.rows : current.rows;
    if (asking.offset >= row_bytes || rows.count == 0) {
      if (asking.of_next || !next.is_there) return;
      asking = {0, 0, true};
      continue;
    }
    const uint32_t left = row_bytes - asking.offset;
    queue.ask(rows.row(asking.row, row_bytes) + asking.offset,
              left < kQueuePieceBytes ? left : kQueuePieceBytes);
    if (++asking.row != rows.count) continue;
    asking.row = 0;
    asking.offset += kQueuePieceBytes;
  }
}

// The sums of the current token, piece by piece.
template <class Element, class Queue, class Shape>
WEFT_DEVICE void sum_queued(const CombineArgs& a, Warp warp, const Shape& shape, Queue& queue, Asking& asking,
                            const ArrivedToken& current, const ArrivedToken& next) {
  constexpr uint32_t kPieceVecs = kQueuePieceBytes / 16, kVecs = kPieceVecs / Warp::kMaxSize;
  const uint32_t row_vecs = static_cast<uint32_t>(shape.row_bytes) / 16;
  const uint64_t token_at = current.token * shape.row_bytes;
  WEFT_ROLLED
  for (uint32_t first = 0; first < row_vecs; first += kPieceVecs) {
    float sums[kVecs][Element::kPerVec] = {};
    auto in_piece = [&](uint32_t j) { return warp.rank() + j * Warp::kMaxSize; };
    auto add = [&](const Vec16* piece, auto load) {
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j)
        if (first + in_piece(j) < row_vecs) Element::add(sums[j], load(piece + in_piece(j)));
    };
    for (const std::byte* bias : a.bias)
      if (bias)
        add(reinterpret_cast<const Vec16*>(bias + token_at) + first,
            [](const Vec16* at) { return load_vec(at); });
    WEFT_ROLLED
    for (uint32_t row = 0; row < current.rows.count; ++row) {
      add(queue.front(), [](const Vec16* at) { return *at; });
      queue.pop();
      ask_ahead(queue, asking, current, next, shape);
    }
    auto* out = reinterpret_cast<Vec16*>(a.combined + token_at) + first;
    WEFT_UNROLL
    for (uint32_t j = 0; j < kVecs; ++j)
      if (first + in_piece(j) < row_vecs) store_vec_streaming(out + in_piece(j), Element::round(sums[j]));
  }
}

// Sums each token that take() brings, until it brings none, and calls done(token) after each. A token's rows are asked for
// while the one before is summed.
template <class Queue, class Shape, class Take, class Done>
WEFT_DEVICE void sum_streamed(const CombineArgs& a, Warp warp, const Shape& shape, Queue& queue, Take take,
                              Done done) {
  Asking asking;
  ArrivedToken next{};
  for (ArrivedToken current = take(); current.is_there; current = next) {
    ask_ahead(queue, asking, current, ArrivedToken{}, shape);
    next = take();
    ask_ahead(queue, asking, current, next, shape);
    const Span traced(a.wait.trace, Work::kSum, warp.rank() == 0);
    if (shape.element == kElementFp32)
      sum_queued<Fp32>(a, warp, shape, queue, asking, current, next);
    else
      sum_queued<Bf16>(a, warp, shape, queue, asking, current, next);
    done(current);
    asking = asking.of_next ? Asking{asking.offset, asking.row, false} : Asking{};
  }
}

// Step 4 of combine_rows. Queue: RowQueue, which not every target has.
template <class Queue, class MeshT, class Shape>
WEFT_DEVICE void stream_tokens(const CombineArgs& a, const Rendezvous& x, Block block, Warp warp,
                               const MeshT& mesh, const Shape& shape, uint64_t epoch,
                               const Progress& progress) {
  const Share share = share_of(block, warp, a.sum_warps);
  if (!share.active) return;
  const uint32_t queues_at =
      rows_shared_bytes(mesh.ranks(), a.push_warps.count, static_cast<uint32_t>(shape.piece_bytes));
  const uint32_t in_block = warp.index() - a.sum_warps.first;
  Queue queue(warp, block.shared() + queues_at + in_block * queue_bytes(a.sum_slots), a.sum_slots);
  const Staging staging = staging_of(x, mesh, epoch, mesh.rank());
  uint64_t token = share.index;
  auto take = [&]() -> ArrivedToken {
    const uint64_t taken = token;
    token += share.total;
    if (taken >= a.tokens || !wait_for_token(a, warp, mesh, epoch, progress, taken)) return {};
    queue.fence_acquired();
    return {taken, rows_of_token(a, warp, mesh, shape, staging, taken, share.total), true};
  };
  sum_streamed(a, warp, shape, queue, take, [&](const ArrivedToken& summed) {
    if (a.topk_weights) sum_weights(a, warp, shape, staging, summed.rows, summed.token);
  });
}

// Step 4: as the plan says.
template <class MeshT, class Shape>
WEFT_DEVICE void add_rows(const CombineArgs& a, const Rendezvous& x, Block block, Warp warp,
                          const MeshT& mesh, const Shape& shape, uint64_t epoch, const Progress& progress) {
  if constexpr (kHasBulkCopies)
    if (a.sum_slots != 0) return stream_tokens<RowQueue>(a, x, block, warp, mesh, shape, epoch, progress);
  sum_tokens(a, x, block, warp, mesh, shape, epoch, progress);
}

}  // namespace combine
}  // namespace weft
