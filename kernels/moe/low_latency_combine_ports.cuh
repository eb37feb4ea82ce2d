// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_ports.cuh: delivers a combine where ranks have port peers (low_latency_ports.h). Every rank tells
// every peer in a note where the peer's replies to each of its batches begin, with the weights of its tokens. Replies to
// a mapped owner are built there; those to a port peer in the outbox, from which they leave in one range for each batch,
// or in more where the outbox is small (low_latency_combine_answer_ports.cuh).
// Waits: where the outbox is small, for earlier puts out of it.
#pragma once

#include "kernels/moe/low_latency_combine_call.cuh"

namespace weft {
namespace low_latency {

// The rank that sends a reply for slot k of a token, for itself or its node; R: none does. One thread.
template <class C>
WEFT_DEVICE uint32_t replying_rank(const C& c, uint32_t token, uint32_t k) {
  const auto rank_of = [&](uint32_t slot) {
    const int64_t expert = c.sent_expert(token, slot);
    return expert < 0
               ? c.ranks()
               : c.replier(static_cast<uint32_t>(expert) / static_cast<uint32_t>(c.shape.experts_per_rank));
  };
  const uint32_t rank = rank_of(k);
  bool is_own = true;
  WEFT_ROLLED
  for (uint32_t earlier = 0; is_own && is_reduced(c.shape.reply) && earlier < k; ++earlier)
    is_own = rank_of(earlier) != rank;
  return is_own ? rank : c.ranks();
}

// Gives the replies of a rank, or of those that it sends for, to this rank's batch their places, and returns the first.
// Notes them by slot, in the sender's turn. The warp.
template <class C>
WEFT_DEVICE uint32_t place_replies(const C& c, uint32_t batch, uint32_t peer) {
  const uint32_t rank = c.replier(peer);
  const uint32_t share = c.a.call.batch_tokens.value, tokens = c.a.call.tokens;
  const uint32_t begin = batch * share < tokens ? batch * share : tokens;
  const uint32_t end = begin + share < tokens ? begin + share : tokens;
  const uint32_t last = end * c.top_k();
  const auto rank_of_reply = [&](uint32_t slot) {
    return slot < last ? replying_rank(c, slot / c.top_k(), slot % c.top_k()) : c.ranks();
  };
  uint32_t first = batch * c.port_layout().batch_replies;
  if (c.keeps_own(rank)) {
    first = batch * c.port_layout().batch_answers;
  } else {
    WEFT_ROLLED
    for (uint32_t i = begin * c.top_k(); i < last; i += c.warp.size())
      first += c.warp.count(rank_of_reply(i + c.warp.rank()) < rank);
  }
  uint32_t next = first;
  WEFT_ROLLED
  for (uint32_t i = begin * c.top_k(); i < last; i += c.warp.size()) {
    const bool is_its = rank_of_reply(i + c.warp.rank()) == rank;
    const uint32_t place = next + c.warp.count_below(is_its);
    next += c.warp.count(is_its);
    if (is_its && peer == rank) store_relaxed(c.places() + i + c.warp.rank(), place);
  }
  return first;
}

// The weights of this rank's tokens, as they stand in a note. The block.
template <class C>
WEFT_DEVICE void write_weights(const C& c, std::byte* at) {
  const uint32_t vecs = c.weight_vecs();
  WEFT_ROLLED
  for (uint32_t i = c.block.rank(); i < c.a.call.tokens * vecs; i += c.block.size()) {
    store_vec(reinterpret_cast<Vec16*>(at) + i, c.weight_vec(i / vecs, i % vecs * 4));
  }
}

// Peers are dealt over the blocks. The places of a rank's replies are noted before that rank gets its note, so whoever
// sees an answer of it sees them.
template <class C>
WEFT_DEVICE void send_notes(const C& c) {
  const NoteLayout note = c.port_layout().note;
  const uint64_t bytes = note.weights + (c.takes_own_weights() ? c.a.call.tokens * note.weights_stride : 0);
  WEFT_ROLLED
  for (uint32_t peer = c.block.count() - 1 - c.block.index(); peer < c.ranks(); peer += c.block.count()) {
    if (c.present()[peer] == 0) continue;
    const auto outgoing = c.note_to(peer);
    std::byte* at = outgoing.at();
    WEFT_ROLLED
    for (uint32_t batch = c.warp.index(); batch < c.batches().count; batch += c.block.warps()) {
      const uint32_t first = place_replies(c, batch, peer);
      if (c.warp.rank() == 0) store_relaxed(reinterpret_cast<uint32_t*>(at) + batch, first);
    }
    if (c.block.rank() == 0)
      store_relaxed(reinterpret_cast<uint32_t*>(at + note.share), c.a.call.batch_tokens.value);
    if (c.takes_own_weights() && !c.keeps_own(peer)) write_weights(c, at + note.weights);
    c.block.sync();
    if (c.block.rank() == 0) {
      outgoing.put(OneThread{}, bytes);
      send_handshake(c.a.call, c.mesh, c.epoch, peer, c.dispatch_epoch());
    }
    c.block.sync();
  }
}

// This rank's replies to one batch of an owner whose note has come: built in the outbox for a port peer, else where they
// are read. The warp.
template <class C>
class PortReplies {
 public:
  WEFT_DEVICE PortReplies(const C& c, uint32_t owner, uint32_t batch)
      : c_(c), owner_(owner), batch_(batch), near_(near_place()) {}

