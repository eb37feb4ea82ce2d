// SPDX-License-Identifier: Apache-2.0
//
// exchange_lines.cuh: an exchange by lines. run_lines() moves slices of the buffers through the inboxes of
// peers, each value beside its flag, and counts its rounds in the state of the block.
#pragma once

#include "kernels/collective/exchange_run.cuh"

namespace weft {

namespace exchange {

// Lines that one sender has in a round: the first halves of all units, then the second ones, so that
// neighbouring threads store neighbouring lines and a link carries whole packets.
struct Lines {
  Vec16* first;
  uint32_t second_at;  // from a unit's first line to its second
  uint64_t tag;

  WEFT_DEVICE bool is_there(const Vec16& line) const {
    return message::LlSlots::is_there({nullptr, tag}, line);
  }
  WEFT_DEVICE void put(uint32_t unit, const Vec16& value) const {
    const uint32_t flag = message::LlSlots::flag(tag), salted = message::LlSlots::salted_flag(tag);
    store_line(first + unit, {{value.words[0], flag, value.words[1], salted}});
    store_line(first + second_at + unit, {{value.words[2], flag, value.words[3], salted}});
  }
  template <class GiveUp>
  WEFT_DEVICE Vec16 take(uint32_t unit, GiveUp gives_up) const {
    Vec16 low{}, high{};
    for (uint32_t looks = 0;; ++looks) {
      low = load_line(first + unit);
      high = load_line(first + second_at + unit);
      if ((is_there(low) && is_there(high)) || gives_up(looks)) break;
    }
    return {{low.words[0], low.words[2], high.words[0], high.words[2]}};
  }
};

// The block's regions of one round: in a peer's inbox, and for a peer in the own one. `number` counts from 1.
template <class R>
struct Round {
  const R& run;
  uint64_t number;

  WEFT_DEVICE uint64_t region(uint32_t sender) const {
    const ExchangeLayout& layout = run.a.layout;
    const uint64_t at = ((number & 1) * run.ranks + sender) * layout.blocks + run.block.index();
    return layout.inbox_at + at * layout.region_units * 32;
  }
  WEFT_DEVICE Lines lines_at(std::byte* window, uint32_t sender) const {
    return {reinterpret_cast<Vec16*>(window + region(sender)), run.a.layout.region_units,
            message_tag(number, run.a.digest)};
  }
  WEFT_DEVICE Lines to(uint32_t peer) const { return lines_at(run.mesh.to(peer).mapped(), run.self); }
  WEFT_DEVICE Lines from(uint32_t peer) const { return lines_at(run.mesh.local(), peer); }
};

// The sum of load(rank) over all ranks, in their order.
template <class Combiner, class R, class Load>
WEFT_DEVICE Vec16 sum_of(const R& run, Load load) {
  constexpr uint32_t kInFlight = kSourcesInFlight<Combiner>;
  Vec16 sum{};
  for (uint32_t first = 0; first < run.ranks; first += kInFlight) {
    Vec16 values[kInFlight] = {};
    WEFT_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j)
      if (first + j < run.ranks) values[j] = load(first + j);
    WEFT_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j)
      if (first + j < run.ranks) sum = first + j == 0 ? values[j] : Combiner::apply(sum, values[j]);
  }
  return Combiner::finish(sum, run.ranks);
}

// Units [first, first + count) of every part that moves in a round.
struct Slice {
  uint64_t first;
  uint32_t count;
};

WEFT_DEVICE Vec16 load_unit(const Piece& piece, uint64_t unit) {
  if (unit < message::full_units(piece, unit + 1))
    return load_vec(reinterpret_cast<const Vec16*>(piece.at) + unit);
  return message::load_ragged(piece, unit);
}
WEFT_DEVICE void store_unit(const Piece& piece, uint64_t unit, const Vec16& value) {
  if (unit < message::full_units(piece, unit + 1))
    return store_vec(reinterpret_cast<Vec16*>(piece.at) + unit, value);
  message::store_ragged(piece, unit, value);
}

