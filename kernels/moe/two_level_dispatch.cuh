// SPDX-License-Identifier: Apache-2.0
//
// two_level_dispatch.cuh: dispatch where ranks do not all map each other (two_level_args.h): a row goes once to each
// domain, and there to its final places.
//
// Steps: 1. All ranks say where their rows go.
//        2. Row and meta warps push what goes to this rank's own domain, as in high_throughput_dispatch.cuh.
//        3. Batch warps pack what goes to other domains into slots for rail peers there, and forward what came for this
//           one.
//        4. The last block signals the ranks of its domain and waits for theirs.
//
// Waits: step 1 for every peer's address, step 3 for slots that rail peers have read and for the messages of this
// rank's sources, step 4 for the members of the own domain, which have then forwarded everything.
//
// Cost over the network, per (token, other domain): row_bytes + 4 * (scale_words + 2 * K + 2 + widest domain) bytes, in
// whole vectors; per slot of them a put with a signal there and a signal back.
#pragma once

#include "kernels/moe/high_throughput_dispatch.cuh"
#include "kernels/moe/two_level_ring.cuh"

namespace weft {
namespace two_level {

// Thread `peer`: as dispatch::place_peers(), with no room at ranks of other domains.
template <class MeshT, class Shape>
WEFT_DEVICE void place_members(const TwoLevelDispatchArgs& a, const Rendezvous& x, Block block,
                               const MeshT& mesh, const Shape& shape, uint64_t epoch, PeerPlace* places) {
  const Domains& domains = a.domains;
  for (uint32_t peer = block.rank(); peer < mesh.ranks(); peer += block.size()) {
    places[peer] = {};
    if (domains.domain[peer] != domains.domain[mesh.rank()]) continue;
    const RendezvousRecord theirs = *rendezvous_record(x, mesh, epoch, peer);
    dispatch::place_rows(places[peer], theirs, a.base, mesh, shape, peer);
  }
  block.sync();
}

// The batches of a dispatch, as a warp sees them.
template <class MeshT, class Shape>
class DispatchBatches {
 public:
  WEFT_DEVICE DispatchBatches(const TwoLevelDispatchArgs& a, Warp warp, const MeshT& mesh, const Shape& shape,
                              uint64_t epoch, const PeerPlace* places)
      : a_(a),
        warp_(warp),
        mesh_(mesh),
        shape_(shape),
        epoch_(epoch),
        places_(places),
        layout_(forward_layout(shape.row_bytes, shape.scale_words, top_k(), a.domains.widest)),
        own_(a.domains.domain[mesh.rank()]) {}

  WEFT_DEVICE void take_turn(uint32_t batch, RingState* states, Turn& turn) {
    for (uint32_t domain = 0; domain < a_.domains.count; ++domain)
      if (domain != own_) send(batch, domain, states[domain], turn);
    for (uint32_t i = 0; i < a_.domains.source_count; ++i)
      forward(batch, i, states[a_.domains.count + i], turn);
  }

 private:
  WEFT_DEVICE uint32_t top_k() const { return static_cast<uint32_t>(shape_.top_k); }
  WEFT_DEVICE uint32_t slot_messages() const {
    return static_cast<uint32_t>(a_.at.slot_bytes / layout_.stride);
  }
  WEFT_DEVICE bool are_there(uint32_t source, uint32_t domain) const {
    return a_.routes.pairs[source * a_.domains.count + domain] != 0;
  }
  WEFT_DEVICE int32_t number_of(uint64_t token, uint32_t domain) const {
    return a_.routes.send_pair[token * a_.domains.count + domain];
  }

  // -- to a rail peer
  WEFT_DEVICE Ring ring_to(uint32_t batch, uint32_t domain) const {
    const uint64_t here = ring_number(a_.domains, domain, batch);
    const uint64_t there = ring_number(a_.domains, a_.domains.number[domain], batch);
    return {a_.domains.rail_peer(mesh_.rank(), domain), slot_at(a_.at, a_.at.domain_rings, here, 0),
            slot_at(a_.at, a_.at.source_rings, there, 0), a_.at.rows_taken + here * 8,
            a_.at.rows_sent + there * 8};
  }

