// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_ports.cuh: delivers a combine where ranks have port peers (low_latency_ports.h).
// Every rank tells every peer in a note where the peer's replies to each of its batches begin, with the weights of its
// tokens. Replies to a mapped owner are built there; those to a port peer in the outbox. A block answers a batch: its warps
// build parts of the replies, and one of them sends all as one range, the batch's word behind it. Where the outbox has no
// room for all replies to a batch, one warp builds and sends as many as there is room for, one after the other
// (answer_batch()).
//
// Where a sum of a domain's replies to a token crosses the network once:
//   1 Replies to owners of this domain go there. Those to any other owner go to its rail peer here: each token's row to
//     its place in the rail peer's outbox, then, for each batch, which tokens have rows, and a word.
//   2 The rail peer waits for these words of all ranks of its domain. It sums a token's rows, its own with them, and
//     sends all sums of a batch as one range, the batch's word behind it.
// Sums:    a rank's row is rounded as a reply is. The rail peer adds rows in float32, in the order of the token's slots
//          that they are the first of, and rounds once.
// Waits:   for the owner's note; where the outbox is small, for earlier puts out of it; step 2 for step 1 of the domain's other
//          ranks. A block does all its step 1 before any step 2, so no two ranks wait for each other.
#pragma once

#include "kernels/moe/low_latency_combine_call.cuh"
#include "kernels/moe/low_latency_combine_receive.cuh"
#include "kernels/moe/low_latency_combine_send.cuh"

namespace weft {
namespace low_latency {

// The rank that sends a reply for slot k of a token, for itself or its domain; R: none does. One thread.
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
    if (c_.goes_by_rail(owner_))
      return outbox + c_.domain_layout().answers + c_.source_at(owner_, batch_) * stride();
    const uint64_t slot = (uint64_t{owner_} * c_.batches().count + batch_) * c_.a.answer_room;
    return outbox + c_.port_layout().answers + slot * stride();
  }

  const C& c_;
  const uint32_t owner_, batch_;
  std::byte* const near_;
  uint32_t built_ = 0, sent_ = 0;
};

// ---- a block answers a batch

// Replies to the batch's messages before `index`. The warp.
template <class C>
WEFT_DEVICE uint32_t replies_before(const C& c, const int32_t* records, uint32_t index) {
  if (is_reduced(c.shape.reply)) return index;
  const auto words = static_cast<uint32_t>(c.routes().record_words);
  uint32_t count = 0;
  for (uint32_t i = c.warp.rank(); i < index * c.top_k(); i += c.warp.size())
    count += records[i / c.top_k() * words + 1 + i % c.top_k()] >= 0 ? 1 : 0;
  return c.warp.sum(count);
}

// Replies to one message, from the first one's place on.
struct SideBySide {
  std::byte* next;
  uint64_t stride;

  WEFT_DEVICE std::byte* place(const Message&, uint32_t, const uint32_t*) {
    std::byte* at = next;
    next += stride;
    return at;
  }
};

// A part of the replies to one message. False: the owner is not there, or its rows are not. The warp.
template <class C>
WEFT_DEVICE bool answer_message(const C& c, const Message& m, std::byte* first) {
  const uint32_t count = list_rows(c, [&](uint32_t k) { return m.record[1 + k]; });
  if (c.a.signals && !await_rows(c, m.record)) return false;
  if (count == 0) return true;
  if (!c.a.signals) prefetch_rows(c, m.piece, count);
  SideBySide replies{first, c.port_layout().stride};
  const auto has_agreed = [] { return true; };
  const bool is_made = is_reduced(c.shape.reply) ? answer_reduced(c, m, count, has_agreed, replies)
                                                 : answer_exact(c, m, has_agreed, replies);
  c.warp.sync();
  return is_made;
}

// The messages of a batch that this rank has rows for.
struct Answered {
  uint32_t owner;
  uint32_t batch;
  uint32_t messages;
  const int32_t* records;
};
template <class C>
WEFT_DEVICE Answered answered(const C& c, uint32_t owner, uint32_t batch) {
  const RoutesLayout routes = c.routes();
  const uint32_t batch_at = owner * c.batches().count + batch;
  return {owner, batch, static_cast<uint32_t>(c.a.routes[routes.counts + batch_at]) & kMaxBatchTokens,
          c.a.routes + routes.records + batch_at * c.batches().capacity * routes.record_words};
}