// The part of a piece from a slice's first unit to the piece's end.
WEFT_DEVICE Piece sliced(const Piece& piece, Slice slice) {
  const uint64_t at = slice.first * 16, start = at < piece.bytes ? at : piece.bytes;
  return {piece.at + start, piece.bytes - start};
}
WEFT_DEVICE Piece part_of(std::byte* base, uint64_t bytes, uint64_t part) {
  return {base + part * bytes, bytes};
}
// Part `rank` of an all_reduce in two exchanges: equal numbers of units, of which the last parts may lack
// some.
WEFT_DEVICE Piece share_of_buffer(std::byte* base, uint64_t bytes, uint64_t share_units, uint64_t rank) {
  const uint64_t at = rank * share_units * 16;
  const uint64_t start = at < bytes ? at : bytes;
  const uint64_t rest = bytes - start;
  return {base + start, rest < share_units * 16 ? rest : share_units * 16};
}
WEFT_DEVICE uint64_t share_units_of(uint64_t bytes, uint32_t ranks) {
  return ((bytes + 15) / 16 + ranks - 1) / ranks;
}

// The pieces of kinds in which all ranks send to all.
struct Everybody {
  WEFT_DEVICE constexpr bool operator()(uint32_t /*peer*/) const { return true; }
};

// Sends the slice of piece_for(peer) to every peer that is_for() names, and a line without data to the others.
template <class R, class PieceFor, class IsFor = Everybody>
WEFT_DEVICE void send_lines(const Round<R>& round, Slice slice, PieceFor piece_for, IsFor is_for = {}) {
  const R& run = round.run;
  const uint32_t items = slice.count * (run.ranks - 1);
  for (uint32_t item = run.block.rank(); item < items; item += run.block.size()) {
    const uint32_t step = item / slice.count, unit = item - step * slice.count;
    const uint32_t peer = run.peer(step + 1);
    if (is_for(peer))
      round.to(peer).put(unit, load_unit(piece_for(peer), slice.first + unit));
    else if (unit == 0)
      round.to(peer).put(0, {});
  }
}

// Stores what every peer that is_from() names sends into piece_from(peer); waits for the others' lines, too.
template <class R, class PieceFrom, class IsFrom = Everybody>
WEFT_DEVICE void receive_lines(const Round<R>& round, Slice slice, PieceFrom piece_from,
                               IsFrom is_from = {}) {
  const R& run = round.run;
  PeerPatience patience{{run.a.wait}, run.block.index()};
  const uint32_t items = slice.count * (run.ranks - 1);
  for (uint32_t item = run.block.rank(); item < items; item += run.block.size()) {
    const uint32_t step = item / slice.count, unit = item - step * slice.count;
    const uint32_t peer = run.peer(step + 1);
    if (!is_from(peer) && unit != 0) continue;
    const Vec16 value = round.from(peer).take(
        unit, [&](uint32_t looks) { return patience.ends(looks, peer, round.number, round.number - 1); });
    if (is_from(peer)) store_unit(piece_from(peer), slice.first + unit, value);
  }
}

// This rank's unit plus every peer's, in the order of ranks. False: some did not come.
template <class Combiner, class R>
WEFT_DEVICE bool sum_of_lines(const Round<R>& round, uint32_t unit, const Vec16& own, PeerPatience& patience,
                              Vec16& sum) {
  const R& run = round.run;
  constexpr uint32_t kInFlight = kSourcesInFlight<Combiner>;
  // Regions of neighbouring senders stand one stride apart.
  const Lines lines = round.from(0);
  const uint64_t stride = uint64_t{run.a.layout.blocks} * run.a.layout.region_units * 2;
  for (uint32_t first = 0; first < run.ranks; first += kInFlight) {
    Vec16 low[kInFlight], high[kInFlight];
    auto is_peer = [&](uint32_t j) { return first + j < run.ranks && first + j != run.self; };
    for (uint32_t looks = 0;; ++looks) {
      WEFT_UNROLL
      for (uint32_t j = 0; j < kInFlight; ++j) {
        if (!is_peer(j)) continue;
        const Vec16* line = lines.first + (first + j) * stride + unit;
        low[j] = load_line(line);
        high[j] = load_line(line + lines.second_at);
      }
      uint32_t missing = run.ranks;
      WEFT_UNROLL
      for (uint32_t j = 0; j < kInFlight; ++j) {
        if (is_peer(j) && !(lines.is_there(low[j]) && lines.is_there(high[j]))) missing = first + j;
      }
      if (missing == run.ranks) break;
      if (patience.ends(looks, missing, round.number, round.number - 1)) return false;
    }
    WEFT_UNROLL
    for (uint32_t j = 0; j < kInFlight; ++j) {
      if (first + j >= run.ranks) continue;
      const Vec16 value =
          is_peer(j) ? Vec16{{low[j].words[0], low[j].words[2], high[j].words[0], high[j].words[2]}} : own;
      sum = first + j == 0 ? value : Combiner::apply(sum, value);
    }
  }
  sum = Combiner::finish(sum, run.ranks);
  return true;
}

