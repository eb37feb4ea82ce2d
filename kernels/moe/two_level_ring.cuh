// SPDX-License-Identifier: Apache-2.0
//
// two_level_ring.cuh: rings of slots between a rank and its rail peers (two_level_args.h), and the loop that serves
// them.
// A warp serves its batches in turns and waits within none of them: a rank that sends must also take, or two would wait for
// each other. All of it is called by a warp together.
// Words of a ring are only ever of the call that they name: every rank is in this call once all have exchanged
// RendezvousRecords, and so has read all slots of the call before.
#pragma once

#include "kernels/core/copy.cuh"
#include "kernels/moe/rendezvous.cuh"
#include "kernels/moe/two_level_args.h"

namespace weft {
namespace two_level {

// The reason why a batch waits, when nothing moves.
struct Missing {
  Site site;
  uint32_t peer;
  uint64_t expected;
  uint64_t seen;
};

struct Turn {
  bool has_moved = false;
  bool is_pending = false;
  Missing missing{};

  WEFT_DEVICE void waits_for(const Missing& what) {
    is_pending = true;
    missing = what;
  }
  WEFT_DEVICE void moved() { is_pending = has_moved = true; }
};

// A ring's first slot, and its words, counted in rings.
WEFT_DEVICE uint64_t ring_number(const Domains& domains, uint32_t which, uint32_t batch) {
  return uint64_t{which} * domains.batches + batch;
}
WEFT_DEVICE uint64_t slot_at(const TwoLevelOffsets& at, uint64_t rings, uint64_t ring, uint32_t slot) {
  return rings + (ring * kRailPeerSlots + slot % kRailPeerSlots) * at.slot_bytes;
}

// The count in a word, if the word is of this call; else 0. The messages or slots that it counts are visible
// afterwards.
template <class MeshT>
WEFT_DEVICE uint64_t read_word(Warp warp, const MeshT& mesh, uint32_t peer, uint64_t at, uint64_t epoch) {
  uint64_t value = 0;
  if (warp.rank() == 0) value = load_acquire(word_from(mesh, peer, at));
  value = warp.broadcast(value);
  return value >> 32 == (epoch & 0xffffffffu) ? value & 0xffffffffu : 0;
}
WEFT_DEVICE uint64_t word_of(uint64_t epoch, uint64_t value) {
  return epoch << 32 | value;
}

WEFT_DEVICE void keep(Warp warp, RingState& to, const RingState& state) {
  warp.sync();
  if (warp.rank() == 0) to = state;
  warp.sync();
}

// Where a ring's two ends stand: the slots here and there, this rank's word that the other end moves, and the other's
// that this one moves.
struct Ring {
  uint32_t peer;
  uint64_t own_slots;
  uint64_t peer_slots;
  uint64_t own_word;
  uint64_t peer_word;
};

// This rank's end of a slot: number `slots` of those that the ring has had.
template <class MeshT>
WEFT_DEVICE std::byte* own_slot(const MeshT& mesh, const TwoLevelOffsets& at, const Ring& ring,
                                uint32_t slots) {
  return mesh.local() + payload_of(mesh, ring.peer) + ring.own_slots +
         (slots % kRailPeerSlots) * at.slot_bytes;
}

// A sender's next slot: whether there is one, else what it waits for.
template <class MeshT>
WEFT_DEVICE bool has_slot(Warp warp, const MeshT& mesh, const Ring& ring, const RingState& state,
                          uint64_t epoch, Site site, Turn& turn) {
  const uint64_t taken = read_word(warp, mesh, ring.peer, ring.own_word, epoch);
  if (state.slots < taken + kRailPeerSlots) return true;
  turn.waits_for({site, ring.peer, state.slots + 1 - kRailPeerSlots, taken});
  return false;
}

// Sends `bytes` of the slot that was filled, if any, and says how many messages there were by now.
template <class MeshT>
WEFT_DEVICE void send_slot(Warp warp, const MeshT& mesh, const TwoLevelOffsets& at, const Ring& ring,
                           RingState& state, uint64_t epoch, uint64_t bytes) {
  const uint64_t value = word_of(epoch, state.moved | (state.is_done ? kRingDone : 0));
  const uint64_t slot = (state.slots % kRailPeerSlots) * at.slot_bytes;
  if (bytes != 0) {
    const int64_t payload = payload_of(mesh, ring.peer);
    mesh.to(ring.peer).put_with_signal(warp, in_part(ring.peer_slots + slot, payload),
                                       in_part(ring.own_slots + slot, payload), bytes,
                                       in_part(ring.peer_word, records_of(mesh, ring.peer)), value);
    ++state.slots;
    return;
  }
  warp.sync();
  if (warp.rank() == 0) put_word(mesh, ring.peer, ring.peer_word, value);
}

// Tells the sender that a slot was read.
template <class MeshT>
WEFT_DEVICE void free_slot(Warp warp, const MeshT& mesh, const Ring& ring, RingState& state, uint64_t epoch) {
  ++state.slots;
  warp.sync();
  if (warp.rank() == 0) put_word(mesh, ring.peer, ring.peer_word, word_of(epoch, state.slots));
}

struct BatchRange {
  uint32_t first;
  uint32_t end;
};
WEFT_DEVICE BatchRange batch_range(uint64_t tokens, uint32_t batch, uint32_t batches) {
  return {static_cast<uint32_t>(tokens * batch / batches),
          static_cast<uint32_t>(tokens * (batch + 1) / batches)};
}

// A warp's batches. batches.take_turn(batch, states, turn) moves what it can without waiting; states are [domains +
// sources], zero at first. Returns whether all has moved; else has raised what it waited for.
template <class Args, class Batches>
WEFT_DEVICE bool serve_batches(const Args& a, Block block, Warp warp, Batches& batches) {
  const Domains& domains = a.domains;
  const WarpRange role = a.batch_warps;
  const WaitRule& rule = a.base.wait;
  std::byte* shared = block.shared() + a.states_at;
  const Share share = share_of(block, warp, role);
  if (!share.active) return true;
  const uint32_t rings = domains.count + domains.source_count;
  const uint32_t own_batches = batches_per_warp(domains.batches, share.total);
  auto* states = reinterpret_cast<RingState*>(shared) + (warp.index() - role.first) * own_batches * rings;
  for (uint32_t i = warp.rank(); i < own_batches * rings; i += warp.size()) states[i] = {};
  warp.sync();
  Patience patience{rule};
  for (uint32_t looks = 0;; ++looks) {
    Turn turn;
    for (uint32_t i = 0; share.index + i * share.total < domains.batches; ++i)
      batches.take_turn(static_cast<uint32_t>(share.index + i * share.total), states + i * rings, turn);
    if (!turn.is_pending) return true;
    if (turn.has_moved) {
      looks = 0;
      patience.since_ns = 0;
    }
    pause(looks);
    if (turn.has_moved || !is_check_due(looks) || !warp.any(patience.ends(looks))) continue;
    if (warp.rank() == 0)
      raise(rule.fault, turn.missing.site, rule.self, turn.missing.peer, turn.missing.expected,
            turn.missing.seen, patience.waited_ns);
    return false;
  }
}

// Copies what the network or a peer wrote; places and bytes are multiples of 4, or of 16.
WEFT_DEVICE void copy_arrived(Warp warp, void* dst, const void* src, uint64_t bytes) {
  if (warp.size() == 1 && copy_by_thread(dst, src, bytes)) return;
  const uint64_t bits = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | bytes;
  if (bits % 16 != 0) {
    for (uint64_t i = warp.rank(); i < bytes / 4; i += warp.size())
      static_cast<uint32_t*>(dst)[i] = load_relaxed(static_cast<const uint32_t*>(src) + i);
    return;
  }
  for (uint64_t i = warp.rank(); i < bytes / 16; i += warp.size())
    store_vec(static_cast<Vec16*>(dst) + i, load_vec_fresh(static_cast<const Vec16*>(src) + i));
}

// The same of a row that goes to where it is read after the call.
WEFT_DEVICE void copy_row_arrived(Warp warp, void* dst, const void* src, uint64_t bytes) {
  if (warp.size() == 1 && copy_past_caches(dst, src, bytes)) return;
  copy_arrived(warp, dst, src, bytes);
}

}  // namespace two_level
}  // namespace weft