  // Where reply `number` is built, if all to the batch fit.
  WEFT_DEVICE std::byte* at(uint32_t number) const {
    return (near_ ? near_ : c_.mesh.local() + payload() + outbox_at()) + number * stride();
  }
  // Where the next one is built. Where the outbox is full, those before it leave first.
  WEFT_DEVICE std::byte* place(const Message&, uint32_t, const uint32_t*) {
    if (!near_ && built_ - sent_ == c_.a.answer_room) {
      c_.mesh.to(owner_).put(c_.warp, in_part(reply_at(sent_), payload()), in_part(outbox_at(), payload()),
                             (built_ - sent_) * stride());
      if (c_.warp.rank() == 0) c_.mesh.to(owner_).flush();
      c_.warp.sync();
      sent_ = built_;
    }
    ++built_;
    return at(built_ - 1 - sent_);
  }
  // A message has no row that is known here: its owner has a place for a reply all the same.
  WEFT_DEVICE void leave_out() {
    if (is_reduced(c_.shape.reply)) place({}, 0, nullptr);
  }
  WEFT_DEVICE void finish(const Message&, uint32_t messages) { send(built_, messages); }
  // Sends those of the `built` replies that have not left, and the batch's word behind them.
  WEFT_DEVICE void send(uint32_t built, uint32_t messages) {
    const uint64_t word = word_offset(c_.a.call, c_.ranks(), c_.epoch, c_.mesh.rank(), batch_);
    const uint64_t value = c_.epoch.number * kWordEpoch | kWordDone | messages;
    if (!near_ && built != sent_)
      return c_.mesh.to(owner_).put_with_signal(c_.warp, in_part(reply_at(sent_), payload()),
                                                in_part(outbox_at(), payload()), (built - sent_) * stride(),
                                                in_part(word, port_places(c_.mesh).records), value);
    c_.warp.sync();
    if (c_.warp.rank() == 0) put_control(c_.a.call, c_.mesh, owner_, word, value);
  }

 private:
  WEFT_DEVICE std::byte* near_place() const {
    if (c_.keeps_own(owner_))
      return c_.own_half() + c_.own_layout().replies + batch_ * c_.port_layout().batch_answers * stride();
    std::byte* window = near_window(c_.mesh, owner_);
    return window ? window + reply_at(0) : nullptr;
  }
  WEFT_DEVICE uint64_t stride() const { return c_.port_layout().stride; }
  WEFT_DEVICE int64_t payload() const { return port_places(c_.mesh).payload; }
  // Where the owner wants a reply.
  WEFT_DEVICE uint64_t reply_at(uint32_t number) const {
    const auto* firsts = reinterpret_cast<const uint32_t*>(c_.note_from(owner_));
    return c_.port_reply_at(load_relaxed(firsts + batch_) + number);
  }
  WEFT_DEVICE uint64_t outbox_at() const {
    const uint64_t outbox = outbox_offset(c_.a.call, c_.shape.ranks, c_.epoch);
    if (c_.is_carried(owner_))
      return outbox + c_.node_layout().answers + c_.carried_at(owner_, batch_) * stride();
    const uint64_t slot = (uint64_t{owner_} * c_.batches().count + batch_) * c_.a.answer_room;
    return outbox + c_.port_layout().answers + slot * stride();
  }

  const C& c_;
  const uint32_t owner_, batch_;
  std::byte* const near_;
  uint32_t built_ = 0, sent_ = 0;
};

}  // namespace low_latency
}  // namespace weft
