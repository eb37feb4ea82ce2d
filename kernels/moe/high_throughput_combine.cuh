// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine.cuh: rows return to their tokens and are summed there.
// Steps: 1 all ranks say where their staging is   2 push warps send rows to their owners, chunk by chunk, a signal each
// 3 sum warps add a token's rows as soon as the chunks that hold them came.
// Waits: step 1 for every peer's address, step 3 for the chunks of the ranks that hold the token.
// Sums: float32, from the bias on, ranks ascending, one rounding. Rows of this rank itself are read where they are.
// Cost: per (token, other rank): row_bytes + 4 * K bytes over the link, written and read once more at the owner.
#pragma once

#include "kernels/core/numbers.cuh"
#include "kernels/moe/ready.cuh"

namespace weft {
namespace combine {

inline constexpr uint32_t kRowsInFlight = 4;

struct Staging {
  std::byte* rows;
  float* weights;
};

template <class MeshT>
WEFT_DEVICE Staging staging_of(const ReadyExchange& x, const MeshT& mesh, uint64_t epoch, uint32_t owner) {
  const ReadyRecord* theirs = ready_record(x, mesh, epoch, owner);
  std::byte* window = mesh.to(owner).mapped();
  return {window + theirs->rows_at, reinterpret_cast<float*>(window + theirs->meta_at)};
}

// One chunk of the rows that belong to `owner`, then its signal.
template <class MeshT, class Shape, class Pipe>
WEFT_DEVICE void push_chunk(const CombineArgs& a, const ReadyExchange& x, Warp warp, const MeshT& mesh, const Shape& shape,
                            Pipe& pipe, uint64_t epoch, uint32_t owner, uint32_t chunk) {
  const RowSpan span = row_span(a.prefix, mesh.ranks(), owner, mesh.rank());
  const uint32_t size = chunk_rows(span.count);
  if (chunk * size >= span.count) return;
  const uint64_t first = span.first + chunk * size;
  const uint64_t rows = span.count - chunk * size < size ? span.count - chunk * size : size;
  const Pieces pieces{static_cast<uint64_t>(shape.row_bytes), static_cast<uint64_t>(shape.piece_bytes)};
  const Staging staging = staging_of(x, mesh, epoch, owner);
  pipe.run(
      rows * pieces.per_row(),
      [&](uint64_t item) {
        return RowPiece{a.x + (first + pieces.row(item)) * pieces.row_bytes + pieces.offset(item), pieces.bytes(item)};
      },
      [&](uint64_t item, RowPiece stage) {
        const uint64_t slot = static_cast<uint32_t>(a.slot[first + pieces.row(item)]);
        pipe.store(warp.rank() == 0 ? staging.rows + slot * pieces.row_bytes + pieces.offset(item) : nullptr, stage);
      });
  for (uint64_t i = warp.rank(); a.topk_weights && i < rows * shape.top_k; i += warp.size()) {
    const uint64_t row = first + i / shape.top_k;
    staging.weights[uint64_t{static_cast<uint32_t>(a.slot[row])} * shape.top_k + i % shape.top_k] =
        a.topk_weights[row * shape.top_k + i % shape.top_k];
  }
  pipe.drain();
  if (warp.rank() == 0) mesh.to(owner).signal(a.at.chunk_signal + (uint64_t{mesh.rank()} * kMaxChunks + chunk) * 8, epoch);
}

// Chunk 0 of every owner first, then chunk 1, ...: owners start with this rank's successor, so links share the load.
template <class MeshT, class Shape>
WEFT_DEVICE void push_rows(const CombineArgs& a, const ReadyExchange& x, Block block, Warp warp, const MeshT& mesh,
                           const Shape& shape, uint64_t epoch) {
  const Share share = share_of(block, warp, a.push_warps);
  if (!share.active) return;
  std::byte* stages =
      block.shared() + pipes_at(mesh.ranks()) + (warp.index() - a.push_warps.first) * pipe_bytes(shape.piece_bytes);
  RowPipe<kPipeStages> pipe(warp, stages, shape.piece_bytes);
  uint32_t most_rows = 0;
  for (uint32_t owner = 0; owner < mesh.ranks(); ++owner) {
    const uint32_t rows = row_span(a.prefix, mesh.ranks(), owner, mesh.rank()).count;
    most_rows = rows > most_rows ? rows : most_rows;
  }
  const uint64_t peers = mesh.ranks() - 1;
  const uint64_t chunks = most_rows < kMaxChunks * kMinChunkRows ? (most_rows + kMinChunkRows - 1) / kMinChunkRows : kMaxChunks;
  for (uint64_t task = share.index; task < chunks * peers; task += share.total) {
    const uint32_t owner = static_cast<uint32_t>((mesh.rank() + 1 + task % peers) % mesh.ranks());
    push_chunk(a, x, warp, mesh, shape, pipe, epoch, owner, static_cast<uint32_t>(task / peers));
  }
}

// The rows of one token: `count` of them, consecutive in staging, but number `mine` (if any) is in this rank's x.
struct TokenRows {
  const std::byte* staging;
  const std::byte* own_row;
  uint64_t staging_row;
  uint64_t x_row;
  uint32_t count;
  uint32_t mine;

