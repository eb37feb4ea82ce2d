// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_send.cuh: builds messages and delivers them. A token's choices say where it goes; its row is
// quantised in the payload's form and stored, with a head for each rank, at the places that route_token() has listed: where
// ranks read it, in the outbox for a port peer, or in an image in shared memory that lines are made of. Then peers are told
// how many messages of each batch have left, and how many of this rank's tokens chose each expert. A batch's word moves
// after every few messages and at its end; a message that leaves as lines needs no word.
#pragma once

#include "kernels/core/quantise.cuh"
#include "kernels/moe/low_latency_dispatch_call.cuh"

namespace weft {
namespace low_latency {

// ---- step 1

template <class D>
WEFT_DEVICE void clear_choices(const D& d) {
  for (uint32_t i = d.block.rank(); i < d.ranks() * d.local_experts(); i += d.block.size()) d.prefix()[i] = 0;
}

// Adds up, in prefix(), what entries [first, last) of topk_idx choose. Thread `rank` of the `size` that share the
// work.
template <class D>
WEFT_DEVICE void add_choices(const D& d, uint32_t first, uint32_t last, uint32_t rank, uint32_t size) {
  for (uint32_t i = first + rank; i < last; i += size) {
    const int64_t expert = expert_at(d.a.topk_idx, d.a.call.id_bytes, i);
    if (expert >= 0 && expert < d.a.call.experts) add_local(&d.prefix()[expert], uint32_t{1});
  }
}

// ---- step 2

// What slot `slot` of the current token chose. Lane `slot` has it as `mine` where a warp has a lane for every slot. Not a
// member: each kind of dispatch keeps its slots elsewhere.
template <class D>
WEFT_DEVICE int32_t choice_of(const D& d, int32_t mine, uint32_t slot) {
  return Warp::kMaxSize >= kMostTopK ? d.warp.broadcast(mine, slot) : d.slot_choice()[slot];
}

// A batch's tokens: consecutive ones.
template <class D>
WEFT_DEVICE Range batch_tokens(const D& d, uint32_t batch) {
  const uint32_t tokens = d.a.call.tokens;
  const uint32_t share = d.a.call.batch_tokens.value;
  const uint32_t first = batch * share < tokens ? batch * share : tokens;
  return {first, first + share < tokens ? first + share : tokens};
}

// One warp: reads what a token chose, and notes it for the combine, whose ids may be others. Where a send does not know
// the routes, its caller keeps the ids.
template <class D>
WEFT_DEVICE void read_choices(const D& d, uint32_t token) {
  const RoutesLayout routes = d.routes();
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size()) {
    const auto choice = static_cast<int32_t>(chosen_expert(d.a, d.top_k(), token, k));
    d.slot_choice()[k] = choice;
    if (!d.a.routes) continue;
    const uint64_t at = uint64_t{token} * d.top_k() + k;
    d.a.routes[routes.chosen + at] = choice;
    if (d.has_weights())
      d.a.routes[routes.weights + at] = static_cast<int32_t>(bits_of_float(d.a.topk_weights[at]));
  }
  d.warp.sync();
}

// Where the next message of a batch to a rank is built, or, as lines, stored.
template <class D>
WEFT_DEVICE std::byte* message_place(const D& d, uint32_t rank, uint32_t batch) {
  if (d.keeps_own(rank)) return d.own_message(batch, d.sent()[rank]);
  return d.messages_to(rank, batch, d.sent()[rank]).at();
}

// One warp, when the choices were read: finds where a token goes: its slots' ranks, experts and places there,
// and each rank, or rail peer of ranks, once.
template <class D>
WEFT_DEVICE void route_token(const D& d, uint32_t batch) {
  uint32_t targets = 0;
  for (uint32_t first = 0; first < d.top_k(); first += d.warp.size()) {
    const uint32_t k = first + d.warp.rank();
    const int32_t expert = k < d.top_k() ? d.slot_choice()[k] : -1;
    const uint32_t rank = expert < 0 ? d.ranks() : static_cast<uint32_t>(expert) / d.local_experts();
    const uint32_t target = expert < 0 ? d.ranks() : d.rail_peer_to(rank);
    uint32_t twins = 0;
    bool is_first = true;
    WEFT_STREAM_LOOP
    for (uint32_t slot = 0; slot < d.top_k(); ++slot) {
      const int32_t other = choice_of(d, expert, slot);
      const bool is_earlier = slot < k && other >= 0;
      twins += is_earlier && other == expert ? 1 : 0;
      is_first = is_first &&
                 !(is_earlier && d.rail_peer_to(static_cast<uint32_t>(other) / d.local_experts()) == target);
    }
    const bool goes = expert >= 0 && is_first && d.present()[target] != 0;
    const uint32_t at = targets + d.warp.count_below(goes);
    targets += d.warp.count(goes);
    if (k < d.top_k()) {
      d.slot_rank()[k] = rank;
      d.slot_expert()[k] = expert < 0 ? 0 : static_cast<uint32_t>(expert) % d.local_experts();
      d.slot_place()[k] = expert < 0 ? 0 : d.prefix()[expert] + twins;
    }
    if (!goes) continue;
    d.target()[at] = target;
    d.place()[at] = message_place(d, target, batch);
  }
  if (d.warp.rank() == 0) *d.targets() = targets;
}

// The same warp, after every slot was routed: the next token comes after this one.
template <class D>
WEFT_DEVICE void count_token(const D& d) {
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size())
    if (d.slot_choice()[k] >= 0) add_local(&d.prefix()[d.slot_choice()[k]], uint32_t{1});
  for (uint32_t i = d.warp.rank(); i < *d.targets(); i += d.warp.size()) d.sent()[d.target()[i]] += 1;
  d.warp.sync();
}