// Adds the slices that came to this rank's and stores the sums; then(unit, sum) is called for each that is
// whole.
template <class R, class Then>
WEFT_DEVICE void add_lines(const Round<R>& round, Slice slice, const Piece& own, const Piece& into,
                           Then then) {
  const R& run = round.run;
  with_combiner(run.shape, [&](auto combiner) {
    PeerPatience patience{{run.a.wait}, run.block.index()};
    for (uint32_t unit = run.block.rank(); unit < slice.count; unit += run.block.size()) {
      const Vec16 mine = load_unit(own, slice.first + unit);
      Vec16 sum{};
      if (!sum_of_lines<decltype(combiner)>(round, unit, mine, patience, sum)) continue;
      store_unit(into, slice.first + unit, sum);
      then(unit, sum);
    }
  });
}

// store(unit, load(unit)) for the units of a slice, with several loads of a thread under way.
template <class Load, class Store>
WEFT_DEVICE void move_units(Block block, uint32_t count, Load load, Store store) {
  const uint32_t step = block.size();
  uint32_t unit = block.rank();
  for (; unit + (kLoadsInFlight - 1) * step < count; unit += kLoadsInFlight * step) {
    Vec16 held[kLoadsInFlight];
    WEFT_UNROLL
    for (uint32_t j = 0; j < kLoadsInFlight; ++j) held[j] = load(unit + j * step);
    WEFT_UNROLL
    for (uint32_t j = 0; j < kLoadsInFlight; ++j) store(unit + j * step, held[j]);
  }
  for (; unit < count; unit += step) store(unit, load(unit));
}

// Copies units. Units that are not whole or not aligned are copied after the others, one at a time: there
// are few, and the code that moves them is long.
WEFT_DEVICE void copy_units(Block block, uint32_t count, const Piece& from, const Piece& to) {
  const uint64_t whole = message::full_units(from, message::full_units(to, count));
  const auto* src = reinterpret_cast<const Vec16*>(from.at);
  auto* dst = reinterpret_cast<Vec16*>(to.at);
  move_units(
      block, static_cast<uint32_t>(whole), [&](uint32_t unit) { return load_vec(src + unit); },
      [&](uint32_t unit, const Vec16& value) { store_vec(dst + unit, value); });
  for (uint64_t unit = whole + block.rank(); unit < count; unit += block.size())
    store_unit(to, unit, load_unit(from, unit));
}

template <class R>
WEFT_DEVICE void copy_own(const R& run, Slice slice, const Piece& from, const Piece& to) {
  if (from.at == to.at) return;
  copy_units(run.block, slice.count, sliced(from, slice), sliced(to, slice));
}

template <class R>
WEFT_DEVICE void gather_slice(const R& run, uint64_t number, Slice slice) {
  const ExchangeArgs& a = run.a;
  const Round<R> round{run, number};
  send_lines(round, slice, [&](uint32_t) { return Piece{a.input, a.bytes}; });
  copy_own(run, slice, {a.input, a.bytes}, part_of(a.output, a.bytes, run.self));
  receive_lines(round, slice, [&](uint32_t peer) { return part_of(a.output, a.bytes, peer); });
}

template <class R>
WEFT_DEVICE void swap_slice(const R& run, uint64_t number, Slice slice) {
  const ExchangeArgs& a = run.a;
  const Round<R> round{run, number};
  send_lines(round, slice, [&](uint32_t peer) { return part_of(a.input, a.bytes, peer); });
  copy_own(run, slice, part_of(a.input, a.bytes, run.self), part_of(a.output, a.bytes, run.self));
  receive_lines(round, slice, [&](uint32_t peer) { return part_of(a.output, a.bytes, peer); });
}

template <class R>
WEFT_DEVICE void scatter_slice(const R& run, uint64_t number, Slice slice) {
  const ExchangeArgs& a = run.a;
  const Round<R> round{run, number};
  send_lines(round, slice, [&](uint32_t peer) { return part_of(a.input, a.bytes, peer); });
  add_lines(round, slice, part_of(a.input, a.bytes, run.self), {a.output, a.bytes},
            [](uint32_t, const Vec16&) {});
}