  // The batch's next slot to a domain.
  WEFT_DEVICE void send(uint32_t batch, uint32_t domain, RingState& stored, Turn& turn) {
    RingState state = stored;
    if (state.is_done || !are_there(mesh_.rank(), domain)) return;
    const Ring ring = ring_to(batch, domain);
    if (!has_slot(warp_, mesh_, ring, state, epoch_, Site::kDispatchSlot, turn)) return;
    const BatchRange range = batch_range(a_.base.tokens, batch, a_.domains.batches);
    std::byte* slot = own_slot(mesh_, a_.at, ring, state.slots);
    uint32_t built = 0;
    for (; range.first + state.at < range.end; ++state.at) {
      const int32_t number = number_of(range.first + state.at, domain);
      if (number < 0) continue;
      if (built == slot_messages()) break;
      build(range.first + state.at, static_cast<uint32_t>(number), domain, slot + built * layout_.stride);
      ++built;
    }
    state.moved += built;
    state.is_done = range.first + state.at == range.end;
    send_slot(warp_, mesh_, a_.at, ring, state, epoch_, built * layout_.stride);
    keep(warp_, stored, state);
    turn.moved();
  }

  WEFT_DEVICE void build(uint64_t token, uint32_t number, uint32_t domain, std::byte* at) {
    const DispatchArgs& base = a_.base;
    copy_bytes(warp_, at, base.x + token * shape_.row_bytes, shape_.row_bytes);
    auto words = [&](uint64_t offset) { return reinterpret_cast<uint32_t*>(at + offset); };
    for (uint32_t i = warp_.rank(); i < shape_.scale_words; i += warp_.size())
      words(layout_.scales)[i] =
          base.scales[static_cast<int64_t>(token) * base.scale_token_stride + i * base.scale_word_stride];
    for (uint32_t k = warp_.rank(); k < top_k(); k += warp_.size()) {
      const int64_t expert = expert_at(base.topk_idx, base.id_bytes, token * top_k() + k);
      const bool is_one = expert >= 0 && expert < base.experts;
      words(layout_.ids)[k] = is_one ? static_cast<uint32_t>(expert) : ~0u;
      words(layout_.weights)[k] = bits_of_float(base.topk_weights[token * top_k() + k]);
    }
    const uint32_t ranks = mesh_.ranks();
    for (uint32_t i = warp_.rank(); i < a_.domains.widest; i += warp_.size()) {
      const uint32_t member = i < a_.domains.size(domain) ? a_.domains.member(domain, i) : 0;
      const int32_t row = i < a_.domains.size(domain) ? base.send_row[token * ranks + member] : -1;
      words(layout_.rows)[i] = static_cast<uint32_t>(row);
    }
    if (warp_.rank() != 0) return;
    *words(layout_.token) = static_cast<uint32_t>(token);
    *words(layout_.number) = number;
  }

  // -- from sources
  WEFT_DEVICE Ring ring_from(uint32_t batch, uint32_t i) const {
    const uint64_t here = ring_number(a_.domains, i, batch);
    const uint64_t there = ring_number(a_.domains, own_, batch);
    return {a_.domains.sources[i], slot_at(a_.at, a_.at.source_rings, here, 0), 0, a_.at.rows_sent + here * 8,
            a_.at.rows_taken + there * 8};
  }

  // Stores the messages of one slot to their places.
  WEFT_DEVICE void forward(uint32_t batch, uint32_t i, RingState& stored, Turn& turn) {
    RingState state = stored;
    const Ring ring = ring_from(batch, i);
    if (state.is_done || !are_there(ring.peer, own_)) return;
    const uint64_t word = read_word(warp_, mesh_, ring.peer, ring.own_word, epoch_);
    const auto come = static_cast<uint32_t>(word & kRingCount);
    const bool is_last = (word & kRingDone) != 0;
    if (come == state.moved && !is_last)
      return turn.waits_for({Site::kDispatchForward, ring.peer, state.moved + 1, come});
    const std::byte* slot = own_slot(mesh_, a_.at, ring, state.slots);
    const uint32_t left = come - state.moved;
    const uint32_t count = left < slot_messages() ? left : slot_messages();
    for (uint32_t m = 0; m < count; ++m) forward_message(ring.peer, slot + m * layout_.stride);
    if (count != 0 && state.moved == 0 && warp_.rank() == 0)
      a_.routes.batch_first[ring.peer * a_.domains.batches + batch] = static_cast<int32_t>(number_in(slot));
    state.moved += count;
    state.is_done = is_last && state.moved == come;
    if (state.is_done && warp_.rank() == 0)
      a_.routes.batch_count[ring.peer * a_.domains.batches + batch] = static_cast<int32_t>(come);
    if (count != 0) free_slot(warp_, mesh_, ring, state, epoch_);
    keep(warp_, stored, state);
    turn.moved();
  }