  WEFT_DEVICE const std::byte* row(uint32_t i, uint64_t row_bytes) const {
    return i == mine ? own_row : staging + i * row_bytes;
  }
};

template <class MeshT>
WEFT_DEVICE bool wait_for_token(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch, uint64_t token) {
  const uint32_t ranks = mesh.ranks();
  const auto* signals = reinterpret_cast<const uint64_t*>(mesh.local() + a.at.chunk_signal);
  const int32_t* send_row = a.send_row + token * ranks;
  return wait_peers<Polling::kPatient>(
      warp, ranks, epoch, a.wait,
      [&](uint32_t peer) {
        const uint32_t size = chunk_rows(row_span(a.prefix, ranks, mesh.rank(), peer).count);
        return signals + uint64_t{peer} * kMaxChunks + static_cast<uint32_t>(send_row[peer]) / size;
      },
      [&](uint32_t peer) { return peer != mesh.rank() && send_row[peer] >= 0; },
      [&](uint32_t peer, uint64_t seen, uint64_t waited_ns) {
        raise(a.wait.fault, Site::kCombineRecv, a.wait.self, peer, epoch, seen, waited_ns);
      });
}

template <class MeshT, class Shape>
WEFT_DEVICE TokenRows rows_of_token(const CombineArgs& a, Warp warp, const MeshT& mesh, const Shape& shape,
                                    const Staging& staging, uint64_t token) {
  const int32_t* send_row = a.send_row + token * mesh.ranks();
  uint32_t count = 0;
  uint32_t before_mine = 0;
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    const uint32_t goes = send_row[peer] >= 0;
    count += goes;
    before_mine += peer < mesh.rank() ? goes : 0;
  }
  TokenRows rows{};
  rows.count = warp.sum(count);
  rows.mine = warp.sum(before_mine);
  rows.staging_row = static_cast<uint32_t>(a.slot_base[token]);
  rows.staging = staging.rows + rows.staging_row * shape.row_bytes;
  if (send_row[mesh.rank()] < 0) {
    rows.mine = rows.count;
    return rows;
  }
  rows.x_row = row_span(a.prefix, mesh.ranks(), mesh.rank(), mesh.rank()).first + static_cast<uint32_t>(send_row[mesh.rank()]);
  rows.own_row = a.x + rows.x_row * shape.row_bytes;
  return rows;
}

template <class Element, class Shape>
WEFT_DEVICE void sum_rows(const CombineArgs& a, Warp warp, const Shape& shape, const TokenRows& rows, uint64_t token) {
  const uint64_t vectors = shape.row_bytes / 16;
  auto* out = reinterpret_cast<Vec16*>(a.combined + token * shape.row_bytes);
  for (uint64_t v = warp.rank(); v < vectors; v += warp.size()) {
    float sums[Element::kPerVec] = {};
    for (const std::byte* bias : a.bias)
      if (bias) Element::add(sums, load_vec(reinterpret_cast<const Vec16*>(bias + token * shape.row_bytes) + v));
    for (uint32_t first = 0; first < rows.count; first += kRowsInFlight) {
      Vec16 held[kRowsInFlight];
      WEFT_UNROLL
      for (uint32_t i = 0; i < kRowsInFlight; ++i)
        if (first + i < rows.count) held[i] = load_vec_streaming(reinterpret_cast<const Vec16*>(rows.row(first + i, shape.row_bytes)) + v);
      WEFT_UNROLL
      for (uint32_t i = 0; i < kRowsInFlight; ++i)
        if (first + i < rows.count) Element::add(sums, held[i]);
    }
    store_vec_streaming(out + v, Element::round(sums));
  }
}

template <class Shape>
WEFT_DEVICE void sum_weights(const CombineArgs& a, Warp warp, const Shape& shape, const Staging& staging,
                             const TokenRows& rows, uint64_t token) {
  for (uint32_t k = warp.rank(); k < shape.top_k; k += warp.size()) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < rows.count; ++i)
      sum += i == rows.mine ? a.topk_weights[rows.x_row * shape.top_k + k]
                            : staging.weights[(rows.staging_row + i) * shape.top_k + k];
    a.combined_weights[token * shape.top_k + k] = sum;
  }
}

template <class MeshT, class Shape>
WEFT_DEVICE void sum_tokens(const CombineArgs& a, const ReadyExchange& x, Block block, Warp warp, const MeshT& mesh,
                            const Shape& shape, uint64_t epoch) {
  const Share share = share_of(block, warp, a.sum_warps);
  if (!share.active) return;
  const Staging staging = staging_of(x, mesh, epoch, mesh.rank());
  for (uint64_t token = share.index; token < a.tokens; token += share.total) {
    if (!wait_for_token(a, warp, mesh, epoch, token)) return;
    const TokenRows rows = rows_of_token(a, warp, mesh, shape, staging, token);
    if (shape.element == kElementFp32) sum_rows<Fp32>(a, warp, shape, rows, token);
    else sum_rows<Bf16>(a, warp, shape, rows, token);
    if (a.topk_weights) sum_weights(a, warp, shape, staging, rows, token);
  }
}

}  // namespace combine

template <class MeshT, class Shape>
WEFT_KERNEL void combine_rows(const CombineArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  auto* flags = reinterpret_cast<uint32_t*>(block.shared());
  const uint64_t epoch = a.state->epoch + 1;
  const ReadyExchange ready{a.at.combine_signal, a.at.combine_record, Site::kCombineReady, Site::kCombineHandle};
  if (!exchange_ready(ready, block, warp, mesh, a.mine, epoch, a.wait, &flags[0]))
    return finish_launch(block, a.state, &flags[1]);  // where ranks disagree all know it, and stay in step
  combine::push_rows(a, ready, block, warp, mesh, shape, epoch);
  combine::sum_tokens(a, ready, block, warp, mesh, shape, epoch);
  finish_launch(block, a.state, &flags[1]);
}

}  // namespace weft
