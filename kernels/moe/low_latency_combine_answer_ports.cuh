// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_answer_ports.cuh: builds answers where ranks have port peers. A block answers a batch: its warps build
// parts of the replies, and one of them sends all as one range, the batch's word behind it
// (low_latency_combine_node.cuh). Where the outbox has no room for all replies to a batch, one warp builds and sends as many
// as there is room for, one after the other (answer_batch()).
// Waits: for the owner's note.
#pragma once

#include "kernels/moe/low_latency_combine_answer.cuh"

namespace weft {
namespace low_latency {

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

}  // namespace low_latency
}  // namespace weft