template <class R>
WEFT_DEVICE void reduce_slice_at_once(const R& run, uint64_t number, Slice slice) {
  const ExchangeArgs& a = run.a;
  const Round<R> round{run, number};
  send_lines(round, slice, [&](uint32_t) { return Piece{a.input, a.bytes}; });
  add_lines(round, slice, {a.input, a.bytes}, {a.output, a.bytes}, [](uint32_t, const Vec16&) {});
}

// Two rounds: the parts to their owners, whose threads send each sum on as soon as they have it.
template <class R>
WEFT_DEVICE void reduce_slice(const R& run, uint64_t number, Slice slice) {
  const ExchangeArgs& a = run.a;
  const uint64_t units = share_units_of(a.bytes, run.ranks);
  auto share = [&](std::byte* base, uint32_t rank) { return share_of_buffer(base, a.bytes, units, rank); };
  const Round<R> round{run, number};
  const Round<R> back{run, number + 1};
  send_lines(round, slice, [&](uint32_t peer) { return share(a.input, peer); });
  add_lines(round, slice, share(a.input, run.self), share(a.output, run.self),
            [&](uint32_t unit, const Vec16& sum) {
              for (uint32_t step = 1; step < run.ranks; ++step) back.to(run.peer(step)).put(unit, sum);
            });
  receive_lines(back, slice, [&](uint32_t peer) { return share(a.output, peer); });
}

// The pieces of kinds with a root: everybody sends to it, or receives from it.
template <class R>
WEFT_DEVICE void rooted_slice(const R& run, uint64_t number, Slice slice) {
  const ExchangeArgs& a = run.a;
  const Round<R> round{run, number};
  const bool has_parts_out = run.kind() == Exchange::kScatter, has_parts_in = run.kind() == Exchange::kGather;
  const bool is_from_root = has_parts_out || run.kind() == Exchange::kBroadcast;
  auto goes = [&](uint32_t from, uint32_t to) { return (is_from_root ? from : to) == a.root; };
  auto sent = [&](uint32_t peer) {
    return has_parts_out ? part_of(a.input, a.bytes, peer) : Piece{a.input, a.bytes};
  };
  auto received = [&](uint32_t peer) {
    return has_parts_in ? part_of(a.output, a.bytes, peer) : Piece{a.output, a.bytes};
  };
  send_lines(round, slice, sent, [&](uint32_t peer) { return goes(run.self, peer); });
  if (run.kind() == Exchange::kReduce) {
    if (run.is_root()) return add_lines(round, slice, sent(0), received(0), [](uint32_t, const Vec16&) {});
  } else if (run.is_root()) {
    copy_own(run, slice, sent(run.self), received(run.self));
  }
  receive_lines(round, slice, received, [&](uint32_t peer) { return goes(peer, run.self); });
}

template <class R>
WEFT_DEVICE void run_lines(const R& run) {
  const ExchangeArgs& a = run.a;
  const bool is_two_shot = run.kind() == Exchange::kAllReduce && !a.is_one_shot;
  const uint64_t units = is_two_shot ? share_units_of(a.bytes, run.ranks) : (a.bytes + 15) / 16;
  ExchangeState& state = a.states[run.block.index()];
  uint64_t number = state.rounds + 1;
  if (is_void(a.wait, load_gave_up(a.wait))) return;
  for (uint64_t first = uint64_t{run.block.index()} * a.slice_units; first < units;
       first += uint64_t{run.block.count()} * a.slice_units) {
    const uint64_t left = units - first;
    const Slice slice{first, static_cast<uint32_t>(left < a.slice_units ? left : a.slice_units)};
    if (has_root(run.kind()))
      rooted_slice(run, number, slice);
    else if (run.kind() == Exchange::kAllGather)
      gather_slice(run, number, slice);
    else if (run.kind() == Exchange::kAllToAll)
      swap_slice(run, number, slice);
    else if (run.kind() == Exchange::kReduceScatter)
      scatter_slice(run, number, slice);
    else if (a.is_one_shot)
      reduce_slice_at_once(run, number, slice);
    else
      reduce_slice(run, number, slice);
    number += is_two_shot ? 2 : 1;
    run.block.sync();  // everybody has read this round
  }
  if (run.block.rank() == 0) state.rounds = number - 1;
}

}  // namespace exchange

}  // namespace weft
