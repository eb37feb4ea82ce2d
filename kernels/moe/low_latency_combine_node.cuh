// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_node.cuh: answers where a sum of a node's replies to a token crosses the network once
// (low_latency_ports.h).
//   1 Replies to owners of this node go there. Those to any other owner go to its carrier here: each token's row to its
//     place in the carrier's outbox, then, for each batch, which tokens have rows, and a word.
//   2 The carrier waits for these words of all ranks of its node. It sums a token's rows, its own with them, and sends all
//     sums of a batch as one range, the batch's word behind it.
// Sums:    a rank's row is rounded as a reply is. The carrier adds rows in float32, in the order of the token's slots that
//          they are the first of, and rounds once.
// Waits:   step 1 for the owner's note; step 2 for that and for step 1 of the node's other ranks. A block does all its step 1
//          before any step 2, so no two ranks wait for each other.
#pragma once

#include "kernels/moe/low_latency_combine_answer_ports.cuh"
#include "kernels/moe/low_latency_combine_replies.cuh"

namespace weft {
namespace low_latency {

// An entry of gathered() for a token: the first of its slots that a rank has a row for, plus one; 0: no message;
// top_k + 1: a message without rows. For this rank's own messages the bits above kSlotBits hold the message's
// number.
inline constexpr uint32_t kSlotBits = 16;
WEFT_DEVICE constexpr uint32_t slot_noted(uint32_t noted) {
  return noted & ((uint32_t{1} << kSlotBits) - 1);
}

// The replies of this node's ranks to a batch of another node's rank, in the window of its carrier.
template <class C>
struct NodeBatch {
  const C& c;
  uint32_t owner;
  uint32_t batch;
  uint32_t first_token;  // of the batch: its owner says so

  WEFT_DEVICE uint32_t carrier() const { return c.carrier(kCarrierFrom, owner); }
  WEFT_DEVICE uint32_t own_place() const { return c.carrier(kPlaceInNode, c.mesh.rank()); }
  WEFT_DEVICE uint32_t index_of(const int32_t* record) const {
    return static_cast<uint32_t>(record[0]) - first_token;
  }
  // Rows and slots, from the first token's on, of the rank of a place in the node: not of the carrier.
  WEFT_DEVICE std::byte* rows(uint32_t place) const {
    return outbox() + c.node_layout().rows + first_of(place) * c.port_layout().stride;
  }
  WEFT_DEVICE uint32_t* slots(uint32_t place) const {
    return reinterpret_cast<uint32_t*>(outbox() + c.node_layout().slots) + first_of(place);
  }
  WEFT_DEVICE uint64_t word(uint32_t place) const {
    return word_offset(c.a.call, c.ranks(), c.epoch, owner, node_word(c.batches(), place, batch));
  }

