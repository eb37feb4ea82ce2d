// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine_sum.cuh: a token's rows are added as soon as their bursts have come.
// Sums: float32, from the bias on, ranks ascending or as sum_place says, one rounding. Rows of this rank itself
// are read in place.
#pragma once

#include "kernels/core/numbers.cuh"
#include "kernels/moe/high_throughput_combine_push.cuh"
#include "kernels/moe/high_throughput_combine_watch.cuh"

namespace weft {
namespace combine {

// Rows that a lane loads before it uses any: memory is far. A host core looks ahead by itself, and would
// rather add long pieces of one row.
inline constexpr uint32_t kRowsInFlight = Warp::kMaxSize == 1 ? 1 : 4;
inline constexpr uint32_t kVecsInFlight = kSumVecs;
// A host core prefetches the next token's rows while it sums this one's: its own prefetcher starts anew with every row.
inline constexpr bool kAsksAhead = Warp::kMaxSize == 1;

// The rows of one token: `count` of them, consecutive in staging, but number `mine` (if any) is in this
// rank's x.
struct TokenRows {
  const std::byte* staging;
  const std::byte* own_row;
  uint64_t staging_row;
  uint64_t x_row;
  uint32_t count;
  uint32_t mine;
  uint32_t tokens_ahead;  // to the next token of this warp

  WEFT_DEVICE const std::byte* row(uint32_t i, uint64_t row_bytes) const {
    return i == mine ? own_row : staging + i * row_bytes;
  }
  // How far behind row i a row of the next token probably is: tokens lie in order, about as many rows each.
  WEFT_DEVICE uint64_t ahead(uint32_t i, uint64_t row_bytes) const {
    return uint64_t{tokens_ahead} * (i == mine ? 1 : count) * row_bytes;
  }
};

template <class MeshT, class Shape>
WEFT_DEVICE TokenRows rows_of_token(const CombineArgs& a, Warp warp, const MeshT& mesh, const Shape& shape,
                                    const Staging& staging, uint64_t token, uint32_t tokens_ahead) {
  const int32_t* send_row = a.send_row + token * mesh.ranks();
  uint32_t count = 0;
  uint32_t before_mine = 0;
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    const uint32_t goes = send_row[peer] >= 0;
    count += goes;
    before_mine += peer < mesh.rank() ? goes : 0;
  }
  TokenRows rows{};
  rows.tokens_ahead = tokens_ahead;
  rows.count = warp.sum(count);
  rows.mine = warp.sum(before_mine);
  if (a.sum_place) rows.mine = static_cast<uint32_t>(a.sum_place[token * mesh.ranks() + mesh.rank()]);
  rows.staging_row = static_cast<uint32_t>(a.slot_base[token]);
  rows.staging = staging.rows + rows.staging_row * shape.row_bytes;
  if (send_row[mesh.rank()] < 0) {
    rows.mine = rows.count;
    return rows;
  }
  rows.x_row = row_span(a.prefix, mesh.ranks(), mesh.rank(), mesh.rank()).first +
               static_cast<uint32_t>(send_row[mesh.rank()]);
  rows.own_row = a.x + rows.x_row * shape.row_bytes;
  return rows;
}

template <uint32_t kBytes>
WEFT_DEVICE void prefetch_piece(const std::byte* piece) {
  constexpr uint32_t kLineBytes = 64;
  WEFT_UNROLL
  for (uint32_t at = 0; at < kBytes; at += kLineBytes) prefetch(piece + at);
}

// The sum of a token's rows at vectors v, v + stride, ...; kVecs of them at once keep enough loads in flight.
template <class Element, uint32_t kVecs, class Shape>
WEFT_DEVICE void sum_vectors(const CombineArgs& a, const Shape& shape, const TokenRows& rows, uint64_t token,
                             uint64_t v, uint64_t stride) {
  float sums[kVecs][Element::kPerVec] = {};
  const uint64_t row_bytes = shape.row_bytes;
  auto vec = [&](const std::byte* row, uint32_t j) {
    return reinterpret_cast<const Vec16*>(row) + v + j * stride;
  };
  for (const std::byte* bias : a.bias) {
    if (!bias) continue;
    WEFT_UNROLL
    for (uint32_t j = 0; j < kVecs; ++j) Element::add(sums[j], load_vec(vec(bias + token * row_bytes, j)));
  }
  for (uint32_t first = 0; first < rows.count; first += kRowsInFlight) {
    Vec16 held[kRowsInFlight][kVecs] = {};
    WEFT_UNROLL
    for (uint32_t i = 0; i < kRowsInFlight; ++i) {
      if (first + i >= rows.count) continue;
      const std::byte* row = rows.row(first + i, row_bytes);
      if constexpr (kAsksAhead) prefetch_piece<kVecs * 16>(row + v * 16 + rows.ahead(first + i, row_bytes));
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j) held[i][j] = load_vec_streaming(vec(row, j));
    }
    WEFT_UNROLL
    for (uint32_t i = 0; i < kRowsInFlight; ++i) {
      if (first + i >= rows.count) continue;
      WEFT_UNROLL
      for (uint32_t j = 0; j < kVecs; ++j) Element::add(sums[j], held[i][j]);
    }
  }
  auto* out = reinterpret_cast<Vec16*>(a.combined + token * row_bytes) + v;
  WEFT_UNROLL
  for (uint32_t j = 0; j < kVecs; ++j) store_vec_streaming(out + j * stride, Element::round(sums[j]));
}

template <class Element, class Shape>
WEFT_DEVICE void sum_rows(const CombineArgs& a, Warp warp, const Shape& shape, const TokenRows& rows,
                          uint64_t token) {
  const uint64_t vectors = shape.row_bytes / 16;
  const uint64_t stride = warp.size();
  uint64_t v = warp.rank();
  for (; v + (kVecsInFlight - 1) * stride < vectors; v += kVecsInFlight * stride)
    sum_vectors<Element, kVecsInFlight>(a, shape, rows, token, v, stride);
  for (; v < vectors; v += stride) sum_vectors<Element, 1>(a, shape, rows, token, v, stride);
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
WEFT_DEVICE void sum_tokens(const CombineArgs& a, const Rendezvous& x, Block block, Warp warp,
                            const MeshT& mesh, const Shape& shape, uint64_t epoch, const Progress& progress) {
  const Share share = share_of(block, warp, a.sum_warps);
  if (!share.active) return;
  const Staging staging = staging_of(x, mesh, epoch, mesh.rank());
  for (uint64_t token = share.index; token < a.tokens; token += share.total) {
    if (!wait_for_token(a, warp, mesh, epoch, progress, token)) return;
    const Span traced(a.wait.trace, Work::kSum, warp.rank() == 0);
    const TokenRows rows = rows_of_token(a, warp, mesh, shape, staging, token, share.total);
    if (shape.element == kElementFp32)
      sum_rows<Fp32>(a, warp, shape, rows, token);
    else
      sum_rows<Bf16>(a, warp, shape, rows, token);
    if (a.topk_weights) sum_weights(a, warp, shape, staging, rows, token);
  }
}

}  // namespace combine
}  // namespace weft