  WEFT_DEVICE uint32_t word_in(const std::byte* message, uint64_t offset) const {
    return load_relaxed(reinterpret_cast<const uint32_t*>(message + offset));
  }
  WEFT_DEVICE uint32_t number_in(const std::byte* message) const { return word_in(message, layout_.number); }

  WEFT_DEVICE void forward_message(uint32_t source, const std::byte* message) {
    const uint32_t members = a_.domains.size(own_);
    const uint64_t number =
        uint64_t{static_cast<uint32_t>(a_.routes.source_first[source])} + number_in(message);
    const bool has_room =
        number < a_.routes.most_messages;  // else a member has too few num_worst_tokens, and says so
    int32_t* record = a_.routes.records + number * record_words(a_.domains.widest, is_ordered());
    for (uint32_t i = warp_.rank(); has_room && i < a_.domains.widest; i += warp_.size())
      record[i] = static_cast<int32_t>(word_in(message, layout_.rows + i * 4));
    if (has_room && is_ordered() && top_k() != 0) order_members(message, record + a_.domains.widest);
    for (uint32_t i = 0; i < members; ++i) {
      const auto at = static_cast<int32_t>(word_in(message, layout_.rows + i * 4));
      if (at < 0) continue;
      const uint32_t member = a_.domains.member(own_, i);
      const uint64_t row =
          uint64_t{row_span(a_.base.prefix, mesh_.ranks(), source, member).first} + static_cast<uint32_t>(at);
      if (row < places_[member].capacity_rows) place(places_[member], member, row, message);
    }
  }

  // -- the order in which this rail peer adds a message's rows: by the right-most slot of each member. A dispatch
  // without ids repeats one that had them, and what that wrote stays.
  WEFT_DEVICE bool is_ordered() const { return a_.routes.own_order != nullptr; }
  WEFT_DEVICE int64_t owner_in(const std::byte* message, uint32_t k) const {
    const auto expert = static_cast<int32_t>(word_in(message, layout_.ids + k * 4));
    return expert < 0 ? -1 : static_cast<int64_t>(expert) / a_.base.experts_per_rank;
  }
  // Whether slot k is the right-most one of a member of this domain.
  WEFT_DEVICE bool is_right_most(const std::byte* message, uint32_t k) const {
    const int64_t owner = owner_in(message, k);
    if (owner < 0 || a_.domains.domain[owner] != own_) return false;
    for (uint32_t later = k + 1; later < top_k(); ++later)
      if (owner_in(message, later) == owner) return false;
    return true;
  }
  WEFT_DEVICE void order_members(const std::byte* message, int32_t* order) const {
    for (uint32_t i = warp_.rank(); i < a_.domains.widest; i += warp_.size()) order[i] = -1;
    warp_.sync();
    for (uint32_t k = warp_.rank(); k < top_k(); k += warp_.size()) {
      if (!is_right_most(message, k)) continue;
      uint32_t before = 0;
      for (uint32_t earlier = 0; earlier < k; ++earlier) before += is_right_most(message, earlier) ? 1 : 0;
      order[before] = static_cast<int32_t>(a_.domains.place[owner_in(message, k)]);
    }
  }

  WEFT_DEVICE void place(const PeerPlace& to, uint32_t member, uint64_t row, const std::byte* message) {
    copy_row_arrived(warp_, to.rows + row * shape_.row_bytes, message, shape_.row_bytes);
    copy_arrived(warp_, to.scales + row * shape_.scale_words * 4, message + layout_.scales,
                 shape_.scale_words * 4);
    const int64_t first_expert = int64_t{member} * a_.base.experts_per_rank;
    for (uint32_t k = warp_.rank(); k < top_k(); k += warp_.size()) {
      const int64_t expert =
          int64_t{static_cast<int32_t>(word_in(message, layout_.ids + k * 4))} - first_expert;
      const bool is_local = expert >= 0 && expert < a_.base.experts_per_rank;
      const uint64_t at = row * top_k() + k;
      if (a_.base.id_bytes == 8)
        reinterpret_cast<int64_t*>(to.ids)[at] = is_local ? expert : -1;
      else
        reinterpret_cast<int32_t*>(to.ids)[at] = is_local ? static_cast<int32_t>(expert) : -1;
      const float weight = float_of_bits(word_in(message, layout_.weights + k * 4));
      reinterpret_cast<float*>(to.weights)[at] = is_local || a_.base.keep_weights ? weight : 0.0f;
    }
    if (warp_.rank() != 0) return;
    reinterpret_cast<int32_t*>(to.token)[row] = static_cast<int32_t>(word_in(message, layout_.token));
    reinterpret_cast<int32_t*>(to.slot)[row] = static_cast<int32_t>(number_in(message));
  }

