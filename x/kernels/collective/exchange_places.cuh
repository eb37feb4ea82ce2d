// SPDX-License-Identifier: Apache-2.0
//
// exchange_places.cuh: an exchange in place. run_places() learns where all ranks' buffers are and moves data
// straight between them; where some buffer is in no window, all ranks go by stages instead.
#pragma once

#include "kernels/collective/exchange_stages.cuh"

namespace weft {

namespace exchange {

// The buffer that a peer's descriptor names; false where it is in a window that this rank no longer has.
template <class R>
WEFT_DEVICE bool read_descriptor(const R& run, uint64_t descriptor, uint32_t peer, uint32_t which,
                                 std::byte*& place) {
  const ExchangeArgs& a = run.a;
  const uint64_t window = descriptor >> kDescriptorOffsetBits & ((1u << kDescriptorWindowBits) - 1);
  const uint64_t offset = (descriptor & ((uint64_t{1} << kDescriptorOffsetBits) - 1)) * 16;
  place = nullptr;
  if (window == 0) return true;
  // Mostly the peer's buffer is in the same window as this rank's.
  const bool is_same = window == (a.places[which] >> kDescriptorOffsetBits);
  std::byte* const* bases = is_same ? a.own_windows[which] : a.windows[window - 1];
  if (!bases) {
    raise(a.wait.fault, Site::kPeerWindow, a.wait.self, peer, window - 1, 0, 0, run.block.index() << 16);
    return false;
  }
  place = bases[peer] + offset;
  return true;
}

// Exchanges descriptors with every peer's block. Afterwards places() holds every rank's buffers, all peers have
// started the call, and met() says whether all buffers have places. False: a peer did not come; who comes
// now finds no descriptor of this block.
template <class R>
WEFT_DEVICE bool meet(const R& run, uint64_t meeting) {
  const ExchangeArgs& a = run.a;
  const ExchangeLayout& layout = a.layout;
  const uint64_t descriptors = layout.descriptors_at + ((meeting & 1) * layout.blocks + run.block.index()) *
                                                           run.ranks * 2 * sizeof(uint64_t);
  auto mark_of = [&](uint32_t which) {
    const uint64_t half = which == 0 ? a.digest & 0xffff : a.digest >> 16;
    return half << 48 | (meeting & ((1u << kDescriptorMeetingBits) - 1)) << kDescriptorMarkAt;
  };
  auto descriptor_at = [&](uint32_t i) {  // of which a rank has two at every peer
    return reinterpret_cast<uint64_t*>(run.mesh.to(i / 2).mapped() + descriptors) + run.self * 2 + i % 2;
  };
  for (uint32_t i = run.block.rank(); i < 2 * run.ranks; i += run.block.size())
    store_release(descriptor_at(i), a.places[i % 2] | mark_of(i % 2));
  if (run.block.rank() == 0) *run.met() = {1, 1, {}};
  run.block.sync();
  PeerPatience patience{{a.wait}, run.block.index()};
  for (uint32_t i = run.block.rank(); i < 2 * run.ranks; i += run.block.size()) {
    const uint32_t peer = i / 2, which = i % 2;
    const auto* here = reinterpret_cast<const uint64_t*>(run.mesh.local() + descriptors) + i;
    uint64_t descriptor = load_acquire(here);
    bool came = true;
    for (uint32_t looks = 0; (descriptor ^ mark_of(which)) >> kDescriptorMarkAt != 0 && came; ++looks) {
      came = !patience.ends(looks, peer, meeting, meeting - 1);
      descriptor = load_acquire(here);
    }
    std::byte* place = nullptr;
    if (!came || !read_descriptor(run, descriptor, peer, which, place))
      store_release_block(&run.met()->all_came, 0);
    if (!place && run.needs(which)) store_release_block(&run.met()->all_have_places, 0);
    run.places(which)[peer] = place;
  }
  run.block.sync();
  if (run.met()->all_came != 0) return true;
  for (uint32_t i = run.block.rank(); i < 2 * run.ranks; i += run.block.size())
    store_release(descriptor_at(i), ~mark_of(i % 2));
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

}  // namespace weft
