// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_deliver.cuh: delivers messages: builds batches of tokens, tells peers how many messages of each
// have left, and how many of this rank's tokens chose each expert. A batch's word moves after every few messages and at
// its end; a message that leaves as lines needs no word.
#pragma once

#include "kernels/moe/low_latency_dispatch_build.cuh"

namespace weft {
namespace low_latency {

// A batch tells its peers how far it is after this many tokens, and at its end.
inline constexpr uint32_t kTokensPerWord = 4;

// The last blocks tell peers the counts: those without a batch, or the very last one.
template <class D>
WEFT_DEVICE Range counting_blocks(const D& d) {
  const uint32_t free = d.block.count() > d.batches().count ? d.block.count() - d.batches().count : 1;
  const uint32_t count = free < d.ranks() ? free : d.ranks();
  return {d.block.count() - count, d.block.count()};
}

// One warp per peer. `is_counted`: prefix() is already what all tokens choose.
template <class D>
WEFT_DEVICE void send_counts(const D& d, bool is_counted) {
  const Range blocks = counting_blocks(d);
  if (d.block.index() < blocks.first) return;
  const Span traced(d.a.call.wait.trace, Work::kTellCounts, d.block.rank() == 0);
  if (!is_counted) {
    add_choices(d, 0, d.a.call.tokens * d.top_k(), d.block.rank(), d.block.size());
    d.block.sync();
  }
  const auto share = static_cast<uint32_t>(blocks.last - blocks.first);
  const auto first = static_cast<uint32_t>(d.block.index() - blocks.first) + d.warp.index() * share;
  WEFT_ROLLED
  for (uint32_t peer = first; peer < d.ranks(); peer += d.block.warps() * share) {
    if (d.present()[peer] == 0) continue;
    const auto counts = d.counts_to(peer);
    auto* words = reinterpret_cast<uint64_t*>(counts.at());
    for (uint32_t i = d.warp.rank(); i < d.local_experts(); i += d.warp.size())
      store_relaxed(&words[i], count_word(d.epoch.number, d.prefix()[peer * d.local_experts() + i]));
    d.warp.sync();
    if (d.warp.rank() != 0) continue;
    counts.put(OneThread{}, uint64_t{d.count_words()} * 8);
    send_handshake(d.a.call, d.mesh, d.epoch, peer, 0);
  }
  d.block.sync();  // a handshake would wait for all that the block sends by then
}

// One thread, after the block's stores: tells a peer how many messages of a batch it has. `store` is how a near peer's word
// is stored. Messages to a port peer leave as one range when the batch is done, their word behind them; a peer that reads
// them in another rank's window gets none.
template <class D, class Store>
WEFT_DEVICE void move_word(const D& d, uint32_t batch, uint32_t peer, uint64_t done, uint32_t count,
                           Store store) {
  const uint64_t word = word_offset(d.a.call, d.ranks(), d.epoch, d.mesh.rank(), batch);
  const uint64_t value = d.epoch.number * kWordEpoch | done | count;
  const auto messages = d.messages_to(peer, batch, 0);
  if (messages.is_near() || count == 0)
    put_control(d.a.call, d.mesh, peer, word, value, store);
  else
    messages.send(OneThread{}, count * d.message().stride, word, value);
}
template <class D>
WEFT_DEVICE bool gets_word(const D& d, uint32_t peer, uint64_t done) {
  return d.messages_to(peer, 0, 0).is_near() || (done != 0 && d.carrier_to(peer) == peer);
}

// Warp 0, after the block's stores: tells peers how many messages of the batch they have.
template <class D>
WEFT_DEVICE void move_words(const D& d, uint32_t batch, uint64_t done) {
  for (uint32_t peer = d.warp.rank(); peer < d.ranks(); peer += d.warp.size())
    if (d.present()[peer] != 0 && gets_word(d, peer, done))
      move_word(d, batch, peer, done, d.sent()[peer], [](uint64_t* at, uint64_t v) { store_release(at, v); });
}

// One warp, after a batch's only token, if any, was routed: tells the peers that get no message of it.
template <class D>
WEFT_DEVICE void move_empty_words(const D& d, uint32_t batch) {
  for (uint32_t peer = d.warp.rank(); peer < d.ranks(); peer += d.warp.size())
    if (d.present()[peer] != 0 && d.sent()[peer] == 0 && gets_word(d, peer, kWordDone))
      move_word(d, batch, peer, kWordDone, 0, [](uint64_t* at, uint64_t v) { store_relaxed(at, v); });
}

// The current token's messages, from their image, as lines. The block.
template <class D>
WEFT_DEVICE void store_lines(const D& d) {
  const Span traced(d.a.call.wait.trace, Work::kStoreLines, d.block.rank() == 0);
  const uint32_t head_vecs = d.message().head_vecs(), body_vecs = d.message().body_vecs();
  const uint32_t head = parts_of(head_vecs), parts = head + parts_of(body_vecs);
  const auto* body = reinterpret_cast<const Vec16*>(d.image()) + head_vecs;
  const uint32_t targets = *d.targets();
  WEFT_ROLLED
  for (uint32_t i = d.block.rank(); i < parts; i += d.block.size()) {
    const bool is_head = i < head;
    const LinePart part{is_head ? i : i - head};
    Vec16 vec{};
    if (!is_head && part.holds(body_vecs)) vec = body[part.vec()];
    WEFT_ROLLED
    for (uint32_t t = 0; t < targets; ++t) {
      if (is_head && part.holds(head_vecs)) vec = reinterpret_cast<const Vec16*>(d.heads(t))[part.vec()];
      store_part(reinterpret_cast<Vec16*>(d.place()[t]) + (is_head ? 0 : head), part, vec, d.tag());
    }
  }
}

// Whether blocks may have so many batches that they count on from one to the next: where blocks are few, and in the split
// all-to-all, whose launches may take few SMs, and whose weights travel. Elsewhere a block has one, and code is time.
template <class D>
WEFT_DEVICE bool counts_on(const D& d) {
  return kHasFewBlocks || d.has_weights();
}

// The warp that routes tokens, when it has routed `token`: counts on to the block's next batch, and reads what that one's
// token chose, while the others still store.
template <class D>
WEFT_DEVICE void prepare_next(const D& d, uint32_t batch, uint32_t token) {
  const uint32_t next = batch + d.block.count();
  if (next >= d.batches().count) return;
  const Range tokens = batch_tokens(d, next);
  if (tokens.first == tokens.last) return;
  add_choices(d, (token + 1) * d.top_k(), tokens.first * d.top_k(), d.warp.rank(), d.warp.size());
  read_choices(d, tokens.first);
}

// The block puts a message together in shared memory while its last warp, which has least of the row, finds
// where it goes. Prepares the next batch.
template <class D>
WEFT_DEVICE void send_token_as_lines(const D& d, uint32_t batch, uint32_t token, bool is_read,
                                     const FirstVecs& first) {
  if (d.warp.index() + 1 == d.block.warps()) {
    if (!is_read) read_choices(d, token);
    route_token(d, batch);
    d.warp.sync();
    write_heads(d, token);
  }
  send_row(d, token, first);
  d.block.sync();
  store_lines(d);
  if (d.warp.index() + 1 != d.block.warps()) return;
  count_token(d);
  move_empty_words(d, batch);
  if (counts_on(d)) prepare_next(d, batch, token);
}

// One batch's tokens, in order. The block. `is_prepared`: prefix() is already what earlier batches choose, and the
// first token's choices were read; else prefix() is what the first `counted` tokens choose, or anything where that is 0.
// `first` is of the first token. Blocks with many batches must not count from the start for each. Returns whether the
// next one is prepared.
template <class D>
WEFT_DEVICE bool send_batch(const D& d, uint32_t batch, bool is_prepared, uint32_t counted, FirstVecs first) {
  const Span traced(d.a.call.wait.trace, Work::kSendBatch, d.block.rank() == 0);
  const Range tokens = batch_tokens(d, batch);
  for (uint32_t i = d.block.rank(); i < d.ranks(); i += d.block.size()) d.sent()[i] = 0;
  if (!is_prepared) {
    if (!counts_on(d) || counted == 0) {
      clear_choices(d);
      d.block.sync();
    }
    const uint32_t known = counts_on(d) ? counted * d.top_k() : 0;
    add_choices(d, known, tokens.first * d.top_k(), d.block.rank(), d.block.size());
  }
  d.block.sync();
  if (tokens.first == tokens.last) {
    if (d.warp.index() == 0) move_empty_words(d, batch);
    return false;
  }
  if (d.sends_lines()) {
    send_token_as_lines(d, batch, tokens.first, is_prepared, first);
    return counts_on(d);
  }
  WEFT_ROLLED
  for (uint32_t token = tokens.first; token < tokens.last; ++token) {
    if (token != tokens.first) first = load_first_vecs(d, token);
    if (d.warp.index() == 0) {
      if (!is_prepared || token != tokens.first) read_choices(d, token);
      route_token(d, batch);
    }
    d.block.sync();
    send_row(d, token, first);
    if (d.warp.index() + 1 == d.block.warps()) write_heads(d, token);  // it has least of the row
    d.block.sync();
    if (d.warp.index() != 0) continue;
    count_token(d);
    if ((token - tokens.first) % kTokensPerWord == kTokensPerWord - 1 && token + 1 < tokens.last)
      move_words(d, batch, 0);
  }
  // The other warps go on: publishing waits until the last store has arrived.
  if (d.warp.index() == 0) move_words(d, batch, kWordDone);
  return false;
}

template <class D>
WEFT_DEVICE void send_batches(const D& d, bool is_prepared, FirstVecs first) {
  uint32_t counted = 0;
  WEFT_ROLLED
  for (uint32_t batch = d.block.index(); batch < d.batches().count; batch += d.block.count()) {
    if (batch != d.block.index()) {
      first = load_first_vecs(d, batch_tokens(d, batch).first);
      d.block.sync();
    }
    is_prepared = send_batch(d, batch, is_prepared, counted, first);
    counted = batch_tokens(d, batch).last;  // its tokens were counted as they went
  }
}

// The first token of the block's first batch; all tokens where it has none.
template <class D>
WEFT_DEVICE uint32_t first_token(const D& d) {
  return d.block.index() < d.batches().count ? batch_tokens(d, d.block.index()).first : d.a.call.tokens;
}

// The work that a block does before it knows the call's number: it reads the choices of its first token,
// and counts the choices of the tokens before that one, or of all tokens where it has no batch. Returns
// whether it did; a block that needs both counts later. Run by the warps from the second on, unless there
// is only one, since the first is busy.
template <class D>
WEFT_DEVICE bool prepare_send(const D& d) {
  const bool has_batch = d.block.index() < d.batches().count;
  const bool tells = d.block.index() >= counting_blocks(d).first;
  const bool counts = has_batch != tells;
  const uint32_t apart = d.block.warps() > 1 ? d.warp.size() : 0;
  if (d.block.rank() < apart) return counts;
  const uint32_t rank = d.block.rank() - apart;
  const uint32_t size = d.block.size() - apart;
  if (!counts) return false;
  const uint32_t first = first_token(d);
  if (rank < d.warp.size() && first < d.a.call.tokens) read_choices(d, first);
  add_choices(d, 0, first * d.top_k(), rank, size);
  return true;
}

}  // namespace low_latency
}  // namespace weft