// Builds the replies to a batch: those to message `index`, whose record is given, from place_of(index, record) on. False, in
// some warp: not all could be made. The block.
template <class C, class PlaceOf>
WEFT_DEVICE bool build_replies(const C& c, const Answered& of, PlaceOf place_of) {
  const auto words = static_cast<uint32_t>(c.routes().record_words);
  bool is_made = true;
  WEFT_ROLLED
  for (uint32_t unit = c.warp.index(); is_made && unit < of.messages * c.reply_parts().value;
       unit += c.block.warps()) {
    const uint32_t index = unit / c.reply_parts();
    const Message m{of.records + index * words, of.owner, unit % c.reply_parts(), 0, false};
    if (index + 1 < of.messages) ask_ahead(c, {m.record + words, of.owner, m.piece, 0, false});
    is_made = answer_message(c, m, place_of(index, m.record));
  }
  return is_made;
}

// Whether all of the block's warps could do their part of a batch; what they have written is there. The block.
template <class C>
WEFT_DEVICE bool all_made(const C& c, bool is_made) {
  if (!is_made && c.warp.rank() == 0) *c.unanswered() = 1;
  c.block.sync();
  return *c.unanswered() == 0;
}
// Before that, when all have read what became of the batch before.
template <class C>
WEFT_DEVICE void begin_batch(const C& c) {
  c.block.sync();
  if (c.block.rank() == 0) *c.unanswered() = 0;
  c.block.sync();
}

// ---- a sum of a domain crosses once

// An entry of gathered() for a token: the first of its slots that a rank has a row for, plus one; 0: no message;
// top_k + 1: a message without rows. For this rank's own messages the bits above kSlotBits hold the message's
// number.
inline constexpr uint32_t kSlotBits = 16;
WEFT_DEVICE constexpr uint32_t slot_noted(uint32_t noted) {
  return noted & ((uint32_t{1} << kSlotBits) - 1);
}

// The replies of this domain's ranks to a batch of another domain's rank, in the window of its rail peer.
template <class C>
struct DomainBatch {
  const C& c;
  uint32_t owner;
  uint32_t batch;
  uint32_t first_token;  // of the batch: its owner says so

  WEFT_DEVICE uint32_t rail_peer() const { return c.rail(kRailPeerFrom, owner); }
  WEFT_DEVICE uint32_t own_place() const { return c.rail(kPlaceInDomain, c.mesh.rank()); }
  WEFT_DEVICE uint32_t index_of(const int32_t* record) const {
    return static_cast<uint32_t>(record[0]) - first_token;
  }
  // Rows and slots, from the first token's on, of the rank of a place in the domain: not of the rail peer.
  WEFT_DEVICE std::byte* rows(uint32_t place) const {
    return outbox() + c.domain_layout().rows + first_of(place) * c.port_layout().stride;
  }
  WEFT_DEVICE uint32_t* slots(uint32_t place) const {
    return reinterpret_cast<uint32_t*>(outbox() + c.domain_layout().slots) + first_of(place);
  }
  WEFT_DEVICE uint64_t word(uint32_t place) const {
    return word_offset(c.a.call, c.ranks(), c.epoch, owner, domain_word(c.batches(), place, batch));
  }

 private:
  WEFT_DEVICE std::byte* outbox() const {
    return near_window(c.mesh, rail_peer()) + outbox_offset(c.a.call, c.shape.ranks, c.epoch);
  }
  WEFT_DEVICE uint64_t first_of(uint32_t place) const {
    const uint32_t others_place = place - (place > c.rail(kPlaceInDomain, rail_peer()) ? 1 : 0);
    return c.source_at(owner, batch) * (c.a.domain_ranks - 1) + uint64_t{others_place} * c.batches().capacity;
  }
};

// After the owner's note has come.
template <class C>
WEFT_DEVICE DomainBatch<C> domain_batch(const C& c, uint32_t owner, uint32_t batch) {
  const std::byte* share = c.note_from(owner) + c.port_layout().note.share;
  return {c, owner, batch, batch * load_relaxed(reinterpret_cast<const uint32_t*>(share))};
}