 private:
  WEFT_DEVICE std::byte* outbox() const {
    return near_window(c.mesh, carrier()) + outbox_offset(c.a.call, c.shape.ranks, c.epoch);
  }
  WEFT_DEVICE uint64_t first_of(uint32_t place) const {
    const uint32_t others_place = place - (place > c.carrier(kPlaceInNode, carrier()) ? 1 : 0);
    return c.carried_at(owner, batch) * (c.a.node_ranks - 1) + uint64_t{others_place} * c.batches().capacity;
  }
};

// After the owner's note has come.
template <class C>
WEFT_DEVICE NodeBatch<C> node_batch(const C& c, uint32_t owner, uint32_t batch) {
  const std::byte* share = c.note_from(owner) + c.port_layout().note.share;
  return {c, owner, batch, batch * load_relaxed(reinterpret_cast<const uint32_t*>(share))};
}

// Notes in gathered() which tokens of a batch this rank has messages for. The block, which synchronises afterwards.
template <class C>
WEFT_DEVICE void note_messages(const C& c, const NodeBatch<C>& node, const Answered& of) {
  const auto words = static_cast<uint32_t>(c.routes().record_words);
  uint32_t* noted = c.gathered(node.own_place());
  WEFT_ROLLED
  for (uint32_t index = c.block.rank(); index < of.messages; index += c.block.size()) {
    const int32_t* record = of.records + index * words;
    uint32_t slot = 0;
    while (slot < c.top_k() && record[1 + slot] < 0) ++slot;
    noted[node.index_of(record)] = index << kSlotBits | (slot + 1);
  }
}
template <class C>
WEFT_DEVICE void clear_noted(const C& c) {
  uint32_t* noted = c.gathered(c.carrier(kPlaceInNode, c.mesh.rank()));
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

// Tells the carrier that this rank's replies to a batch are there. The warp.
template <class C>
WEFT_DEVICE void tell_carrier(const C& c, const NodeBatch<C>& node) {
  const uint32_t* noted = c.gathered(node.own_place());
  uint32_t* slots = node.slots(node.own_place());
  for (uint32_t i = c.warp.rank(); i < c.batches().capacity; i += c.warp.size())
    store_relaxed(slots + i, slot_noted(noted[i]));
  c.warp.sync();
  if (c.warp.rank() == 0)
    put_control(c.a.call, c.mesh, node.carrier(), node.word(node.own_place()),
                c.epoch.number * kWordEpoch | kWordDone);
}

// Answers a batch, where the outbox has room for all replies to it: to its owner, or to the carrier. The block.
template <class C>
WEFT_DEVICE void answer_together(const C& c, uint32_t owner, uint32_t batch) {
  const Answered of = answered(c, owner, batch);
  const bool is_handed = c.is_carried(owner);  // the carrier waits for batches without messages, too
  if ((of.messages == 0 && !is_handed) || c.present()[owner] == 0) return;
  const Span traced(c.a.call.wait.trace, Work::kAnswer, c.warp.rank() == 0, owner);
  begin_batch(c);
  if (is_handed) {
    clear_noted(c);
    c.block.sync();
  }
  bool is_made = owner_agrees(c, owner);
  PortReplies<C> replies(c, owner, batch);  // where they go the note says
  const NodeBatch<C> node = is_handed ? node_batch(c, owner, batch) : NodeBatch<C>{c, owner, batch, 0};
  std::byte* const first = is_handed ? node.rows(node.own_place()) : replies.at(0);
  if (is_made && is_handed) note_messages(c, node, of);
  is_made = is_made && build_replies(c, of, [&](uint32_t index, const int32_t* record) {
              const uint32_t number =
                  is_handed ? node.index_of(record) : replies_before(c, of.records, index);
              return first + number * c.port_layout().stride;
            });
  if (!all_made(c, is_made) || c.warp.index() != 0) return;
  if (is_handed)
    tell_carrier(c, node);
  else
    replies.send(replies_before(c, of.records, of.messages), of.messages);
}

// ---- step 2

// Waits for the replies of this node's other ranks to a batch. The warp.
template <class C>
WEFT_DEVICE bool await_node(const C& c, const NodeBatch<C>& node) {
  bool came = true;
  for (uint32_t place = c.warp.rank(); place < c.a.node_ranks; place += c.warp.size()) {
    if (place == node.own_place()) continue;
    const auto* word = reinterpret_cast<const uint64_t*>(control_at(c.a.call, c.mesh, node.word(place)));
    uint64_t seen = 0;
    came = await(c.a.call, c.mesh, word, c.epoch.number * kWordEpoch + kWordDone,
                 c.carrier(kRankOfNode, place), Site::kLowLatencyCombineRecv, kWordEpoch, seen) &&
           came;
  }
  c.warp.sync();
  return !c.warp.any(!came);
}

// Copies the other ranks' entries of gathered() beside this rank's. The block, which synchronises afterwards.
template <class C>
WEFT_DEVICE void gather_noted(const C& c, const NodeBatch<C>& node) {
  const uint32_t capacity = c.batches().capacity;
  WEFT_ROLLED
  for (uint32_t i = c.block.rank(); i < c.a.node_ranks * capacity; i += c.block.size()) {
    const uint32_t place = i / capacity;
    if (place != node.own_place()) c.gathered(0)[i] = load_relaxed(node.slots(place) + i % capacity);
  }
}

// Whether the owner gets a sum for a token of the batch. One thread.
template <class C>
WEFT_DEVICE bool has_sum(const C& c, uint32_t index) {
  bool has_any = false;
  WEFT_ROLLED
  for (uint32_t place = 0; place < c.a.node_ranks; ++place)
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
// The place in the node of the rank whose row of a token is the first of slot k; -1: of none. One thread.
template <class C>
WEFT_DEVICE int32_t place_of_slot(const C& c, uint32_t index, uint32_t k) {
  int32_t found = -1;
  WEFT_ROLLED
  for (uint32_t place = 0; place < c.a.node_ranks; ++place)
    if (slot_noted(c.gathered(place)[index]) == k + 1) found = static_cast<int32_t>(place);
  return found;
}

// Loads the listed rows of a token. The own one it makes.
template <class C, class Element>
struct NodeSource {
  const NodeBatch<C>& node;
  const VecLayout& layout;
  uint32_t index;     // of the token
  uint32_t own_rows;  // of how many rows this rank makes its own

  WEFT_DEVICE bool is_own(uint32_t row) const {
    return static_cast<uint32_t>(node.c.rows()[row]) == node.own_place();
  }
  template <uint32_t kRows, uint32_t kVecs>
  WEFT_DEVICE bool operator()(Vec16 (&held)[kRows][kVecs], uint32_t row, uint32_t count, uint32_t first,
                              uint32_t last) {
    const C& c = node.c;
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
      const auto* vecs = reinterpret_cast<const Vec16*>(node.rows(static_cast<uint32_t>(c.rows()[row + r])) +
                                                        index * c.port_layout().stride);
      layout.load_arrived(c.warp, held[r], [&] { return vecs; }, first, last, missing, r);
    }
    return true;
  }
};

// A part of the sum of a token's rows. False: this rank's own rows are not there. The warp.
template <class C>
WEFT_DEVICE bool sum_of_node(const C& c, const NodeBatch<C>& node, const Answered& of, uint32_t index,
                             uint32_t part, std::byte* sum) {
  const uint32_t noted = c.gathered(node.own_place())[index];
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
    const NodeSource<C, Element> source{node, layout, index, own_rows};
    const auto put = [&](uint32_t at, const float (&sums)[Element::kPerVec]) {
      store_vec(reinterpret_cast<Vec16*>(sum) + at, Element::round(sums));
    };
    sum_rows<Element, kReceiveVecs, kReceiveRows>(
        c, c.vecs_of(part), count, source, [](uint32_t) { return 1.0f; }, put);
  });
  c.warp.sync();
  return true;
}

// Sums this node's replies to a batch of an owner that this rank carries for, and sends the sums. The block.
template <class C>
WEFT_DEVICE void gather_batch(const C& c, uint32_t owner, uint32_t batch) {
  if (c.present()[owner] == 0) return;
  const Span traced(c.a.call.wait.trace, Work::kAnswer, c.warp.rank() == 0, owner);
  begin_batch(c);
  clear_noted(c);
  c.block.sync();
  const Answered of = answered(c, owner, batch);
  bool is_made = owner_agrees(c, owner);
  const NodeBatch<C> node = node_batch(c, owner, batch);
  if (is_made) note_messages(c, node, of);
  is_made = is_made && await_node(c, node);
  if (is_made) gather_noted(c, node);
  const bool is_gathered = all_made(c, is_made);
  c.block.sync();  // before a warp says that it cannot make a sum
  if (!is_gathered) return;
  PortReplies<C> replies(c, owner, batch);
  WEFT_ROLLED
  for (uint32_t unit = c.warp.index(); is_made && unit < c.batches().capacity * c.reply_parts().value;
       unit += c.block.warps()) {
    const uint32_t index = unit / c.reply_parts();
    if (has_sum(c, index))
      is_made = sum_of_node(c, node, of, index, unit % c.reply_parts(), replies.at(sums_before(c, index)));
  }
  const uint32_t sums = sums_before(c, c.batches().capacity);
  if (all_made(c, is_made) && c.warp.index() == 0 && sums != 0) replies.send(sums, sums);
}

// The batches of all owners that this rank carries for. A function of its own, so that its registers do not burden
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
