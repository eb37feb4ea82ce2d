// SPDX-License-Identifier: Apache-2.0
//
// exchange_push.cuh: parts that go straight into peers' outputs by bulk copies: push(), and spread() for a broadcast,
// whose pieces go on from rank to rank.
#pragma once

#include "kernels/collective/exchange_stages.cuh"

namespace weft {

namespace exchange {

// A piece of a part on its way: to one rank, or to all.
struct Copy {
  uint64_t at;  // in the part; of a broadcast: in the buffer
  uint32_t peer;
  uint32_t round = 0;  // of a broadcast
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
  WEFT_DEVICE uint64_t count() const {
    const uint64_t all = (bytes + piece_bytes - 1) / piece_bytes;
    return first < all ? (all - first + step - 1) / step : 0;
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

// Says how many rounds of pieces of a broadcast have come from the root to this block's warp of the same number.
template <class R>
struct Rounds {
  const R& run;
  const Warp& warp;
  uint64_t meeting;

  WEFT_DEVICE uint64_t word() const {
    return run.a.layout.spread_at +
           (uint64_t{run.block.index()} * kMostPipeWarps + warp.index()) * sizeof(uint64_t);
  }
  WEFT_DEVICE void tell(uint64_t rounds) const {
    for (uint32_t peer = warp.rank(); peer < run.ranks; peer += warp.size())
      if (peer != run.self) run.mesh.to(peer).put_value(word(), meeting << 32 | rounds);
  }
  // Waits for so many; in every lane, whether they came.
  WEFT_DEVICE bool wait(uint64_t rounds) const {
    uint32_t came = 1;
    if (warp.rank() == 0) {
      PeerPatience patience{{run.a.wait}, run.block.index()};
      const auto* here = reinterpret_cast<const uint64_t*>(run.mesh.local() + word());
      const uint64_t wanted = meeting << 32 | rounds;
      uint64_t seen = load_acquire(here);
      for (uint32_t looks = 0; seen < wanted && came != 0; ++looks) {
        came = patience.ends(looks, run.a.root, wanted, seen) ? 0 : 1;
        seen = load_acquire(here);
      }
    }
    return warp.broadcast(came) != 0;
  }
};

template <class R, class Pipe>
WEFT_DEVICE void send_shares(const R& run, const Warp& warp, Pipe& pipe, uint64_t meeting) {
  const ExchangeArgs& a = run.a;
  const Rounds<R> rounds{run, warp, meeting};
  const uint64_t share_bytes = share_units_of(a.bytes, run.owners()) * 16;
  const Pieces pieces = pieces_of(run, warp, share_bytes);
  // Warps begin with different owners, or all would send to the same one at a time.
  const uint32_t turn = (run.block.index() + warp.index()) % run.owners();
  uint32_t round = 0, share = 0, told = 0;
  pipe.run(
      [&]() -> RowItem<Copy> {
        for (; pieces.at(round) < share_bytes; ++round, share = 0) {
          while (share < run.owners()) {
            const uint32_t which = (turn + share++) % run.owners();
            const uint64_t at = which * share_bytes + pieces.at(round), end = (which + 1) * share_bytes;
            if (at >= a.bytes) continue;  // the last shares may be short
            return {{a.input + at, pieces.bytes_at(at, end < a.bytes ? end : a.bytes)},
                    {at, run.peer(which + 1), round}};
          }
        }
        return {};
      },
      [&](const Copy& copy, RowPiece stage) {
        if (run.goes_on() && copy.round > told + 2) {
          // All but the last two pieces have arrived, so all rounds but the last two have: one may have one piece.
          pipe.template drain_but<2>();
          rounds.tell(told = copy.round - 2);
        }
        std::byte* own = a.output == a.input ? nullptr : a.output + copy.at;
        for (uint32_t first = 0; first < 2; first += warp.size()) {
          const uint32_t to = first + warp.rank();
          pipe.store(to == 0 ? run.places(1)[copy.peer] + copy.at : to == 1 ? own : nullptr, stage);
        }
      });
  if (!run.goes_on()) return;
  pipe.drain();
  rounds.tell(pieces.count());
}

template <class R, class Pipe>
WEFT_DEVICE void pass_share_on(const R& run, const Warp& warp, Pipe& pipe, uint64_t meeting) {
  const ExchangeArgs& a = run.a;
  const Rounds<R> rounds{run, warp, meeting};
  const uint64_t share_units = share_units_of(a.bytes, run.owners());
  const Piece share = share_of_buffer(a.output, a.bytes, share_units, run.share(run.self));
  const uint64_t share_at = run.share(run.self) * share_units * 16;
  const Pieces pieces = pieces_of(run, warp, share.bytes);
  for (uint64_t round = 0; pieces.at(round) < share.bytes; ++round) {
    if (!rounds.wait(round + 1)) {
      if (warp.rank() == 0) store_release_block(&run.met()->all_came, 0);
      return;
    }
    pipe.sees_arrived();
    const uint64_t at = pieces.at(round);
    const RowItem<Copy> piece = {{share.at + at, pieces.bytes_at(at, share.bytes)}, {share_at + at, 0}};
    pipe.pass(piece, [&](const Copy& copy, RowPiece stage) {
      for (uint32_t first = 0; first < run.ranks; first += warp.size()) {
        const uint32_t peer = first + warp.rank();
        const bool is_other = peer < run.ranks && run.sends_on(run.self, peer) && peer != run.self;
        pipe.store(is_other ? run.places(1)[peer] + copy.at : nullptr, stage);
      }
    });
  }
}

// A broadcast. The root sends every owner its share, a round of pieces after the other: one for each owner. Owners pass
// pieces on to the others as they come, so all links carry the buffer once, at the same time.
template <class R>
WEFT_DEVICE void spread(const R& run, uint64_t meeting) {
  const Warp warp;
  if (warp.index() >= run.a.pipe_warps) return;
  RowPipe<kPipeStages> pipe(warp, stages_of(run, warp), run.a.piece_bytes);
  if (run.is_root())
    send_shares(run, warp, pipe, meeting);
  else if (run.goes_on())
    pass_share_on(run, warp, pipe, meeting);
  pipe.drain();
}

}  // namespace exchange

}  // namespace weft
