// SPDX-License-Identifier: Apache-2.0
//
// exchange_push.cuh: parts that go straight into peers' outputs by bulk copies: push(), and spread() for a broadcast.
#pragma once

#include "kernels/collective/exchange_stages.cuh"

namespace weft {

namespace exchange {

// A piece of a part on its way: to one rank, or to all.
struct Copy {
  uint64_t at;  // in the part
  uint32_t peer;
};

// The stages of a warp that makes bulk copies.
template <class R>
WEFT_DEVICE std::byte* stages_of(const R& run, const Warp& warp) {
  return run.block.shared() + places_bytes(run.ranks) + warp.index() * pipe_bytes(run.a.piece_bytes);
}

// The pieces that a warp moves of so many bytes: the first one, then every step-th.
struct Pieces {
  uint64_t first, step, bytes, piece_bytes;

  // Where piece `number` of the warp begins; none: at or beyond `bytes`.
  WEFT_DEVICE uint64_t at(uint64_t number) const { return (first + number * step) * piece_bytes; }
  WEFT_DEVICE uint32_t bytes_at(uint64_t from, uint64_t end) const {
    return static_cast<uint32_t>(end - from < piece_bytes ? end - from : piece_bytes);
  }
};
template <class R>
WEFT_DEVICE Pieces pieces_of(const R& run, const Warp& warp, uint64_t bytes) {
  return {uint64_t{warp.index()} * run.block.count() + run.block.index(),
          uint64_t{run.block.count()} * run.a.pipe_warps, bytes, run.a.piece_bytes};
}

// all_gather: pieces of the input go to all outputs, gather: to the root's; all_to_all, scatter: each part of it
// to one.
template <class R>
WEFT_DEVICE void push(const R& run) {
  const ExchangeArgs& a = run.a;
  const Warp warp;
  if (warp.index() >= a.pipe_warps) return;
  const bool is_all_gather = run.kind() == Exchange::kAllGather;
  const bool is_gather = is_all_gather || run.kind() == Exchange::kGather;
  const bool is_scatter = run.kind() == Exchange::kScatter;
  if (is_scatter && !run.is_root()) return;
  RowPipe<kPipeStages> pipe(warp, stages_of(run, warp), a.piece_bytes);
  const uint64_t pieces = (a.bytes + a.piece_bytes - 1) / a.piece_bytes;
  const uint64_t items = is_gather ? pieces : pieces * run.ranks;
  const uint64_t step = uint64_t{run.block.count()} * a.pipe_warps;
  uint64_t item = uint64_t{warp.index()} * run.block.count() + run.block.index();
  pipe.run(
      [&]() -> RowItem<Copy> {
        if (item >= items) return {};
        const uint64_t piece = is_gather ? item : item / run.ranks;
        const uint32_t peer = is_gather ? a.root : run.peer(static_cast<uint32_t>(item - piece * run.ranks));
        const uint64_t at = piece * a.piece_bytes, left = a.bytes - at;
        item += step;
        const std::byte* src = a.input + (is_gather ? 0 : peer * a.bytes) + at;
        return {{src, static_cast<uint32_t>(left < a.piece_bytes ? left : a.piece_bytes)}, {at, peer}};
      },
      [&](const Copy& copy, RowPiece stage) {
        if (!is_all_gather) {
          std::byte* dst = run.places(1)[copy.peer] + (is_scatter ? 0 : run.self * a.bytes) + copy.at;
          const std::byte* src = a.input + (is_gather ? 0 : copy.peer * a.bytes) + copy.at;
          return pipe.store(warp.rank() == 0 && dst != src ? dst : nullptr, stage);
        }
        for (uint32_t first = 0; first < run.ranks; first += warp.size()) {
          const uint32_t peer = first + warp.rank();
          std::byte* dst = peer < run.ranks ? run.places(1)[peer] + run.self * a.bytes + copy.at : nullptr;
          pipe.store(dst == a.input + copy.at ? nullptr : dst, stage);
        }
      });
  pipe.drain();
}

// A broadcast. With two ranks the root sends the buffer. With more, every other rank copies a share of it out of the
// root's input and sends it to all but the root: each link carries the buffer once, and no rank waits for single
// pieces. The root makes its own copy.
template <class R>
WEFT_DEVICE void spread(const R& run) {
  const ExchangeArgs& a = run.a;
  const Warp warp;
  const bool takes_share = run.goes_on() && !run.is_root();
  const bool is_idle = run.goes_on() ? run.is_root() && a.output == a.input : !run.is_root();
  if (warp.index() >= a.pipe_warps || is_idle) return;
  std::byte* input = takes_share ? run.places(0)[a.root] : a.input;
  const uint64_t share_units = share_units_of(a.bytes, run.owners());
  const Piece mine =
      takes_share ? share_of_buffer(input, a.bytes, share_units, run.share(run.self)) : Piece{input, a.bytes};
  auto place_of = [&](uint32_t rank) -> std::byte* {
    if (rank == run.self) return takes_share || a.output != a.input ? a.output : nullptr;
    return (takes_share ? rank != a.root : !run.goes_on()) ? run.places(1)[rank] : nullptr;
  };
  RowPipe<kPipeStages> pipe(warp, stages_of(run, warp), a.piece_bytes);
  pipe.fence_acquired();
  const Pieces pieces = pieces_of(run, warp, mine.bytes);
  uint64_t number = 0;
  pipe.run(
      [&]() -> RowItem<uint64_t> {
        const uint64_t at = pieces.at(number++);
        if (at >= mine.bytes) return {};
        return {{mine.at + at, pieces.bytes_at(at, mine.bytes)}, static_cast<uint64_t>(mine.at - input) + at};
      },
      [&](uint64_t at, RowPiece stage) {
        for (uint32_t first = 0; first < run.ranks; first += warp.size()) {
          const uint32_t rank = first + warp.rank();
          std::byte* place = rank < run.ranks ? place_of(rank) : nullptr;
          pipe.store(place ? place + at : nullptr, stage);
        }
      });
  pipe.drain();
}

}  // namespace exchange

}  // namespace weft