// Notes in gathered() which tokens of a batch this rank has messages for. The block, which synchronises afterwards.
template <class C>
WEFT_DEVICE void note_messages(const C& c, const DomainBatch<C>& domain, const Answered& of) {
  const auto words = static_cast<uint32_t>(c.routes().record_words);
  uint32_t* noted = c.gathered(domain.own_place());
  WEFT_ROLLED
  for (uint32_t index = c.block.rank(); index < of.messages; index += c.block.size()) {
    const int32_t* record = of.records + index * words;
    uint32_t slot = 0;
    while (slot < c.top_k() && record[1 + slot] < 0) ++slot;
    noted[domain.index_of(record)] = index << kSlotBits | (slot + 1);
  }
}
template <class C>
WEFT_DEVICE void clear_noted(const C& c) {
  uint32_t* noted = c.gathered(c.rail(kPlaceInDomain, c.mesh.rank()));
  WEFT_ROLLED
  for (uint32_t i = c.block.rank(); i < c.batches().capacity; i += c.block.size()) noted[i] = 0;
}

// Jobs of blocks, whose owners start with this rank's successor; its own tokens come last.
template <class C, class Answer>
WEFT_DEVICE void for_each_batch(const C& c, Answer answer) {
  WEFT_ROLLED
  for (uint32_t job = c.block.index(); job < c.batches().count * c.ranks(); job += c.block.count())
    answer((c.mesh.rank() + 1 + job / c.batches().count) % c.ranks(), job % c.batches().count);
}

// ---- step 1

// Tells the rail peer that this rank's replies to a batch are there. The warp.
template <class C>
WEFT_DEVICE void tell_rail_peer(const C& c, const DomainBatch<C>& domain) {
  const uint32_t* noted = c.gathered(domain.own_place());
  uint32_t* slots = domain.slots(domain.own_place());
  for (uint32_t i = c.warp.rank(); i < c.batches().capacity; i += c.warp.size())
    store_relaxed(slots + i, slot_noted(noted[i]));
  c.warp.sync();
  if (c.warp.rank() == 0)
    put_control(c.a.call, c.mesh, domain.rail_peer(), domain.word(domain.own_place()),
                c.epoch.number * kWordEpoch | kWordDone);
}

// Answers a batch, where the outbox has room for all replies to it: to its owner, or to the rail peer. The block.
template <class C>
WEFT_DEVICE void answer_together(const C& c, uint32_t owner, uint32_t batch) {
  const Answered of = answered(c, owner, batch);
  const bool by_rail = c.goes_by_rail(owner);  // the rail peer waits for batches without messages, too
  if ((of.messages == 0 && !by_rail) || c.present()[owner] == 0) return;
  const Span traced(c.a.call.wait.trace, Work::kAnswer, c.warp.rank() == 0, owner);
  begin_batch(c);
  if (by_rail) {
    clear_noted(c);
    c.block.sync();
  }
  bool is_made = owner_agrees(c, owner);
  PortReplies<C> replies(c, owner, batch);  // where they go the note says
  const DomainBatch<C> domain = by_rail ? domain_batch(c, owner, batch) : DomainBatch<C>{c, owner, batch, 0};
  std::byte* const first = by_rail ? domain.rows(domain.own_place()) : replies.at(0);
  if (is_made && by_rail) note_messages(c, domain, of);
  is_made = is_made && build_replies(c, of, [&](uint32_t index, const int32_t* record) {
              const uint32_t number =
                  by_rail ? domain.index_of(record) : replies_before(c, of.records, index);
              return first + number * c.port_layout().stride;
            });
  if (!all_made(c, is_made) || c.warp.index() != 0) return;
  if (by_rail)
    tell_rail_peer(c, domain);
  else
    replies.send(replies_before(c, of.records, of.messages), of.messages);
}

// ---- step 2

// Waits for the replies of this domain's other ranks to a batch. The warp.
template <class C>
WEFT_DEVICE bool await_domain(const C& c, const DomainBatch<C>& domain) {
  bool came = true;
  for (uint32_t place = c.warp.rank(); place < c.a.domain_ranks; place += c.warp.size()) {
    if (place == domain.own_place()) continue;
    const auto* word = reinterpret_cast<const uint64_t*>(control_at(c.a.call, c.mesh, domain.word(place)));
    uint64_t seen = 0;
    came = await(c.a.call, c.mesh, word, c.epoch.number * kWordEpoch + kWordDone,
                 c.rail(kRankOfDomain, place), Site::kLowLatencyCombineRecv, kWordEpoch, seen) &&
           came;
  }
  c.warp.sync();
  return !c.warp.any(!came);
}