// Calls store(place) for each place where the current token's message is built: all its destinations, or
// the image that lines are made of.
template <class D, class Store>
WEFT_DEVICE void at_places(const D& d, Store store) {
  if (d.sends_lines()) return store(d.image());
  const uint32_t targets = *d.targets();
  WEFT_ROLLED
  for (uint32_t i = 0; i < targets; ++i) store(d.place()[i]);
}

template <class D>
WEFT_DEVICE void store_to_all(const D& d, uint64_t offset, Vec16 vec) {
  at_places(d, [&](std::byte* place) { store_unordered(reinterpret_cast<Vec16*>(place + offset), vec); });
}

// The first data of a row that a thread of the block sends. It loads them before the row's destination is known: of a
// row as it is, vectors a block's size apart and a word of the scales; with FP8 the channels of its first unit; else
// nothing.
inline constexpr uint32_t kFirstVecs = kLaneElems / 8;
struct FirstVecs {
  Vec16 held[kFirstVecs];
  uint32_t scale;
};
template <class D>
WEFT_DEVICE FirstVecs load_first_vecs(const D& d, uint32_t token) {
  FirstVecs first{};
  const Encoder encoder = d.payload_format().encoder;
  const bool is_copy = encoder == Encoder::kNone;
  if (token >= d.a.call.tokens || !(is_copy || encoder == Encoder::kFp8)) return first;
  const auto* row = reinterpret_cast<const Vec16*>(d.a.x + token * d.a.x_row_bytes);
  WEFT_UNROLL
  for (uint32_t v = 0; v < kFirstVecs; ++v) {
    const uint32_t at = is_copy ? d.block.rank() + v * d.block.size() : d.block.rank() * kFirstVecs + v;
    if (at < d.a.x_row_bytes / 16) first.held[v] = load_vec_streaming(row + at);
  }
  if (is_copy && d.block.rank() < d.shape.scale_bytes / 4)
    first.scale =
        reinterpret_cast<const uint32_t*>(d.a.x_scales + token * d.shape.scale_bytes)[d.block.rank()];
  return first;
}

