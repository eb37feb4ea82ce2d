// SPDX-License-Identifier: Apache-2.0
//
// exchange.cuh: all_reduce, all_gather, reduce_scatter and all_to_all where every rank maps every other, each
// as one kernel without steps to decode. Three ways:
//   lines   every value travels beside its flag into the receiver's inbox, which needs no hand-shake and no
//           fence; on the critical path are one look at the block's counter and one trip to the peer
//           (all_reduce of larger buffers: two trips). The least latency; twice the bytes.
//   places  ranks tell each other where their buffers are; then all_gather and all_to_all push straight into
//           the peers' outputs by bulk copies, reduce_scatter and all_reduce read the peers' inputs, add in
//           registers and write straight into the outputs. Every byte crosses a link once (all_reduce:
//           twice). Two trips more than lines. Where some rank's buffers are in no window, all ranks see it
//           and take stages instead.
//   stages  the data goes in slices through staging areas of the receivers' windows, one signal for each
//           slice: every byte crosses a link once (all_reduce: twice), and is copied once more where it
//           arrives, while the next slice is under way. No byte of the buffers is touched by a peer, so they
//           may lie anywhere and have any alignment.
// Sums are in the order of ranks, so all ranks get the same bits. Waits: for lines, cards and signals of
// every peer; bounded by the wait rule. exchange_args.h says why slots may be reused without asking.
//
// Who gives up sends nothing from then on that it made of what did not come, and takes back what would let a
// rank that is late use its buffers: the late rank waits in vain, too. Launches after it send nothing.
#pragma once

#include "kernels/collective/exchange_args.h"
#include "kernels/collective/message.cuh"
#include "kernels/core/channel.cuh"

namespace weft {

namespace exchange {

inline constexpr uint32_t kPipeStages = 4;
// Looks at a flag before the first pause: what is waited for is mostly under way.
inline constexpr uint32_t kEagerLooks = Warp::kMaxSize == 1 ? 0 : 64;
// Sources that one thread has under way while it adds; registers bound it, of which conversions take many.
template <class Combiner>
inline constexpr uint32_t kSourcesInFlight = Combiner::kPerVec > 8 ? 2 : 8;

WEFT_DEVICE constexpr uint32_t pipe_bytes(uint32_t piece_bytes) {
  return 128 + kPipeStages * ((piece_bytes + 127) / 128 * 128);
}

// Places of all ranks' inputs and outputs, in shared memory after a meeting.
struct Met {
  uint32_t all_have_places;
  uint32_t all_came;
  uint32_t lost;  // the slice, as the low half of its number, for which a thread waited in vain
  uint32_t reserved;
};
WEFT_DEVICE constexpr uint32_t places_bytes(uint32_t ranks) {
  return (static_cast<uint32_t>(sizeof(Met)) + 2 * ranks * 8 + 127) / 128 * 128;
}

template <class MeshT, class Shape>
struct Run {
  const ExchangeArgs& a;
  const MeshT& mesh;
  const Shape& shape;
  Block block;
  uint32_t self;
  uint32_t ranks;

  WEFT_DEVICE Exchange kind() const { return static_cast<Exchange>(shape.exchange); }
  WEFT_DEVICE uint32_t
  peer(uint32_t step) const {  // step counts from 1: every rank starts with its neighbour
    const uint32_t rank = self + step;
    return rank < ranks ? rank : rank - ranks;
  }
  WEFT_DEVICE bool pushes() const { return kind() == Exchange::kAllGather || kind() == Exchange::kAllToAll; }
  // Whether peers touch this buffer.
  WEFT_DEVICE bool needs(uint32_t which) const {
    return kind() == Exchange::kAllReduce || which == (pushes() ? 1 : 0);
  }
  WEFT_DEVICE Met* met() const { return reinterpret_cast<Met*>(block.shared()); }
  WEFT_DEVICE std::byte** places(uint32_t which) const {  // 0: inputs, 1: outputs; by rank
    return reinterpret_cast<std::byte**>(met() + 1) + which * ranks;
  }
};

// For what peers owe to a block.
struct PeerPatience {
  Patience patience;
  uint32_t block;

