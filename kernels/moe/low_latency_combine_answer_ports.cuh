// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_answer_ports.cuh: answers where ranks have port peers. A block answers a batch: its warps build parts
// of the replies, and one of them sends all as one range, the batch's word behind it. Where the outbox has no room for all
// replies to a batch, one warp builds and sends as many as there is room for, one after the other.
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

// The block.
template <class C>
WEFT_DEVICE void answer_together(const C& c, uint32_t owner, uint32_t batch) {
  const RoutesLayout routes = c.routes();
  const uint32_t batch_at = owner * c.batches().count + batch;
  const int32_t* records =
      c.a.routes + routes.records + batch_at * c.batches().capacity * routes.record_words;
  const uint32_t messages = static_cast<uint32_t>(c.a.routes[routes.counts + batch_at]) & kMaxBatchTokens;
  if (messages == 0 || c.present()[owner] == 0) return;
  const Span traced(c.a.call.wait.trace, Work::kAnswer, c.warp.rank() == 0, owner);
  c.block.sync();  // all have read what became of the batch before
  if (c.block.rank() == 0) *c.unanswered() = 0;
  c.block.sync();
  bool is_made = owner_agrees(c, owner);
  PortReplies<C> replies(c, owner, batch);
  WEFT_ROLLED
  for (uint32_t unit = c.warp.index(); is_made && unit < messages * c.reply_parts().value;
       unit += c.block.warps()) {
    const uint32_t index = unit / c.reply_parts();
    const Message m{records + index * routes.record_words, owner, unit % c.reply_parts(), false};
    if (kIsHost && index + 1 < messages)
      ask_ahead(c, {m.record + routes.record_words, owner, m.piece, false});
    is_made = answer_message(c, m, replies.at(replies_before(c, records, index)));
  }
  if (!is_made && c.warp.rank() == 0) *c.unanswered() = 1;
  c.block.sync();
  if (c.warp.index() == 0 && *c.unanswered() == 0)
    replies.send(replies_before(c, records, messages), messages);
}

// Owners start with this rank's successor; its own tokens come last.
template <class C>
WEFT_DEVICE void answer_batches_by_blocks(const C& c) {
  const bool all_fit = c.a.answer_room == c.port_layout().batch_answers;
  WEFT_ROLLED
  for (uint32_t job = c.block.index(); job < c.batches().count * c.ranks(); job += c.block.count()) {
    const uint32_t owner = (c.mesh.rank() + 1 + job / c.batches().count) % c.ranks();
    const uint32_t batch = job % c.batches().count;
    if (all_fit)
      answer_together(c, owner, batch);
    else if (c.warp.index() == 0)
      answer_batch(c, owner, batch, 0, 0);
  }
}

}  // namespace low_latency
}  // namespace weft