  const TwoLevelDispatchArgs& a_;
  const Warp warp_;
  const MeshT& mesh_;
  const Shape& shape_;
  const uint64_t epoch_;
  const PeerPlace* const places_;
  const ForwardLayout layout_;
  const uint32_t own_;
};

template <class MeshT>
WEFT_DEVICE uint64_t received_rows(const DispatchArgs& base, const MeshT& mesh) {
  return static_cast<uint32_t>(base.prefix[(mesh.ranks() - 1) * mesh.ranks() + mesh.rank()]);
}

// The last block: everything that this rank had for its domain is written there. A rank that gave up does not say so.
// More rows than there is room for are raised last, as a fault ends all waits of this rank.
template <class MeshT>
WEFT_DEVICE void meet_domain(const TwoLevelDispatchArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch) {
  const Domains& domains = a.domains;
  const uint32_t own = domains.domain[mesh.rank()];
  const bool goes_on = load_gave_up(a.base.wait) == 0;
  for (uint32_t i = warp.rank(); goes_on && i < domains.size(own); i += warp.size())
    put_word(mesh, domains.member(own, i), a.base.at.arrived_signal + mesh.rank() * 8, epoch);
  const auto* signals = reinterpret_cast<const uint64_t*>(mesh.local() + a.base.at.arrived_signal);
  if (goes_on)
    wait_peers(
        warp, mesh.ranks(), epoch, Site::kDispatchRecv, a.base.wait,
        [&](uint32_t peer) { return signals + peer; },
        [&](uint32_t peer) { return domains.domain[peer] == own; },
        [&](uint32_t peer, uint64_t seen, uint64_t waited_ns) {
          raise(a.base.wait.fault, Site::kDispatchRecv, a.base.wait.self, peer, epoch, seen, waited_ns);
        });
  if (warp.rank() != 0) return;
  advance(a.base.state);
  const uint32_t self = mesh.rank();
  const uint64_t received = received_rows(a.base, mesh), room = a.base.mine.capacity_rows;
  if (a.base.fill_tail && received > room)
    raise(a.base.wait.fault, Site::kDispatchCapacity, self, self, room, received, 0);
}

}  // namespace two_level

template <class MeshT, class Shape>
WEFT_KERNEL void two_level_dispatch(const TwoLevelDispatchArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  const DispatchArgs& base = a.base;
  const BlockSpan traced(base.wait.trace, Work::kDispatch);
  auto* flags = reinterpret_cast<uint32_t*>(block.shared());
  auto* places = reinterpret_cast<PeerPlace*>(block.shared() + 128);
  const uint64_t epoch = base.state->epoch + 1;
  const Rendezvous rendezvous = rendezvous_of(base);
  if (!dispatch::begin(base, rendezvous, block, warp, mesh, epoch, flags)) return;
  two_level::place_members(a, rendezvous, block, mesh, shape, epoch, places);
  two_level::DispatchBatches<MeshT, Shape> batches(a, warp, mesh, shape, epoch, places);
  dispatch::send_rows(base, block, warp, mesh.ranks(), shape, places);
  dispatch::send_meta(base, block, warp, mesh.ranks(), shape, places);
  two_level::serve_batches(a, block, warp, batches);
  if (base.fill_tail && two_level::received_rows(base, mesh) <= base.mine.capacity_rows)
    dispatch::fill_tail(base, block, mesh.ranks(), mesh.rank(), shape, places[mesh.rank()]);
  if (!last_block(block, &base.state->arrived, &flags[1])) return;
  if (warp.index() == 0) two_level::meet_domain(a, warp, mesh, epoch);
}

}  // namespace weft
