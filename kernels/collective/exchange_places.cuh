// SPDX-License-Identifier: Apache-2.0
//
// exchange_places.cuh: an exchange in place. run_places() learns where all ranks' buffers are and moves data
// straight between them; where some buffer is in no window, all ranks go by stages instead.
#pragma once

#include "kernels/collective/exchange_push.cuh"

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
// started the call, and met() says whether all buffers have places. False: a peer did not come; a peer that
// comes later finds no descriptor of this block.
template <class R>
WEFT_DEVICE bool meet(const R& run, uint64_t rendezvous) {
  const ExchangeArgs& a = run.a;
  const ExchangeLayout& layout = a.layout;
  const uint64_t descriptors =
      layout.descriptors_at +
      ((rendezvous & 1) * layout.blocks + run.block.index()) * run.ranks * 2 * sizeof(uint64_t);
  auto mark_of = [&](uint32_t which) {
    const uint64_t half = which == 0 ? a.digest & 0xffff : a.digest >> 16;
    return half << 48 | (rendezvous & ((1u << kDescriptorRendezvousBits) - 1)) << kDescriptorMarkAt;
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
      came = !patience.ends(looks, peer, rendezvous, rendezvous - 1);
      descriptor = load_acquire(here);
    }
    std::byte* place = nullptr;
    if (!came || !read_descriptor(run, descriptor, peer, which, place))
      store_release_block(&run.met()->all_came, 0);
    if (!place && run.needs(which, peer)) store_release_block(&run.met()->all_have_places, 0);
    run.places(which)[peer] = place;
  }
  run.block.sync();
  if (run.met()->all_came != 0) return true;
  for (uint32_t i = run.block.rank(); i < 2 * run.ranks; i += run.block.size())
    store_release(descriptor_at(i), ~mark_of(i % 2));
  return false;
}

// Tells every peer's block that this one is done with its buffers, and waits for all of them. A block that
// waits in vain takes its "done" back: its caller owns the input again, and a peer that still reads it must
// not use what it reads.
template <class R>
WEFT_DEVICE void part(const R& run, uint64_t rendezvous) {
  const ExchangeArgs& a = run.a;
  const uint64_t done = a.layout.done_at + uint64_t{run.block.index()} * run.ranks * sizeof(uint64_t);
  run.block.sync();
  for (uint32_t peer = run.block.rank(); peer < run.ranks; peer += run.block.size())
    run.mesh.to(peer).put_value(done + run.self * sizeof(uint64_t), rendezvous);
  PeerPatience patience{{a.wait}, run.block.index()};
  for (uint32_t peer = run.block.rank(); peer < run.ranks; peer += run.block.size()) {
    const auto* signal = reinterpret_cast<const uint64_t*>(run.mesh.local() + done) + peer;
    uint64_t seen = load_acquire(signal);
    for (uint32_t looks = 0; seen < rendezvous; ++looks) {
      if (patience.ends(looks, peer, rendezvous, seen)) {
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

// This rank's part of the sum: to its own output, to the root's, or to all.
template <class R>
WEFT_DEVICE void pull(const R& run) {
  const ExchangeArgs& a = run.a;
  const uint64_t share_units = share_units_of(a.bytes, run.owners()), share = run.share(run.self);
  const uint64_t share_bytes = share_of_buffer(nullptr, a.bytes, share_units, share).bytes;
  const uint64_t at = has_shares(run.kind()) ? share * share_units * 16 : run.self * a.bytes;
  const uint64_t units = (has_shares(run.kind()) ? share_bytes : a.bytes) / 16;
  const uint64_t threads = uint64_t{run.block.count()} * run.block.size();
  with_combiner(run.shape, [&](auto combiner) {
    for (uint64_t unit = uint64_t{run.block.index()} * run.block.size() + run.block.rank(); unit < units;
         unit += threads) {
      const Vec16 sum = sum_of<decltype(combiner)>(run, [&](uint32_t rank) {
        return load_vec_streaming(reinterpret_cast<const Vec16*>(run.places(0)[rank] + at) + unit);
      });
      auto store_at = [&](uint32_t rank) {
        store_vec(reinterpret_cast<Vec16*>(run.places(1)[rank] + at) + unit, sum);
      };
      if (run.kind() == Exchange::kReduceScatter)
        store_vec(reinterpret_cast<Vec16*>(a.output) + unit, sum);
      else if (run.kind() == Exchange::kReduce)
        store_at(a.root);
      else
        for (uint32_t step = 0; step < run.ranks; ++step) store_at(run.peer(step));
    }
  });
}

template <class R>
WEFT_DEVICE void run_places(const R& run) {
  ExchangeState& state = run.a.states[run.block.index()];
  const uint64_t rendezvous = state.rendezvous_done + 1;
  if (is_void(run.a.wait, load_gave_up(run.a.wait))) return;
  if (!meet(run, rendezvous)) {
    if (run.a.wait.gave_up) store_relaxed(run.a.wait.gave_up, uint32_t{1});
    return;
  }
  if (run.met()->all_have_places) {
    if (run.adds())
      pull(run);
    else if (run.kind() == Exchange::kBroadcast)
      spread(run);
    else
      push(run);
    part(run, rendezvous);
  } else {
    run_stages(run);
  }
  if (run.block.rank() == 0) state.rendezvous_done = rendezvous;
}

}  // namespace exchange

}  // namespace weft