// One host thread: stores a token's row and scales to each of its ranks, or the row to this rank's own window.
// Receivers read them only after the word has moved.
template <class D>
WEFT_DEVICE void send_row_by_thread(const D& d, uint32_t token, const std::byte* row,
                                    const std::byte* scales) {
  const MessageLayout message = d.message();
  const auto row_bytes = static_cast<uint64_t>(d.shape.row_bytes);
  const auto scale_bytes = static_cast<uint64_t>(d.shape.scale_bytes);
  const bool past_caches = is_past_caches(d.a.call, d.shape.row_bytes);
  if (d.keeps_rows() && *d.targets() != 0)
    copy_row_by_thread(d.mesh.local() + d.source_row_at(d.mesh.rank(), token), row, row_bytes, past_caches);
  at_places(d, [&](std::byte* place) {
    if (!d.keeps_rows()) copy_row_by_thread(place + message.row, row, row_bytes, past_caches);
    if (scale_bytes != 0) copy_by_thread(place + message.scales, scales, scale_bytes);
  });
}

template <class D>
WEFT_DEVICE void send_row_as_is(const D& d, uint32_t token, const std::byte* row, const std::byte* scales,
                                const FirstVecs& first) {
  const MessageLayout message = d.message();
  if (kCopiesAlone && d.block.size() == 1 && !d.sends_lines())
    return send_row_by_thread(d, token, row, scales);
  const uint32_t vecs = static_cast<uint32_t>(d.shape.row_bytes) / 16;
  const uint32_t step = d.block.size();
  WEFT_UNROLL
  for (uint32_t v = 0; v < kFirstVecs; ++v)
    if (d.block.rank() + v * step < vecs)
      store_to_all(d, message.row + (d.block.rank() + v * step) * 16, first.held[v]);
  WEFT_ROLLED
  for (uint32_t i = d.block.rank() + kFirstVecs * step; i < vecs; i += step)
    store_to_all(d, message.row + i * 16, load_vec_streaming(reinterpret_cast<const Vec16*>(row) + i));
  for (uint32_t i = d.block.rank(); i < d.shape.scale_bytes / 4; i += d.block.size()) {
    const uint32_t word = i < step ? first.scale : reinterpret_cast<const uint32_t*>(scales)[i];
    at_places(d, [&](std::byte* place) {
      store_unordered(reinterpret_cast<uint32_t*>(place + message.scales) + i, word);
    });
  }
}

template <class D>
WEFT_DEVICE void send_scale(const D& d, uint32_t group, float scale) {
  const uint64_t scales = d.message().scales;
  at_places(d, [&](std::byte* place) {
    if (d.payload_format().scale == Scale::kExponent) {
      store_unordered(reinterpret_cast<uint8_t*>(place + scales) + group, ue8m0(scale));
    } else {
      store_unordered(reinterpret_cast<uint32_t*>(place + scales) + group, bits_of_float(scale));
    }
  });
}

// kGroupLanes neighbours take a group of channels; a warp's lanes stay together, since they exchange maxima.
template <class D>
WEFT_DEVICE void send_row_as_fp8(const D& d, const std::byte* row, const FirstVecs& first) {
  const uint32_t units = static_cast<uint32_t>(d.shape.row_bytes) / kLaneElems;
  WEFT_ROLLED
  for (uint32_t base = d.warp.index() * d.warp.size(); base < units; base += d.block.size()) {
    const uint32_t unit = base + d.warp.rank();
    const bool is_inside = unit < units;
    float values[kLaneElems];
    if (unit == d.block.rank()) {
      WEFT_UNROLL
      for (uint32_t v = 0; v < kFirstVecs; ++v) widen(values + 8 * v, first.held[v]);
    } else {
      load_lane(values, is_inside ? row + uint64_t{unit} * kLaneElems * 2 : nullptr);
    }
    const Fp8Scale scale = fp8_scale(group_max(d.warp, values), d.payload_format().scale != Scale::kFloat32);
    if (!is_inside) continue;
    const Fp8Lane lane = fp8_lane(values, scale.multiply);
    for (uint32_t v = 0; v < kLaneElems / 16; ++v)
      store_to_all(d, d.message().row + uint64_t{unit} * kLaneElems + v * 16, lane.vecs[v]);
    if (unit % kGroupLanes == 0) send_scale(d, unit / kGroupLanes, scale.scale);
  }
}