// Copies the other ranks' entries of gathered() beside this rank's. The block, which synchronises afterwards.
template <class C>
WEFT_DEVICE void gather_noted(const C& c, const DomainBatch<C>& domain) {
  const uint32_t capacity = c.batches().capacity;
  WEFT_ROLLED
  for (uint32_t i = c.block.rank(); i < c.a.domain_ranks * capacity; i += c.block.size()) {
    const uint32_t place = i / capacity;
    if (place != domain.own_place()) c.gathered(0)[i] = load_relaxed(domain.slots(place) + i % capacity);
  }
}

// Whether the owner gets a sum for a token of the batch. One thread.
template <class C>
WEFT_DEVICE bool has_sum(const C& c, uint32_t index) {
  bool has_any = false;
  WEFT_ROLLED
  for (uint32_t place = 0; place < c.a.domain_ranks; ++place)
    has_any = has_any || c.gathered(place)[index] != 0;
  return has_any;
}
// How many it gets for the tokens before one. The warp.
template <class C>
WEFT_DEVICE uint32_t sums_before(const C& c, uint32_t index) {
  uint32_t count = 0;
  for (uint32_t i = c.warp.rank(); i < index; i += c.warp.size()) count += has_sum(c, i) ? 1 : 0;
  return c.warp.sum(count);
}
// The place in the domain of the rank whose row of a token is the first of slot k; -1: of none. One thread.
template <class C>
WEFT_DEVICE int32_t place_of_slot(const C& c, uint32_t index, uint32_t k) {
  int32_t found = -1;
  WEFT_ROLLED
  for (uint32_t place = 0; place < c.a.domain_ranks; ++place)
    if (slot_noted(c.gathered(place)[index]) == k + 1) found = static_cast<int32_t>(place);
  return found;
}

// Loads the listed rows of a token. The own one it makes.
template <class C, class Element>
struct DomainSource {
  const DomainBatch<C>& domain;
  const VecLayout& layout;
  uint32_t index;     // of the token
  uint32_t own_rows;  // of how many rows this rank makes its own

  WEFT_DEVICE bool is_own(uint32_t row) const {
    return static_cast<uint32_t>(domain.c.rows()[row]) == domain.own_place();
  }
  template <uint32_t kRows, uint32_t kVecs>
  WEFT_DEVICE bool operator()(Vec16 (&held)[kRows][kVecs], uint32_t row, uint32_t count, uint32_t first,
                              uint32_t last) {
    const C& c = domain.c;
    bool has_own = false;
    for (uint32_t r = 0; r < kRows && row + r < count; ++r) has_own = has_own || is_own(row + r);
    Vec16 made[kVecs] = {};
    if (has_own) sum_own_rows<Element>(c, layout, own_rows, made, first, last);
    uint32_t missing = 0;  // words have said that all is there
    WEFT_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      if (row + r >= count) continue;
      if (is_own(row + r)) {
        WEFT_UNROLL
        for (uint32_t v = 0; v < kVecs; ++v) held[r][v] = made[v];
        continue;
      }
      const auto* vecs = reinterpret_cast<const Vec16*>(
          domain.rows(static_cast<uint32_t>(c.rows()[row + r])) + index * c.port_layout().stride);
      layout.load_arrived(c.warp, held[r], [&] { return vecs; }, first, last, missing, r);
    }
    return true;
  }
};

// A part of the sum of a token's rows. False: this rank's own rows are not there. The warp.
template <class C>
WEFT_DEVICE bool sum_of_domain(const C& c, const DomainBatch<C>& domain, const Answered& of, uint32_t index,
                               uint32_t part, std::byte* sum) {
  const uint32_t noted = c.gathered(domain.own_place())[index];
  const int32_t* record = of.records + (noted >> kSlotBits) * c.routes().record_words;
  const bool has_own = noted != 0;
  if (has_own && c.a.signals && !await_rows(c, record)) return false;
  const Message own{record, of.owner, part, 0, false};
  const MessageWeights<C> weights(c, own);
  const uint32_t own_rows = list_own_rows(c, record, has_own, weights);
  const uint32_t count = list_rows(c, [&](uint32_t k) { return place_of_slot(c, index, k); });
  const VecLayout layout{false, c.row_vecs(), c.tag()};
  with_row_element(c.shape, [&](auto element) {
    using Element = decltype(element);
    const DomainSource<C, Element> source{domain, layout, index, own_rows};
    const auto put = [&](uint32_t at, const float (&sums)[Element::kPerVec]) {
      store_vec(reinterpret_cast<Vec16*>(sum) + at, Element::round(sums));
    };
    sum_rows<Element, kReceiveVecs, kReceiveRows>(
        c, c.vecs_of(part), count, source, [](uint32_t) { return 1.0f; }, put);
  });
  c.warp.sync();
  return true;
}