  // One more look at what `peer` owes was in vain. True: time is up, or another thread has raised a fault.
  WEFT_DEVICE bool ends(uint32_t looks, uint32_t peer, uint64_t expected, uint64_t seen) {
    if (looks >= kEagerLooks) pause(looks - kEagerLooks);
    if (!patience.ends(looks)) return false;
    const WaitRule& rule = patience.rule;
    if (patience.is_late())
      raise(rule.fault, Site::kCollective, rule.self, peer, expected, seen, patience.waited_ns, block << 16);
    return true;
  }
};

// ---- lines

// Lines that one sender has in a round: the first halves of all units, then the second ones, so that
// neighbouring threads store neighbouring lines and a link carries whole packets.
struct Lines {
  Vec16* first;
  uint32_t second_at;  // from a unit's first line to its second
  uint64_t tag;

  WEFT_DEVICE bool is_there(const Vec16& line) const {
    return message::LlWire::is_there({nullptr, tag}, line);
  }
  WEFT_DEVICE void put(uint32_t unit, const Vec16& value) const {
    const uint32_t flag = message::LlWire::flag(tag), salted = message::LlWire::salted_flag(tag);
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
  if (unit < message::whole_units(piece, unit + 1))
    return load_vec(reinterpret_cast<const Vec16*>(piece.at) + unit);
  return message::load_ragged(piece, unit);
}
WEFT_DEVICE void store_unit(const Piece& piece, uint64_t unit, const Vec16& value) {
  if (unit < message::whole_units(piece, unit + 1))
    return store_vec(reinterpret_cast<Vec16*>(piece.at) + unit, value);
  message::store_ragged(piece, unit, value);
}

// What of a piece is in a slice and after it.
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

// Sends the slice of piece_for(peer) to every peer.
template <class R, class PieceFor>
WEFT_DEVICE void send_lines(const Round<R>& round, Slice slice, PieceFor piece_for) {
  const R& run = round.run;
  const uint32_t items = slice.count * (run.ranks - 1);
  for (uint32_t item = run.block.rank(); item < items; item += run.block.size()) {
    const uint32_t step = item / slice.count, unit = item - step * slice.count;
    const uint32_t peer = run.peer(step + 1);
    round.to(peer).put(unit, load_unit(piece_for(peer), slice.first + unit));
  }
}

// Stores what every peer sends into piece_from(peer).
template <class R, class PieceFrom>
WEFT_DEVICE void receive_lines(const Round<R>& round, Slice slice, PieceFrom piece_from) {
  const R& run = round.run;
  PeerPatience patience{{run.a.wait}, run.block.index()};
  const uint32_t items = slice.count * (run.ranks - 1);
  for (uint32_t item = run.block.rank(); item < items; item += run.block.size()) {
    const uint32_t step = item / slice.count, unit = item - step * slice.count;
    const uint32_t peer = run.peer(step + 1);
    const Vec16 value = round.from(peer).take(
        unit, [&](uint32_t looks) { return patience.ends(looks, peer, round.number, round.number - 1); });
    store_unit(piece_from(peer), slice.first + unit, value);
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

// Copies units. Those that are not whole or not aligned go apart from the others, one at a time: there are
// few, and the code that moves them is long.
WEFT_DEVICE void copy_units(Block block, uint32_t count, const Piece& from, const Piece& to) {
  const uint64_t whole = message::whole_units(from, message::whole_units(to, count));
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
    if (run.kind() == Exchange::kAllGather)
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

// ---- stages

// The staging area of one sender and slice in a block's part of a window, kStageAreas of them by turns.
// Slices of an all_reduce are half as large: the second half of an area is for sums.
template <class R>
struct Stage {
  const R& run;
  uint64_t number;  // of the signal that publishes it

  WEFT_DEVICE uint64_t area(uint32_t sender) const {
    const ExchangeLayout& layout = run.a.layout;
    const uint64_t at = ((number % kStageAreas) * run.ranks + sender) * layout.blocks + run.block.index();
    return layout.stages_at + at * layout.stage_units * sizeof(Vec16);
  }
  WEFT_DEVICE Vec16* to(uint32_t peer) const {
    return reinterpret_cast<Vec16*>(run.mesh.to(peer).mapped() + area(run.self));
  }
  WEFT_DEVICE Vec16* from(uint32_t peer) const {
    return reinterpret_cast<Vec16*>(run.mesh.local() + area(peer));
  }
  WEFT_DEVICE uint32_t sums_at() const { return run.a.layout.stage_units / 2; }

  // Tells every peer's block that the area, and the sums in it, are filled: slice `slice` of the call.
  WEFT_DEVICE void publish(uint64_t slice) const {
    run.block.sync();
    const uint64_t shown = slice < kSlicesShown ? slice : kSlicesShown;
    const uint64_t value = number << 32 | (run.a.digest & ~kSlicesShown) | shown;
    for (uint32_t peer = run.block.rank(); peer < run.ranks; peer += run.block.size())
      if (peer != run.self) run.mesh.to(peer).put_value(signal_of(run.self), value);
  }
  // Waits until all peers have published theirs. Returns, in every thread of the block, whether they have.
  WEFT_DEVICE bool wait() const {
    PeerPatience patience{{run.a.wait}, run.block.index()};
    for (uint32_t peer = run.block.rank(); peer < run.ranks; peer += run.block.size()) {
      if (peer == run.self) continue;
      const auto* signal = reinterpret_cast<const uint64_t*>(run.mesh.local() + signal_of(peer));
      uint64_t seen = load_acquire(signal);
      for (uint32_t looks = 0; !came(seen); ++looks) {
        if (patience.ends(looks, peer, number, seen >> 32)) {
          store_release_block(&run.met()->lost, mark());
          break;
        }
        seen = load_acquire(signal);
      }
    }
    run.block.sync();
    return load_acquire_block(&run.met()->lost) != mark();
  }
  WEFT_DEVICE uint32_t mark() const { return static_cast<uint32_t>(number); }

 private:
  // Whether a peer has filled this slice, of this call. Who is in a later call has left this one, and so has
  // seen that it was the same. Nobody is more than kSlicesShown slices ahead.
  WEFT_DEVICE bool came(uint64_t seen) const {
    const uint32_t ahead = static_cast<uint32_t>(seen >> 32) - static_cast<uint32_t>(number);
    if (ahead > kSlicesShown) return false;  // behind, too
    const bool is_later_call = (seen & kSlicesShown) < ahead;
    return is_later_call || ((static_cast<uint32_t>(seen) ^ run.a.digest) & ~kSlicesShown) == 0;
  }
  WEFT_DEVICE uint64_t signal_of(uint32_t sender) const {
    return run.a.layout.staged_at + (uint64_t{run.block.index()} * run.ranks + sender) * sizeof(uint64_t);
  }
};

// What of this rank's buffers belongs to a peer: sent to it, and where what it sends is kept.
template <class R>
struct Parts {
  const R& run;
  uint64_t share_units;  // of an all_reduce

  WEFT_DEVICE Piece input_for(uint32_t peer) const {
    const ExchangeArgs& a = run.a;
    if (run.kind() == Exchange::kAllGather) return {a.input, a.bytes};
    return run.kind() == Exchange::kAllReduce ? share_of_buffer(a.input, a.bytes, share_units, peer)
                                              : part_of(a.input, a.bytes, peer);
  }
  WEFT_DEVICE Piece output_of(uint32_t peer) const {
    const ExchangeArgs& a = run.a;
    if (run.kind() == Exchange::kReduceScatter) return {a.output, a.bytes};
    return run.kind() == Exchange::kAllReduce ? share_of_buffer(a.output, a.bytes, share_units, peer)
                                              : part_of(a.output, a.bytes, peer);
  }
};

// The first units of an area as a piece.
WEFT_DEVICE Piece units_of(Vec16* area, uint32_t count) {
  return {reinterpret_cast<std::byte*>(area), uint64_t{count} * sizeof(Vec16)};
}

template <class R>
WEFT_DEVICE void fill_stages(const Stage<R>& stage, const Parts<R>& parts, Slice slice) {
  const R& run = stage.run;
  if (run.kind() == Exchange::kAllGather) {
    const Piece own = sliced(parts.input_for(run.self), slice);
    const auto whole = static_cast<uint32_t>(message::whole_units(own, slice.count));
    auto put = [&](uint32_t unit, const Vec16& value) {
      for (uint32_t step = 1; step < run.ranks; ++step) store_vec(stage.to(run.peer(step)) + unit, value);
    };
    move_units(
        run.block, whole,
        [&](uint32_t unit) { return load_vec(reinterpret_cast<const Vec16*>(own.at) + unit); }, put);
    for (uint32_t unit = whole + run.block.rank(); unit < slice.count; unit += run.block.size())
      put(unit, message::load_ragged(own, unit));
    return;
  }
  for (uint32_t step = 1; step < run.ranks; ++step) {
    const uint32_t peer = run.peer(step);
    copy_units(run.block, slice.count, sliced(parts.input_for(peer), slice),
               units_of(stage.to(peer), slice.count));
  }
}

// Keeps what every peer has put `at` units into its area.
template <class R>
WEFT_DEVICE void empty_stages(const Stage<R>& stage, const Parts<R>& parts, Slice slice, uint32_t at) {
  const R& run = stage.run;
  for (uint32_t step = 1; step < run.ranks; ++step) {
    const uint32_t peer = run.peer(step);
    copy_units(run.block, slice.count, units_of(stage.from(peer) + at, slice.count),
               sliced(parts.output_of(peer), slice));
  }
}

// Adds what every peer has put into its area to this rank's, keeps the sums and calls then(unit, sum).
template <class R, class Then>
WEFT_DEVICE void add_stages(const Stage<R>& stage, const Parts<R>& parts, Slice slice, Then then) {
  const R& run = stage.run;
  const Piece own = parts.input_for(run.self), into = parts.output_of(run.self);
  const Vec16* areas = stage.from(0);
  const uint64_t stride = uint64_t{run.a.layout.blocks} * run.a.layout.stage_units;
  with_combiner(run.shape, [&](auto combiner) {
    for (uint32_t unit = run.block.rank(); unit < slice.count; unit += run.block.size()) {
      const Vec16 mine = load_unit(own, slice.first + unit);
      const Vec16 sum = sum_of<decltype(combiner)>(run, [&](uint32_t rank) {
        return rank == run.self ? mine : load_vec(areas + rank * stride + unit);
      });
      store_unit(into, slice.first + unit, sum);
      then(unit, sum);
    }
  });
}

// Slices of a block, one after the other; slice i is filled while slice i - 1 is emptied. Signal number n
// says that the slice of its turn is filled (all_reduce: and the sums of the one before). Whoever fills the
// areas of number n has seen the signals n - 2 of all peers, each of which had emptied n - 4 before. Who gives
// up fills and tells nothing more.
template <class R>
WEFT_DEVICE void run_stages(const R& run) {
  const ExchangeArgs& a = run.a;
  const bool is_all_reduce = run.kind() == Exchange::kAllReduce;
  const Parts<R> parts{run, share_units_of(a.bytes, run.ranks)};
  const uint64_t units = is_all_reduce ? parts.share_units : (a.bytes + 15) / 16;
  const uint64_t step = uint64_t{run.block.count()} * a.stage_slice_units;
  const uint64_t start = uint64_t{run.block.index()} * a.stage_slice_units;
  const uint64_t turns = start < units ? (units - start + step - 1) / step : 0;
  if (turns == 0) return;
  auto slice_of = [&](uint64_t turn) -> Slice {
    const uint64_t first = start + turn * step, left = units - first;
    return {first, static_cast<uint32_t>(left < a.stage_slice_units ? left : a.stage_slice_units)};
  };
  ExchangeState& state = a.states[run.block.index()];
  const uint64_t first_number = state.stages + 1;
  if (is_void(a.wait, load_gave_up(a.wait))) return;
  if (run.block.rank() == 0) store_release_block(&run.met()->lost, static_cast<uint32_t>(first_number - 1));
  const uint64_t signals = turns + (is_all_reduce ? 1 : 0);
  for (uint64_t turn = 0; turn <= signals; ++turn) {
    const Stage<R> stage{run, first_number + turn}, before{run, first_number + turn - 1};
    if (turn < turns) {
      fill_stages(stage, parts, slice_of(turn));
      if (run.pushes()) copy_own(run, slice_of(turn), parts.input_for(run.self), parts.output_of(run.self));
    }
    if (is_all_reduce && turn > 0 && !before.wait()) break;
    if (is_all_reduce && turn > 0 && turn <= turns)
      add_stages(before, parts, slice_of(turn - 1), [&](uint32_t unit, const Vec16& sum) {
        for (uint32_t to = 1; to < run.ranks; ++to)
          store_vec(stage.to(run.peer(to)) + stage.sums_at() + unit, sum);
      });
    if (turn < signals) stage.publish(turn);
    if (is_all_reduce) {
      if (turn > 1) empty_stages(before, parts, slice_of(turn - 2), before.sums_at());
    } else if (turn > 0) {
      if (!before.wait()) break;
      if (run.pushes())
        empty_stages(before, parts, slice_of(turn - 1), 0);
      else
        add_stages(before, parts, slice_of(turn - 1), [](uint32_t, const Vec16&) {});
    }
  }
  run.block.sync();
  if (run.block.rank() == 0) state.stages += signals;
}

// ---- places

// The buffer that a peer's card tells of; false where it is in a window that this rank no longer has.
template <class R>
WEFT_DEVICE bool read_card(const R& run, uint64_t card, uint32_t peer, uint32_t which, std::byte*& place) {
  const ExchangeArgs& a = run.a;
  const uint64_t window = card >> kCardOffsetBits & ((1u << kCardWindowBits) - 1);
  const uint64_t offset = (card & ((uint64_t{1} << kCardOffsetBits) - 1)) * 16;
  place = nullptr;
  if (window == 0) return true;
  // Mostly the peer's buffer is in the same window as this rank's.
  const bool is_same = window == (a.places[which] >> kCardOffsetBits);
  std::byte* const* bases = is_same ? a.own_windows[which] : a.windows[window - 1];
  if (!bases) {
    raise(a.wait.fault, Site::kPeerWindow, a.wait.self, peer, window - 1, 0, 0, run.block.index() << 16);
    return false;
  }
  place = bases[peer] + offset;
  return true;
}

// Exchanges cards with every peer's block. Afterwards places() holds every rank's buffers, all peers have
// started the call, and met() says whether all buffers have places. False: a peer did not come; who comes
// now finds no card of this block.
template <class R>
WEFT_DEVICE bool meet(const R& run, uint64_t meeting) {
  const ExchangeArgs& a = run.a;
  const ExchangeLayout& layout = a.layout;
  const uint64_t cards = layout.cards_at + ((meeting & 1) * layout.blocks + run.block.index()) * run.ranks *
                                               2 * sizeof(uint64_t);
  auto mark_of = [&](uint32_t which) {
    const uint64_t half = which == 0 ? a.digest & 0xffff : a.digest >> 16;
    return half << 48 | (meeting & ((1u << kCardMeetingBits) - 1)) << kCardMarkAt;
  };
  auto card_at = [&](uint32_t i) {  // of which a rank has two at every peer
    return reinterpret_cast<uint64_t*>(run.mesh.to(i / 2).mapped() + cards) + run.self * 2 + i % 2;
  };
  for (uint32_t i = run.block.rank(); i < 2 * run.ranks; i += run.block.size())
    store_release(card_at(i), a.places[i % 2] | mark_of(i % 2));
  if (run.block.rank() == 0) *run.met() = {1, 1, {}};
  run.block.sync();
  PeerPatience patience{{a.wait}, run.block.index()};
  for (uint32_t i = run.block.rank(); i < 2 * run.ranks; i += run.block.size()) {
    const uint32_t peer = i / 2, which = i % 2;
    const auto* here = reinterpret_cast<const uint64_t*>(run.mesh.local() + cards) + i;
    uint64_t card = load_acquire(here);
    bool came = true;
    for (uint32_t looks = 0; (card ^ mark_of(which)) >> kCardMarkAt != 0 && came; ++looks) {
      came = !patience.ends(looks, peer, meeting, meeting - 1);
      card = load_acquire(here);
    }
    std::byte* place = nullptr;
    if (!came || !read_card(run, card, peer, which, place)) store_release_block(&run.met()->all_came, 0);
    if (!place && run.needs(which)) store_release_block(&run.met()->all_have_places, 0);
    run.places(which)[peer] = place;
  }
  run.block.sync();
  if (run.met()->all_came != 0) return true;
  for (uint32_t i = run.block.rank(); i < 2 * run.ranks; i += run.block.size())
    store_release(card_at(i), ~mark_of(i % 2));
  return false;
}

// Tells every peer's block that this one is done with its buffers, and waits for all of them. Who waits in
// vain takes its word back: a peer may still read its input, which is its caller's again from now on, and
// must not take it for what was to be read.
template <class R>
WEFT_DEVICE void part(const R& run, uint64_t meeting) {
  const ExchangeArgs& a = run.a;
  const uint64_t done = a.layout.done_at + uint64_t{run.block.index()} * run.ranks * sizeof(uint64_t);
  run.block.sync();
  for (uint32_t peer = run.block.rank(); peer < run.ranks; peer += run.block.size())
    run.mesh.to(peer).put_value(done + run.self * sizeof(uint64_t), meeting);
  PeerPatience patience{{a.wait}, run.block.index()};
  for (uint32_t peer = run.block.rank(); peer < run.ranks; peer += run.block.size()) {
    const auto* signal = reinterpret_cast<const uint64_t*>(run.mesh.local() + done) + peer;
    uint64_t seen = load_acquire(signal);
    for (uint32_t looks = 0; seen < meeting; ++looks) {
      if (patience.ends(looks, peer, meeting, seen)) {
        store_release_block(&run.met()->all_came, 0);
        break;
      }
      seen = load_acquire(signal);
    }
  }
  run.block.sync();
  if (run.met()->all_came != 0) return;
  for (uint32_t peer = run.block.rank(); peer < run.ranks; peer += run.block.size())
    run.mesh.to(peer).put_value(done + run.self * sizeof(uint64_t), 0);
}

// A piece of a part on its way: to one rank, or to all.
struct Copy {
  uint64_t at;  // in the part
  uint32_t peer;
};

// all_gather: pieces of the input go to all outputs; all_to_all: each part of it to one.
template <class R>
WEFT_DEVICE void push(const R& run) {
  const ExchangeArgs& a = run.a;
  const Warp warp;
  if (warp.index() >= a.pipe_warps) return;
  const bool is_gather = run.kind() == Exchange::kAllGather;
  std::byte* stages = run.block.shared() + places_bytes(run.ranks) + warp.index() * pipe_bytes(a.piece_bytes);
  RowPipe<kPipeStages> pipe(warp, stages, a.piece_bytes);
  const uint64_t pieces = (a.bytes + a.piece_bytes - 1) / a.piece_bytes;
  const uint64_t items = is_gather ? pieces : pieces * run.ranks;
  const uint64_t step = uint64_t{run.block.count()} * a.pipe_warps;
  uint64_t item = uint64_t{warp.index()} * run.block.count() + run.block.index();
  pipe.run(
      [&]() -> RowItem<Copy> {
        if (item >= items) return {};
        const uint64_t piece = is_gather ? item : item / run.ranks;
        const uint32_t peer = is_gather ? 0 : run.peer(static_cast<uint32_t>(item - piece * run.ranks));
        const uint64_t at = piece * a.piece_bytes, left = a.bytes - at;
        item += step;
        const std::byte* src = a.input + (is_gather ? 0 : peer * a.bytes) + at;
        return {{src, static_cast<uint32_t>(left < a.piece_bytes ? left : a.piece_bytes)}, {at, peer}};
      },
      [&](const Copy& copy, RowPiece stage) {
        if (!is_gather) {
          std::byte* dst = run.places(1)[copy.peer] + run.self * a.bytes + copy.at;
          return pipe.store(warp.rank() == 0 ? dst : nullptr, stage);
        }
        for (uint32_t first = 0; first < run.ranks; first += warp.size()) {
          const uint32_t peer = first + warp.rank();
          std::byte* dst = peer < run.ranks ? run.places(1)[peer] + run.self * a.bytes + copy.at : nullptr;
          pipe.store(dst == a.input + copy.at ? nullptr : dst, stage);
        }
      });
  pipe.drain();
}

// This rank's part of the sum, to its own output or to all.
template <class R>
WEFT_DEVICE void pull(const R& run) {
  const ExchangeArgs& a = run.a;
  const bool is_all = run.kind() == Exchange::kAllReduce;
  const Piece share = share_of_buffer(nullptr, a.bytes, share_units_of(a.bytes, run.ranks), run.self);
  const uint64_t at = is_all ? run.self * share_units_of(a.bytes, run.ranks) * 16 : run.self * a.bytes;
  const uint64_t units = (is_all ? share.bytes : a.bytes) / 16;
  const uint64_t threads = uint64_t{run.block.count()} * run.block.size();
  with_combiner(run.shape, [&](auto combiner) {
    for (uint64_t unit = uint64_t{run.block.index()} * run.block.size() + run.block.rank(); unit < units;
         unit += threads) {
      const Vec16 sum = sum_of<decltype(combiner)>(run, [&](uint32_t rank) {
        return load_vec_streaming(reinterpret_cast<const Vec16*>(run.places(0)[rank] + at) + unit);
      });
      if (!is_all) {
        store_vec(reinterpret_cast<Vec16*>(a.output) + unit, sum);
        continue;
      }
      for (uint32_t step = 0; step < run.ranks; ++step)
        store_vec(reinterpret_cast<Vec16*>(run.places(1)[run.peer(step)] + at) + unit, sum);
    }
  });
}

template <class R>
WEFT_DEVICE void run_places(const R& run) {
  ExchangeState& state = run.a.states[run.block.index()];
  const uint64_t meeting = state.meetings + 1;
  if (is_void(run.a.wait, load_gave_up(run.a.wait))) return;
  if (!meet(run, meeting)) {
    if (run.a.wait.gave_up) store_relaxed(run.a.wait.gave_up, uint32_t{1});
    return;
  }
  if (run.met()->all_have_places) {
    if (run.pushes())
      push(run);
    else
      pull(run);
    part(run, meeting);
  } else {
    run_stages(run);
  }
  if (run.block.rank() == 0) state.meetings = meeting;
}

}  // namespace exchange

template <class MeshT, class Shape>
WEFT_KERNEL void run_exchange(const ExchangeArgs& a, const MeshT& mesh, const Shape& shape) {
  const exchange::Run<MeshT, Shape> run{a,       mesh,        shape,
                                        Block{}, mesh.rank(), static_cast<uint32_t>(shape.ranks)};
  switch (a.way) {
    case ExchangeWay::kLines:
      return exchange::run_lines(run);
    case ExchangeWay::kPlaces:
      return exchange::run_places(run);
    case ExchangeWay::kStages:
      return exchange::run_stages(run);
  }
}

}  // namespace weft
