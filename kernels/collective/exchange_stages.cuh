// SPDX-License-Identifier: Apache-2.0
//
// exchange_stages.cuh: an exchange by stages. run_stages() moves slices through staging areas of the
// receivers' windows, with a signal for each slice, and counts its signals in the state of the block.
#pragma once

#include "kernels/collective/exchange_lines.cuh"

namespace weft {

namespace exchange {

// The staging area of one sender and slice in a block's part of a window, kStageAreas of them by turns.
// Where shares go on, slices are half as large: the second half of an area is for sums, or what a broadcast sent.
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
  // Whether a peer has filled this slice, of this call. A peer in a later call has finished this one, so its
  // digest was the same. No peer is more than kSlicesShown slices ahead.
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

// The parts of this rank's buffers that belong to a peer: what is sent to it, and where its data is stored.
template <class R>
struct Parts {
  const R& run;
  uint64_t share_units;  // where the buffer has shares

  WEFT_DEVICE Piece input_for(uint32_t peer) const {
    const ExchangeArgs& a = run.a;
    if (has_shares(run.kind())) return share_of_buffer(a.input, a.bytes, share_units, run.share(peer));
    const bool is_full = run.kind() == Exchange::kAllGather || run.kind() == Exchange::kGather;
    return is_full ? Piece{a.input, a.bytes} : part_of(a.input, a.bytes, peer);
  }
  WEFT_DEVICE Piece output_of(uint32_t peer) const {
    const ExchangeArgs& a = run.a;
    if (has_shares(run.kind())) return share_of_buffer(a.output, a.bytes, share_units, run.share(peer));
    const bool is_full = run.kind() == Exchange::kReduceScatter || run.kind() == Exchange::kScatter;
    return is_full ? Piece{a.output, a.bytes} : part_of(a.output, a.bytes, peer);
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
    const auto whole = static_cast<uint32_t>(message::full_units(own, slice.count));
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
    if (!run.sends(run.self, peer)) continue;
    copy_units(run.block, slice.count, sliced(parts.input_for(peer), slice),
               units_of(stage.to(peer), slice.count));
  }
}

// The part of a slice that stays on this rank: its own part, or all that a root broadcasts.
template <class R>
WEFT_DEVICE void keep_own(const R& run, const Parts<R>& parts, Slice slice) {
  if (run.adds() || !run.sends(run.self, run.self)) return;
  if (run.has_parts()) return copy_own(run, slice, parts.input_for(run.self), parts.output_of(run.self));
  for (uint32_t step = 1; step < run.ranks; ++step)
    copy_own(run, slice, parts.input_for(run.peer(step)), parts.output_of(run.peer(step)));
}

// Keeps what peers have put into their areas: what they sent at first, or what goes on.
template <class R>
WEFT_DEVICE void empty_stages(const Stage<R>& stage, const Parts<R>& parts, Slice slice, bool is_on) {
  const R& run = stage.run;
  const uint32_t at = is_on ? stage.sums_at() : 0;
  for (uint32_t step = 1; step < run.ranks; ++step) {
    const uint32_t peer = run.peer(step);
    if (!(is_on ? run.sends_on(peer, run.self) : run.sends(peer, run.self))) continue;
    copy_units(run.block, slice.count, units_of(stage.from(peer) + at, slice.count),
               sliced(parts.output_of(peer), slice));
  }
}

// Makes this rank's share from the areas of its peers, and calls then(unit, value). In a broadcast the value
// is the root's; else it is the sum with this rank's own data, which is stored where the rank has an output.
template <class R, class Then>
WEFT_DEVICE void make_share(const Stage<R>& stage, const Parts<R>& parts, Slice slice, Then then) {
  const R& run = stage.run;
  const Piece own = parts.input_for(run.self), into = parts.output_of(run.self);
  if (has_shares(run.kind()) && !run.owns(run.self)) return;
  if (run.kind() == Exchange::kBroadcast) {
    const Vec16* area = stage.from(run.a.root);
    for (uint32_t unit = run.block.rank(); unit < slice.count; unit += run.block.size()) {
      const Vec16 value = load_vec(area + unit);
      store_unit(into, slice.first + unit, value);
      then(unit, value);
    }
    return;
  }
  const bool keeps = run.kind() != Exchange::kReduce || run.is_root();
  const Vec16* areas = stage.from(0);
  const uint64_t stride = uint64_t{run.a.layout.blocks} * run.a.layout.stage_units;
  with_combiner(run.shape, [&](auto combiner) {
    for (uint32_t unit = run.block.rank(); unit < slice.count; unit += run.block.size()) {
      const Vec16 mine = load_unit(own, slice.first + unit);
      const Vec16 sum = sum_of<decltype(combiner)>(run, [&](uint32_t rank) {
        return rank == run.self ? mine : load_vec(areas + rank * stride + unit);
      });
      if (keeps) store_unit(into, slice.first + unit, sum);
      then(unit, sum);
    }
  });
}

// Slices of a block, one after the other; slice i is filled while slice i - 1 is emptied. Signal number n
// says that the slice of its turn is filled (where shares go on: and those of the one before). A rank that fills
// the areas of number n has seen the signals n - 2 of all peers, each of which had emptied n - 4 before. A rank
// that gives up fills and signals nothing more.
template <class R>
WEFT_DEVICE void run_stages(const R& run) {
  const ExchangeArgs& a = run.a;
  const bool goes_on = run.goes_on();
  const Parts<R> parts{run, share_units_of(a.bytes, run.owners())};
  const uint64_t units = has_shares(run.kind()) ? parts.share_units : (a.bytes + 15) / 16;
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
  const uint64_t signals = turns + (goes_on ? 1 : 0);
  for (uint64_t turn = 0; turn <= signals; ++turn) {
    const Stage<R> stage{run, first_number + turn}, before{run, first_number + turn - 1};
    if (turn < turns) {
      fill_stages(stage, parts, slice_of(turn));
      keep_own(run, parts, slice_of(turn));
    }
    if (goes_on && turn > 0 && !before.wait()) break;
    if (goes_on && turn > 0 && turn <= turns)
      make_share(before, parts, slice_of(turn - 1), [&](uint32_t unit, const Vec16& value) {
        for (uint32_t step = 1; step < run.ranks; ++step)
          if (run.sends_on(run.self, run.peer(step)))
            store_vec(stage.to(run.peer(step)) + stage.sums_at() + unit, value);
      });
    if (turn < signals) stage.publish(turn);
    if (goes_on) {
      if (turn > 1) empty_stages(before, parts, slice_of(turn - 2), true);
    } else if (turn > 0) {
      if (!before.wait()) break;
      if (run.has_parts())
        empty_stages(before, parts, slice_of(turn - 1), false);
      else
        make_share(before, parts, slice_of(turn - 1), [](uint32_t, const Vec16&) {});
    }
  }
  run.block.sync();
  if (run.block.rank() == 0) state.stages += signals;
}

}  // namespace exchange

}  // namespace weft