// Sums this domain's replies to a batch of an owner that this rank gathers for, and sends the sums. The block.
template <class C>
WEFT_DEVICE void gather_batch(const C& c, uint32_t owner, uint32_t batch) {
  if (c.present()[owner] == 0) return;
  const Span traced(c.a.call.wait.trace, Work::kAnswer, c.warp.rank() == 0, owner);
  begin_batch(c);
  clear_noted(c);
  c.block.sync();
  const Answered of = answered(c, owner, batch);
  bool is_made = owner_agrees(c, owner);
  const DomainBatch<C> domain = domain_batch(c, owner, batch);
  if (is_made) note_messages(c, domain, of);
  is_made = is_made && await_domain(c, domain);
  if (is_made) gather_noted(c, domain);
  const bool is_gathered = all_made(c, is_made);
  c.block.sync();  // before a warp says that it cannot make a sum
  if (!is_gathered) return;
  PortReplies<C> replies(c, owner, batch);
  WEFT_ROLLED
  for (uint32_t unit = c.warp.index(); is_made && unit < c.batches().capacity * c.reply_parts().value;
       unit += c.block.warps()) {
    const uint32_t index = unit / c.reply_parts();
    if (has_sum(c, index))
      is_made =
          sum_of_domain(c, domain, of, index, unit % c.reply_parts(), replies.at(sums_before(c, index)));
  }
  const uint32_t sums = sums_before(c, c.batches().capacity);
  if (all_made(c, is_made) && c.warp.index() == 0 && sums != 0) replies.send(sums, sums);
}

// The batches of all owners that this rank gathers for. A function of its own, so that its registers do not burden
// other roles.
template <class MeshT, class Shape>
WEFT_APART void gather_batches(const LowLatencyCombineArgs& a, const MeshT& mesh, const Shape& shape,
                               Epoch epoch) {
  Combine<MeshT, Shape> c{a, mesh, shape, workers_of(a.call, mesh), Warp{}, epoch, {}};
  c.keep_layouts();
  for_each_batch(c, [&](uint32_t owner, uint32_t batch) {
    if (c.gathers_for(owner)) gather_batch(c, owner, batch);
  });
}

// ---- both

template <class C>
WEFT_DEVICE void answer_batches_by_blocks(const C& c) {
  const bool all_fit = c.a.answer_room == c.port_layout().batch_answers;
  for_each_batch(c, [&](uint32_t owner, uint32_t batch) {
    if (c.gathers_for(owner)) return;
    if (all_fit)
      answer_together(c, owner, batch);
    else if (c.warp.index() == 0)
      answer_batch(c, owner, batch, 0, 0);
  });
  if (c.is_shared()) gather_batches(c.a, c.mesh, c.shape, c.epoch);
}

struct PortCombine {
  template <class C>
  using Replies = PortReplies<C>;
  static constexpr bool kOwnersPlace = true;

  template <class C>
  static WEFT_DEVICE uint64_t weights_at(const C& c, uint32_t owner, uint32_t token) {
    const NoteLayout note = c.port_layout().note;
    return c.note_at(owner) + note.weights + token * note.weights_stride;
  }
  static WEFT_DEVICE const Divisor& reply_parts(const LowLatencyCombineArgs& a) { return a.answer_parts; }
  // Its place among the replies to this rank.
  template <class C>
  static WEFT_DEVICE int32_t reply_number(const C& c, uint32_t token, uint32_t slot) {
    return static_cast<int32_t>(load_relaxed(c.places() + token * c.top_k() + slot));
  }
  template <class C>
  static WEFT_DEVICE const std::byte* reply(const C& c, uint32_t peer, uint32_t /*token*/, int32_t number,
                                            bool /*lines*/) {
    return c.reply_of(peer, static_cast<uint32_t>(number));
  }
  template <class C>
  static WEFT_DEVICE void send(const C& c) {
    send_notes(c);
    answer_batches_by_blocks(c);
  }
};

}  // namespace low_latency
}  // namespace weft