template <class D>
WEFT_DEVICE void send_scale_byte(const D& d, uint32_t block, uint8_t scale) {
  at_places(d, [&](std::byte* place) {
    store_unordered(reinterpret_cast<uint8_t*>(place + d.message().scales) + block, scale);
  });
}

// Each lane takes a unit of channels at a time.
template <class Q, class D>
WEFT_DEVICE void send_row_in_blocks(const D& d, const std::byte* row, Q quantiser) {
  constexpr uint32_t kWords = Q::kBytes / 4;
  const uint32_t units = static_cast<uint32_t>(d.shape.row_bytes) / Q::kBytes;
  WEFT_ROLLED
  for (uint32_t unit = d.block.rank(); unit < units; unit += d.block.size()) {
    float values[kUnitElems];
    load_lane(values, row + uint64_t{unit} * kUnitElems * 2);
    uint32_t words[kWords];
    WEFT_UNROLL
    for (uint32_t b = 0; b < Q::kBlocks; ++b) {
      const uint32_t scale =
          quantiser.encode(values + b * (kUnitElems / Q::kBlocks), words + b * (kWords / Q::kBlocks));
      send_scale_byte(d, unit * Q::kBlocks + b, static_cast<uint8_t>(scale));
    }
    for (uint32_t v = 0; v < kWords / 4; ++v)
      store_to_all(d, d.message().row + uint64_t{unit} * Q::kBytes + v * 16,
                   Vec16{{words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]}});
  }
}

// Sends the current token's row in the payload's form. The block.
template <class D>
WEFT_DEVICE void send_row(const D& d, uint32_t token, const FirstVecs& first) {
  const std::byte* row = d.a.x + uint64_t{token} * d.a.x_row_bytes;
  const Payload format = d.payload_format();
  switch (format.encoder) {
    case Encoder::kNone:
      return send_row_as_is(d, token, row, d.a.x_scales + uint64_t{token} * d.shape.scale_bytes, first);
    case Encoder::kFp8:
      return send_row_as_fp8(d, row, first);
    case Encoder::kMxfp8:
      return send_row_in_blocks(d, row, Mxfp8{});
    case Encoder::kNvfp4:
      return send_row_in_blocks(
          d, row, Nvfp4{*reinterpret_cast<const float*>(d.a.x_scales), format.scale == Scale::kExponent});
  }
}

// The entry of slot k in a message to `rank`: the expert, or -1 for an expert that the message is not for.
template <class D>
WEFT_DEVICE uint32_t expert_in_head(const D& d, uint32_t rank, uint32_t k) {
  if (d.is_shared()) return static_cast<uint32_t>(d.slot_choice()[k]);
  return d.slot_rank()[k] == rank ? d.slot_expert()[k] : ~uint32_t{0};
}

// One warp, when the token was routed: the heads of its messages, at their destinations, or in shared memory
// for lines.
template <class D>
WEFT_DEVICE void write_heads(const D& d, uint32_t token) {
  const MessageLayout message = d.message();
  const uint32_t targets = *d.targets();
  WEFT_ROLLED
  for (uint32_t t = 0; t < targets; ++t) {
    const uint32_t rank = d.target()[t];
    auto* head = reinterpret_cast<uint32_t*>(d.sends_lines() ? d.heads(t) : d.place()[t]);
    if (d.warp.rank() == 0) store_unordered(head, token);
    if (kCopiesAlone && d.warp.rank() == 0) store_unordered(head + kHeadKeepsRow, d.keeps_rows() ? 1u : 0u);
    for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size()) {
      store_unordered(head + message.expert + k, expert_in_head(d, rank, k));
      store_unordered(head + message.place + k, d.slot_place()[k]);
      if (d.has_weights())
        store_unordered(head + message.weight + k,
                        bits_of_float(d.a.topk_weights[uint64_t{token} * d.top_k() + k]));
    }
  }
  d.warp.sync();
}

// ---- delivery

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
  return d.messages_to(peer, 0, 0).is_near() || (done != 0 && d.rail_peer_to(peer) == peer);
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
