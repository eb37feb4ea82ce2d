// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch.cuh: every token once to each rank that owns one of its experts, into a fixed slot
// there; the receiver copies it to the places of its experts.
// Send:    1 some blocks count this rank's tokens per expert and tell each peer
//          2 every block takes lanes of tokens: quantises a row and stores it to all its ranks at once, then
//            moves the lane's word at every peer. Few tokens, one to a lane, leave as lines instead: put
//            together in shared memory, stored with tags, no word after them
// Receive: 3 one warp of every block waits for all counts and finds where segments begin, while another
//            still publishes the block's stores
//          4 every warp takes (source, lane) pairs and copies messages out as their word moves or their
//            lines come
// Order:   rows of an expert by source, then by token, then by slot: the same in every run.
// Waits:   for the peers' reading of the call before last; step 3 for every peer's counts; step 4 for a
//          lane's word or lines.
// Cost:    per (token, rank): row, scales and 16 + 8 * K bytes, as lines 8/7 of that; per (lane, rank)
//          one word; per rank 8 * Le bytes.
#pragma once

#include "kernels/core/quantise.cuh"
#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

// A lane tells its peers how far it is after this many tokens, and at its end.
inline constexpr uint32_t kTokensPerWord = 4;
// Vectors of a message that a lane asks for at once: memory is far.
inline constexpr uint32_t kVecsInFlight = 4;
inline constexpr uint32_t kCountsInFlight = 8;

template <class MeshT, class Shape>
struct Dispatch {
  const LowLatencyDispatchArgs& a;
  const MeshT& mesh;
  const Shape& shape;
  Block block;
  Warp warp;
  Epoch epoch;

  WEFT_DEVICE uint32_t ranks() const { return static_cast<uint32_t>(shape.ranks); }
  WEFT_DEVICE uint32_t local_experts() const { return static_cast<uint32_t>(shape.experts_per_rank); }
  // Of local_experts() places for experts, the last ranks use fewer where experts do not divide evenly.
  WEFT_DEVICE uint32_t own_experts() const {
    const uint32_t first = mesh.rank() * local_experts();
    const uint32_t left = a.call.experts > first ? a.call.experts - first : 0;
    return left < local_experts() ? left : local_experts();
  }
  WEFT_DEVICE uint32_t top_k() const { return static_cast<uint32_t>(shape.top_k); }
  WEFT_DEVICE bool has_weights() const { return shape.weights != 0; }
  WEFT_DEVICE uint32_t rows_per_expert() const { return ranks() * a.call.max_tokens; }
  WEFT_DEVICE Lanes lanes() const { return a.call.lanes; }
  WEFT_DEVICE MessageLayout message() const {
    return message_layout(shape.top_k, has_weights(), shape.row_bytes, shape.scale_bytes);
  }
  // Whether this rank's tokens leave as lines: one lane has one token then, or none.
  WEFT_DEVICE bool sends_lines() const { return a.call.tokens <= a.line_tokens; }
  WEFT_DEVICE uint64_t tag() const { return line_tag(epoch.number); }
  WEFT_DEVICE RoutesLayout routes() const {
    return routes_layout(shape.ranks, lanes(), shape.top_k, has_weights());
  }
  WEFT_DEVICE uint64_t half_at() const { return half_offset(a.call, shape.ranks, epoch); }
  // Offset in the window of message `index` of a lane of a source.
  WEFT_DEVICE uint64_t message_at(uint32_t source, uint32_t lane, uint32_t index) const {
    const uint64_t slot = (uint64_t{source} * lanes().count + lane) * lanes().capacity + index;
    return half_at() + slot * message().stride;
  }
  // Where its only one stands if that comes as lines.
  WEFT_DEVICE uint64_t line_message_at(uint32_t source, uint32_t lane) const {
    const uint64_t slot = uint64_t{source} * lanes().count + lane;
    return half_at() + a.call.lines_at + slot * message().line_bytes();
  }

  // Offset in the window of a source's first count_word().
  WEFT_DEVICE uint64_t counts_at(uint32_t source) const {
    return control_offset(a.call, low_latency_control(shape.ranks).counts, kMaxExperts, epoch,
                          uint64_t{source} * local_experts());
  }
  WEFT_DEVICE const uint64_t* count_word_at(uint32_t source, uint32_t expert) const {
    return reinterpret_cast<const uint64_t*>(mesh.local() + counts_at(source)) + expert;
  }

  WEFT_DEVICE DispatchShared shared() const {
    return dispatch_shared(shape.ranks, shape.experts_per_rank, shape.top_k, block.warps(), message(),
                           a.line_tokens != 0);
  }
  template <class T>
  WEFT_DEVICE T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(block.shared() + offset);
  }
  WEFT_DEVICE uint32_t* present() const { return at<uint32_t>(shared().present); }
  WEFT_DEVICE uint32_t* sent() const { return at<uint32_t>(shared().sent); }
  WEFT_DEVICE uint32_t* gives() const { return at<uint32_t>(shared().gives); }
  WEFT_DEVICE uint32_t* found() const { return at<uint32_t>(shared().found); }
  WEFT_DEVICE uint32_t* so_far() const { return at<uint32_t>(shared().so_far); }
  WEFT_DEVICE uint32_t* begin() const { return at<uint32_t>(shared().begin); }
  // Of the current token, by slot; a slot without an expert has rank R.
  WEFT_DEVICE int32_t* slot_choice() const { return at<int32_t>(shared().slot); }
  WEFT_DEVICE uint32_t* slot_rank() const { return at<uint32_t>(shared().slot) + top_k(); }
  WEFT_DEVICE uint32_t* slot_expert() const { return slot_rank() + top_k(); }
  WEFT_DEVICE uint32_t* slot_place() const { return slot_expert() + top_k(); }
  // The ranks that the current token goes to.
  WEFT_DEVICE uint32_t* targets() const { return at<uint32_t>(shared().targets); }
  WEFT_DEVICE uint32_t* target() const { return at<uint32_t>(shared().target); }
  WEFT_DEVICE std::byte** place() const { return at<std::byte*>(shared().place); }
  // Where the warp's current message goes: rows, and the first word of each one's scales.
  WEFT_DEVICE int32_t* rows() const { return at<int32_t>(shared().row) + warp.index() * top_k(); }
  WEFT_DEVICE uint64_t* scales_at() const { return at<uint64_t>(shared().scales) + warp.index() * top_k(); }
  WEFT_DEVICE Vec16* head() const { return at<Vec16>(shared().head) + warp.index() * message().head_vecs(); }
  WEFT_DEVICE std::byte* heads(uint32_t target) const {
    return at<std::byte>(shared().heads) + target * message().row;
  }
  WEFT_DEVICE std::byte* image() const { return at<std::byte>(shared().image); }
};

// ---- step 1
// --------------------------------------------------------------------------------------------------------

template <class D>
WEFT_DEVICE void clear_choices(const D& d) {
  for (uint32_t i = d.block.rank(); i < d.ranks() * d.local_experts(); i += d.block.size()) d.so_far()[i] = 0;
}

// Adds up, in so_far(), what `entries` entries of topk_idx choose. Thread `rank` of the `size` that share the
// work.
template <class D>
WEFT_DEVICE void add_choices(const D& d, uint32_t entries, uint32_t rank, uint32_t size) {
  for (uint32_t i = rank; i < entries; i += size) {
    const int64_t expert = expert_at(d.a.call.topk_idx, d.a.call.id_bytes, i);
    if (expert >= 0 && expert < d.a.call.experts) add_local(&d.so_far()[expert], uint32_t{1});
  }
}

// The last blocks tell peers the counts: those without a lane, or the very last one.
template <class D>
WEFT_DEVICE Range counting_blocks(const D& d) {
  const uint32_t free = d.block.count() > d.lanes().count ? d.block.count() - d.lanes().count : 1;
  const uint32_t count = free < d.ranks() ? free : d.ranks();
  return {d.block.count() - count, d.block.count()};
}

// One warp per peer. `is_counted`: so_far() is already what all tokens choose.
template <class D>
WEFT_DEVICE void send_counts(const D& d, bool is_counted) {
  const Range blocks = counting_blocks(d);
  if (d.block.index() < blocks.first) return;
  if (!is_counted) {
    add_choices(d, d.a.call.tokens * d.top_k(), d.block.rank(), d.block.size());
    d.block.sync();
  }
  const auto share = static_cast<uint32_t>(blocks.last - blocks.first);
  const auto first = static_cast<uint32_t>(d.block.index() - blocks.first) + d.warp.index() * share;
  WEFT_ROLLED
  for (uint32_t peer = first; peer < d.ranks(); peer += d.block.warps() * share) {
    if (d.present()[peer] == 0) continue;
    auto* theirs = reinterpret_cast<uint64_t*>(d.mesh.to(peer).mapped() + d.counts_at(d.mesh.rank()));
    for (uint32_t i = d.warp.rank(); i < d.local_experts(); i += d.warp.size())
      store_relaxed(&theirs[i], count_word(d.epoch.number, d.so_far()[peer * d.local_experts() + i]));
    d.warp.sync();
    if (d.warp.rank() == 0) greet(d.a.call, d.mesh, d.epoch, peer, 0);
  }
  d.block.sync();  // a greeting would wait for all that the block sends by then
}

// ---- step 2
// --------------------------------------------------------------------------------------------------------

// A lane's tokens: consecutive ones.
template <class D>
WEFT_DEVICE Range lane_tokens(const D& d, uint32_t lane) {
  const uint32_t tokens = d.a.call.tokens;
  const uint32_t share = d.a.call.lane_tokens.value;
  const uint32_t first = lane * share < tokens ? lane * share : tokens;
  return {first, first + share < tokens ? first + share : tokens};
}

// One warp: reads what a token chose.
template <class D>
WEFT_DEVICE void read_choices(const D& d, uint32_t token) {
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size())
    d.slot_choice()[k] = static_cast<int32_t>(chosen_expert(d.a.call, d.top_k(), token, k));
  d.warp.sync();
}

// One warp, when the choices were read: finds where a token goes: its slots' ranks, experts and places there,
// and each rank once.
template <class D>
WEFT_DEVICE void route_token(const D& d, uint32_t lane) {
  uint32_t targets = 0;
  for (uint32_t first = 0; first < d.top_k(); first += d.warp.size()) {
    const uint32_t k = first + d.warp.rank();
    const int32_t expert = k < d.top_k() ? d.slot_choice()[k] : -1;
    const uint32_t rank = expert < 0 ? d.ranks() : static_cast<uint32_t>(expert) / d.local_experts();
    uint32_t twins = 0;
    bool is_first = true;
    WEFT_STREAM_LOOP
    for (uint32_t slot = 0; slot < d.top_k(); ++slot) {
      const int32_t other = kIsHost ? d.slot_choice()[slot] : d.warp.broadcast(expert, slot);
      const bool is_earlier = slot < k && other >= 0;
      twins += is_earlier && other == expert ? 1 : 0;
      is_first = is_first && !(is_earlier && static_cast<uint32_t>(other) / d.local_experts() == rank);
    }
    const bool goes = expert >= 0 && is_first && d.present()[rank] != 0;
    const uint32_t at = targets + d.warp.count_below(goes);
    targets += d.warp.count(goes);
    if (k < d.top_k()) {
      d.slot_rank()[k] = rank;
      d.slot_expert()[k] = expert < 0 ? 0 : static_cast<uint32_t>(expert) % d.local_experts();
      d.slot_place()[k] = expert < 0 ? 0 : d.so_far()[expert] + twins;
    }
    if (!goes) continue;
    d.target()[at] = rank;
    d.place()[at] =
        d.mesh.to(rank).mapped() + (d.sends_lines() ? d.line_message_at(d.mesh.rank(), lane)
                                                    : d.message_at(d.mesh.rank(), lane, d.sent()[rank]));
  }
  if (d.warp.rank() == 0) *d.targets() = targets;
}

// The same warp, after every slot was routed: the next token comes after this one.
template <class D>
WEFT_DEVICE void count_token(const D& d) {
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size())
    if (d.slot_choice()[k] >= 0) add_local(&d.so_far()[d.slot_choice()[k]], uint32_t{1});
  for (uint32_t i = d.warp.rank(); i < *d.targets(); i += d.warp.size()) d.sent()[d.target()[i]] += 1;
  d.warp.sync();
}

// Calls store(place) with where the current token's message is put together: at all its destinations, or in
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
  at_places(d, [&](std::byte* place) { store_watched(reinterpret_cast<Vec16*>(place + offset), vec); });
}

// What a thread of the block sends first of a row, which it asks for before it is known where the row goes:
// with kPayloadCopy vectors a block's size apart, with FP8 the channels of its first unit, else nothing.
inline constexpr uint32_t kFirstVecs = kLaneElems / 8;
struct FirstVecs {
  Vec16 held[kFirstVecs];
};
template <class D>
WEFT_DEVICE FirstVecs load_first_vecs(const D& d, uint32_t token) {
  FirstVecs first{};
  if (token >= d.a.call.tokens || d.shape.payload >= kPayloadMxfp8) return first;
  const auto* row = reinterpret_cast<const Vec16*>(d.a.x + token * d.a.x_row_bytes);
  const bool is_copy = d.shape.payload == kPayloadCopy;
  WEFT_UNROLL
  for (uint32_t v = 0; v < kFirstVecs; ++v) {
    const uint32_t at = is_copy ? d.block.rank() + v * d.block.size() : d.block.rank() * kFirstVecs + v;
    if (at < d.a.x_row_bytes / 16) first.held[v] = load_vec_streaming(row + at);
  }
  return first;
}

template <class D>
WEFT_DEVICE void send_row_as_is(const D& d, const std::byte* row, const std::byte* scales,
                                const FirstVecs& first) {
  const MessageLayout message = d.message();
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
    const uint32_t word = reinterpret_cast<const uint32_t*>(scales)[i];
    at_places(d, [&](std::byte* place) {
      store_watched(reinterpret_cast<uint32_t*>(place + message.scales) + i, word);
    });
  }
}

template <class D>
WEFT_DEVICE void send_scale(const D& d, uint32_t group, float scale) {
  const uint64_t scales = d.message().scales;
  at_places(d, [&](std::byte* place) {
    if (d.shape.payload == kPayloadFp8Exponent) {
      store_watched(reinterpret_cast<uint8_t*>(place + scales) + group, ue8m0(scale));
    } else {
      store_watched(reinterpret_cast<uint32_t*>(place + scales) + group, bits_of_float(scale));
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
    const Fp8Scale scale = fp8_scale(group_max(d.warp, values), d.shape.payload != kPayloadFp8);
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
    store_watched(reinterpret_cast<uint8_t*>(place + d.message().scales) + block, scale);
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
WEFT_DEVICE void send_row(const D& d, uint64_t token, const FirstVecs& first) {
  const std::byte* row = d.a.x + token * d.a.x_row_bytes;
  if (d.shape.payload == kPayloadCopy) {
    send_row_as_is(d, row, d.a.x_scales + token * d.shape.scale_bytes, first);
  } else if (d.shape.payload == kPayloadMxfp8) {
    send_row_in_blocks(d, row, Mxfp8{});
  } else if (d.shape.payload >= kPayloadNvfp4) {
    const float global = *reinterpret_cast<const float*>(d.a.x_scales);
    send_row_in_blocks(d, row, Nvfp4{global, d.shape.payload == kPayloadNvfp4Exponent});
  } else {
    send_row_as_fp8(d, row, first);
  }
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
    if (d.warp.rank() == 0) store_watched(head, token);
    for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size()) {
      store_watched(head + message.expert + k, d.slot_rank()[k] == rank ? d.slot_expert()[k] : ~uint32_t{0});
      store_watched(head + message.place + k, d.slot_place()[k]);
      if (d.has_weights())
        store_watched(head + message.weight + k,
                      bits_of_float(d.a.topk_weights[uint64_t{token} * d.top_k() + k]));
    }
  }
  d.warp.sync();
}

// Warp 0, after the block's stores: tells peers how many messages of the lane they have.
template <class D>
WEFT_DEVICE void move_words(const D& d, uint32_t lane, uint64_t done) {
  for (uint32_t peer = d.warp.rank(); peer < d.ranks(); peer += d.warp.size()) {
    if (d.present()[peer] == 0) continue;
    d.mesh.to(peer).put_value(word_offset(d.a.call, d.ranks(), d.epoch, d.mesh.rank(), lane),
                              d.epoch.number * kWordEpoch | done | d.sent()[peer]);
  }
}

// One warp, when a lane's only token was routed, if it has one: tells the peers to whom nothing goes.
template <class D>
WEFT_DEVICE void move_empty_words(const D& d, uint32_t lane) {
  for (uint32_t peer = d.warp.rank(); peer < d.ranks(); peer += d.warp.size()) {
    if (d.present()[peer] == 0 || d.sent()[peer] != 0) continue;
    std::byte* theirs =
        d.mesh.to(peer).mapped() + word_offset(d.a.call, d.ranks(), d.epoch, d.mesh.rank(), lane);
    store_relaxed(reinterpret_cast<uint64_t*>(theirs), d.epoch.number * kWordEpoch | kWordDone);
  }
}

// The current token's messages, from their image, as lines. The block.
template <class D>
WEFT_DEVICE void store_lines(const D& d) {
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

// The block puts a message together in shared memory while its last warp, which has least of the row, finds
// where it goes.
template <class D>
WEFT_DEVICE void send_token_as_lines(const D& d, uint32_t lane, uint32_t token, bool is_read,
                                     const FirstVecs& first) {
  if (d.warp.index() + 1 == d.block.warps()) {
    if (!is_read) read_choices(d, token);
    route_token(d, lane);
    d.warp.sync();
    write_heads(d, token);
  }
  send_row(d, token, first);
  d.block.sync();
  store_lines(d);
  if (d.warp.index() + 1 != d.block.warps()) return;
  count_token(d);
  move_empty_words(d, lane);
}

// One lane's tokens, in order. The block. `is_ready`: so_far() is already what earlier lanes choose, and the
// first token's choices were read. `first` is of the first token.
template <class D>
WEFT_DEVICE void send_lane(const D& d, uint32_t lane, bool is_ready, FirstVecs first) {
  const Span traced(d.a.call.wait.trace, Work::kSendLane, d.block.rank() == 0);
  const Range tokens = lane_tokens(d, lane);
  for (uint32_t i = d.block.rank(); i < d.ranks(); i += d.block.size()) d.sent()[i] = 0;
  if (!is_ready) {
    clear_choices(d);
    d.block.sync();
    add_choices(d, tokens.first * d.top_k(), d.block.rank(), d.block.size());
  }
  d.block.sync();
  if (tokens.first == tokens.last) {
    if (d.warp.index() == 0) move_empty_words(d, lane);
    return;
  }
  if (d.sends_lines()) return send_token_as_lines(d, lane, tokens.first, is_ready, first);
  WEFT_ROLLED
  for (uint32_t token = tokens.first; token < tokens.last; ++token) {
    if (token != tokens.first) first = load_first_vecs(d, token);
    if (d.warp.index() == 0) {
      if (!is_ready || token != tokens.first) read_choices(d, token);
      route_token(d, lane);
    }
    d.block.sync();
    send_row(d, token, first);
    if (d.warp.index() + 1 == d.block.warps()) write_heads(d, token);  // it has least of the row
    d.block.sync();
    if (d.warp.index() != 0) continue;
    count_token(d);
    if ((token - tokens.first) % kTokensPerWord == kTokensPerWord - 1 && token + 1 < tokens.last)
      move_words(d, lane, 0);
  }
  // The other warps go on: publishing waits until the last store has arrived.
  if (d.warp.index() == 0) move_words(d, lane, kWordDone);
}

template <class D>
WEFT_DEVICE void send_lanes(const D& d, bool first_is_ready, const FirstVecs& first) {
  WEFT_ROLLED
  for (uint32_t lane = d.block.index(); lane < d.lanes().count; lane += d.block.count()) {
    const bool is_first = lane == d.block.index();
    if (!is_first) d.block.sync();
    send_lane(d, lane, is_first && first_is_ready,
              is_first ? first : load_first_vecs(d, lane_tokens(d, lane).first));
  }
}

// ---- step 3
// --------------------------------------------------------------------------------------------------------

// One lane: waits for what sources first .. first+kCountsInFlight-1 have for an expert here, and notes it in
// begin(). A source that does not say gives nothing.
template <class D>
WEFT_DEVICE void await_counts(const D& d, uint32_t first, uint32_t expert) {
  Span traced(d.a.call.wait.trace, Site::kLowLatencyDispatchRecv, first);
  uint64_t words[kCountsInFlight] = {};
  auto is_missing = [&](uint32_t i) {
    return first + i < d.ranks() && d.gives()[first + i] != 0 && !is_of_call(words[i], d.epoch.number);
  };
  auto all_came = [&] {
    bool came = true;
    WEFT_UNROLL
    for (uint32_t i = 0; i < kCountsInFlight; ++i)
      if (first + i < d.ranks()) words[i] = load_relaxed(d.count_word_at(first + i, expert));
    WEFT_UNROLL
    for (uint32_t i = 0; i < kCountsInFlight; ++i) {
      if (!is_missing(i)) continue;
      traced.set_peer(first + i);
      came = false;
    }
    return came;
  };
  uint64_t waited_ns = 0;
  const bool came = poll(d.a.call.wait, waited_ns, all_came);
  WEFT_UNROLL
  for (uint32_t i = 0; i < kCountsInFlight; ++i)
    if (first + i < d.ranks())
      d.begin()[(first + i) * d.local_experts() + expert] = static_cast<uint32_t>(words[i]);
  WEFT_ROLLED
  for (uint32_t source = first; !came && source < d.ranks() && source < first + kCountsInFlight; ++source) {
    const uint64_t word = load_relaxed(d.count_word_at(source, expert));
    if (d.gives()[source] == 0 || is_of_call(word, d.epoch.number)) continue;
    lose(d.a.call, source, Site::kLowLatencyDispatchRecv, d.epoch.number, word >> 32, waited_ns);
    d.gives()[source] = 0;
  }
}

// The last block, which has least to unpack, finds out who means another call; on the host, where that is
// near, each does. The warp.
template <class D>
WEFT_DEVICE void check_sources(const D& d) {
  for (uint32_t source = d.warp.rank(); source < d.ranks(); source += d.warp.size())
    if (d.gives()[source] != 0 &&
        (!await_greeting(d.a.call, d.mesh, d.epoch, source, Site::kLowLatencyDispatchRecv) ||
         !agrees(d.a.call, d.mesh, d.epoch, source, 0)))
      d.gives()[source] = 0;
  d.warp.sync();
}

// One warp: waits for the counts of all sources; begin()[source][expert] becomes where its segment begins.
// The last block also reports them.
template <class D>
WEFT_DEVICE void find_segments(const D& d) {
  const bool reports = d.block.index() + 1 == d.block.count();
  for (uint32_t source = d.warp.rank(); source < d.ranks(); source += d.warp.size())
    d.gives()[source] = d.present()[source];
  d.warp.sync();
  if (reports || kIsHost) check_sources(d);  // first: who means another call tells other counts
  WEFT_ROLLED
  for (uint32_t expert = d.warp.rank(); expert < d.own_experts(); expert += d.warp.size())
    for (uint32_t first = 0; first < d.ranks(); first += kCountsInFlight) await_counts(d, first, expert);
  d.warp.sync();
  WEFT_ROLLED
  for (uint32_t expert = d.warp.rank(); expert < d.own_experts(); expert += d.warp.size()) {
    uint32_t begin = 0;
    WEFT_ROLLED
    for (uint32_t source = 0; source < d.ranks(); ++source) {
      uint32_t& segment = d.begin()[source * d.local_experts() + expert];
      const uint32_t count = d.gives()[source] != 0 ? segment : 0;
      segment = begin;
      if (reports)
        d.a.layout_range[uint64_t{expert} * d.ranks() + source] =
            static_cast<int64_t>(uint64_t{begin} << 32 | count);
      begin += count;
    }
    if (!reports) continue;
    // Only tokens that name an expert more than once can bring more rows than there are tokens.
    if (begin > d.rows_per_expert())
      raise(d.a.call.wait.fault, Site::kLowLatencyCapacity, d.a.call.wait.self, expert, d.rows_per_expert(),
            begin, 0);
    d.a.counts[expert] = static_cast<int32_t>(begin);
    if (d.a.expert_stats) d.a.expert_stats[expert] += static_cast<int32_t>(begin);
  }
  if (reports && d.warp.rank() == 0) {
    *reinterpret_cast<uint64_t*>(d.a.routes + d.routes().epoch) = d.epoch.number;
    d.a.routes[d.routes().lines] = d.sends_lines() ? 1 : 0;
  }
  d.warp.sync();
  if (d.warp.rank() == 0) store_release_block(d.found(), uint32_t{1});
}

// Every warp: waits until find_segments(), whose own waits are bounded, is done.
template <class D>
WEFT_DEVICE void await_segments(const D& d) {
  for (uint32_t polls = 0; load_acquire_block(d.found()) == 0; ++polls) pause_near(polls);
  d.warp.sync();
}

// ---- step 4
// --------------------------------------------------------------------------------------------------------

// Where the scales of a row begin, in words.
template <class D>
WEFT_DEVICE uint64_t scales_of(const D& d, uint32_t expert, uint64_t in_expert) {
  const uint64_t row = d.a.tiled_scales ? tiled_row(in_expert, static_cast<uint64_t>(d.shape.scale_bytes) / 4)
                                        : in_expert * d.a.scale_row_stride;
  return expert * d.a.scale_expert_stride + row;
}

// Where the row of slot k of the message in head() goes, or -1: not here.
struct RowPlace {
  int32_t row;
  uint32_t expert;
  uint64_t in_expert;
};
template <class D>
WEFT_DEVICE RowPlace row_place(const D& d, uint32_t source, uint32_t k) {
  const auto* head = reinterpret_cast<const uint32_t*>(d.head());
  const uint32_t expert = head[d.message().expert + k];
  // A rank that disagrees about sizes, which the call reports, may have written over this message.
  if (expert >= d.own_experts() || d.gives()[source] == 0) return {-1, 0, 0};
  const uint64_t in_expert = d.begin()[source * d.local_experts() + expert] + head[d.message().place + k];
  if (in_expert >= d.rows_per_expert()) return {-1, 0, 0};
  return {static_cast<int32_t>(expert * d.rows_per_expert() + in_expert), expert, in_expert};
}

// One lane per slot: lists in rows() where the rows of the message in head() go, and returns how many. The
// warp.
template <class D>
WEFT_DEVICE uint32_t place_message(const D& d, uint32_t source) {
  await_segments(d);
  uint32_t count = 0;
  for (uint32_t first = 0; first < d.top_k(); first += d.warp.size()) {
    const uint32_t k = first + d.warp.rank();
    const RowPlace place = k < d.top_k() ? row_place(d, source, k) : RowPlace{-1, 0, 0};
    const bool is_here = place.row >= 0;
    const uint32_t at = count + d.warp.count_below(is_here);
    count += d.warp.count(is_here);
    if (!is_here) continue;
    d.rows()[at] = place.row;
    d.scales_at()[at] = scales_of(d, place.expert, place.in_expert);
  }
  d.warp.sync();
  return count;
}

// One lane per slot, when nobody waits any more: notes where the rows of the message in head() came from, and
// what the combine will need to know. The warp.
template <class D>
WEFT_DEVICE void note_message(const D& d, uint32_t source, int32_t* record) {
  const auto* head = reinterpret_cast<const uint32_t*>(d.head());
  const auto token = static_cast<int32_t>(head[0]);
  if (d.warp.rank() == 0) record[0] = token;
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size()) {
    const RowPlace place = row_place(d, source, k);
    const uint32_t weight = d.has_weights() ? head[d.message().weight + k] : 0;
    record[1 + k] = place.row;
    if (d.has_weights()) record[1 + d.top_k() + k] = static_cast<int32_t>(weight);
    if (place.row < 0) continue;
    d.a.src_info[place.row] = token;
    if (d.a.out_weights && d.has_weights()) d.a.out_weights[place.row] = float_of_bits(weight);
    if (d.a.out_source) d.a.out_source[place.row] = static_cast<int32_t>(source);
  }
}

// Where the words of a row of scales go that vector `vec` of a message's body holds.
template <class D>
WEFT_DEVICE void store_scales(const D& d, uint32_t count, uint32_t vec, const Vec16& held) {
  const uint32_t first = vec * 4 - static_cast<uint32_t>(d.shape.row_bytes / 4);
  const auto words = static_cast<uint32_t>(d.shape.scale_bytes / 4);
  WEFT_ROLLED
  for (uint32_t k = 0; k < count; ++k) {
    uint32_t* out = d.a.out_scales + d.scales_at()[k] + first * d.a.scale_word_stride;
    WEFT_UNROLL
    for (uint32_t w = 0; w < 4; ++w)
      if (first + w < words) out[w * d.a.scale_word_stride] = held.words[w];
  }
}

// Stores kVecsInFlight vectors of a message's body to the listed rows; of each, which it is, or one beyond
// the body.
template <class D>
WEFT_DEVICE void store_body(const D& d, uint32_t count, const uint32_t (&vecs)[kVecsInFlight],
                            const Vec16 (&held)[kVecsInFlight]) {
  const auto row_vecs = static_cast<uint32_t>(d.shape.row_bytes / sizeof(Vec16));
  WEFT_ROLLED
  for (uint32_t k = 0; k < count; ++k) {
    auto* row = reinterpret_cast<Vec16*>(d.a.out + static_cast<uint64_t>(d.rows()[k]) * d.shape.row_bytes);
    WEFT_UNROLL
    for (uint32_t i = 0; i < kVecsInFlight; ++i)
      if (vecs[i] < row_vecs) store_vec(row + vecs[i], held[i]);
  }
  WEFT_UNROLL
  for (uint32_t i = 0; i < kVecsInFlight; ++i)
    if (d.shape.scale_bytes != 0 && vecs[i] >= row_vecs && vecs[i] < d.message().body_vecs())
      store_scales(d, count, vecs[i], held[i]);
}

// A message on its way here, of which this warp copies one part of the body.
template <class D>
struct Incoming {
  const D& d;
  uint32_t source;
  uint32_t lane;
  uint32_t split;
  Wire wire;  // of the body
  Range part;
  const Vec16* message;            // the lines, until a word says that there are others
  Vec16 held[kVecsInFlight] = {};  // of the part, from its first on
  bool has_chunk = false;          // these were asked for
  bool came = false;               // in this lane, all of these

  WEFT_DEVICE Incoming(const D& dispatch, uint32_t from, uint32_t of_lane, uint32_t of_split)
      : d(dispatch),
        source(from),
        lane(of_lane),
        split(of_split),
        wire{d.a.call.lines != 0, d.message().body_vecs(), d.tag()},
        part(wire.range(split, d.a.receive_splits)),
        message(reinterpret_cast<const Vec16*>(d.mesh.local() + d.line_message_at(source, lane))) {}

  WEFT_DEVICE void load(uint32_t first) {
    const uint32_t head_vecs = d.message().head_vecs();
    const Vec16* body = message + (wire.lines ? parts_of(head_vecs) : head_vecs);
    came = true;
    WEFT_UNROLL
    for (uint32_t i = 0; i < kVecsInFlight; ++i) {
      const uint32_t index = first + d.warp.rank() + i * d.warp.size();
      if (index < part.last) came = wire.load(body, index, held[i]) && came;
    }
  }

  // A look at the head of lines, and, if the others are likely to come with it, at the part. Each lane's own.
  WEFT_DEVICE bool look(bool takes_chunk) {
    has_chunk = takes_chunk;
    if (takes_chunk) load(part.first);
    const bool head_came = take_lines(d.warp, message, d.message().head_vecs(), d.tag(), d.head());
    return head_came && (!takes_chunk || came);
  }
  // What a word says has come.
  WEFT_DEVICE void take(uint32_t index) {
    if (wire.lines) {
      wire.lines = false;
      part = wire.range(split, d.a.receive_splits);
    }
    message = reinterpret_cast<const Vec16*>(d.mesh.local() + d.message_at(source, lane, index));
    load(part.first);
    has_chunk = true;
    for (uint32_t i = d.warp.rank(); i < d.message().head_vecs(); i += d.warp.size())
      d.head()[i] = load_vec_fresh(message + i);
  }

  // Copies the part to its places, and notes the record, if any, once the head has come. False: the rest of
  // the lines did not. The warp.
  WEFT_DEVICE bool unpack(int32_t* record) {
    const Span traced(d.a.call.wait.trace, Work::kUnpack, d.warp.rank() == 0, source);
    d.warp.sync();
    const uint32_t count = place_message(d, source);
    WEFT_ROLLED
    for (uint32_t first = part.first; first < part.last; first += kVecsInFlight * d.warp.size()) {
      if (!has_chunk) load(first);
      has_chunk = false;
      if (wire.lines && d.warp.any(!came) && !await_chunk(first)) return false;
      uint32_t vecs[kVecsInFlight];
      WEFT_UNROLL
      for (uint32_t i = 0; i < kVecsInFlight; ++i) {
        const uint32_t index = first + d.warp.rank() + i * d.warp.size();
        vecs[i] = index < part.last && wire.holds(index) ? wire.vec(index) : ~uint32_t{0};
      }
      store_body(d, count, vecs, held);
    }
    if (record) note_message(d, source, record);
    d.warp.sync();
    return true;
  }
  WEFT_DEVICE bool await_chunk(uint32_t first) {
    return await_lines(d.a.call, d.warp, d.mesh, d.epoch, source, Site::kLowLatencyDispatchRecv, [&] {
      load(first);
      return !d.warp.any(!came);
    });
  }
};

template <class D>
WEFT_DEVICE const uint64_t* lane_word(const D& d, uint32_t source, uint32_t lane) {
  return reinterpret_cast<const uint64_t*>(d.mesh.local() +
                                           word_offset(d.a.call, d.ranks(), d.epoch, source, lane));
}

// Waits until a lane's word reaches `want`, or, where lines may come instead, until the first message's do:
// then the word is less. The warp. False: neither came.
template <class D>
WEFT_DEVICE bool await_either(const D& d, Incoming<D>& incoming, uint64_t want, uint64_t& word) {
  const uint64_t* at = lane_word(d, incoming.source, incoming.lane);
  const bool takes_chunk = d.sends_lines();  // who has few tokens has peers who have few
  auto look = [&] {
    word = d.warp.rank() == 0 ? load_signal(at) : 0;
    const bool came = incoming.look(takes_chunk);
    return !d.warp.any(!came) || d.warp.any(word >= want);
  };
  const bool is_there =
      await_lines(d.a.call, d.warp, d.mesh, d.epoch, incoming.source, Site::kLowLatencyDispatchRecv, look);
  word = d.warp.broadcast(word);
  return is_there;
}
template <class D>
WEFT_DEVICE bool await_word(const D& d, const Incoming<D>& incoming, uint64_t want, uint64_t& word) {
  word = 0;
  if (d.warp.rank() == 0 && !await(d.a.call, lane_word(d, incoming.source, incoming.lane), want,
                                   incoming.source, Site::kLowLatencyDispatchRecv, kWordEpoch, word))
    word = 0;
  word = d.warp.broadcast(word);
  return word >= want;
}

// Follows one lane until all its messages are unpacked. Returns what is to be noted of it. The warp.
template <class D>
WEFT_DEVICE uint32_t receive_messages(const D& d, uint32_t source, uint32_t lane, uint32_t split) {
  const uint64_t start = cycles();
  Incoming<D> incoming(d, source, lane, split);
  uint32_t unpacked = 0;
  for (uint64_t word = 0; (word & kWordDone) == 0;) {
    const uint64_t want = d.epoch.number * kWordEpoch + unpacked + 1;
    const bool is_first = unpacked == 0;
    if (!(is_first && incoming.wire.lines ? await_either(d, incoming, want, word)
                                          : await_word(d, incoming, want, word)))
      break;
    if (is_first && lane == 0 && split == 0 && d.a.call.wait_cycles && d.warp.rank() == 0)
      add_local(&d.a.call.wait_cycles[source], cycles() - start);
    const bool are_lines = word < want;
    if (are_lines) word = kWordDone | 1;  // a lane of lines has one message
    const auto arrived = static_cast<uint32_t>(word & kMaxLaneTokens);
    const RoutesLayout routes = d.routes();
    const uint64_t slot = (uint64_t{source} * d.lanes().count + lane) * d.lanes().capacity;
    WEFT_ROLLED
    for (; unpacked < arrived; ++unpacked) {
      if (!are_lines) incoming.take(unpacked);
      int32_t* record = d.a.routes + routes.records + (slot + unpacked) * routes.record_words;
      if (!incoming.unpack(split == 0 ? record : nullptr)) return 0;
    }
    if (are_lines) return 1 | kCameAsLines;
  }
  return unpacked;
}

template <class D>
WEFT_DEVICE void receive_lane(const D& d, uint32_t source, uint32_t lane, uint32_t split) {
  const uint32_t came = d.present()[source] == 0 ? 0 : receive_messages(d, source, lane, split);
  if (split == 0 && d.warp.rank() == 0)
    d.a.routes[d.routes().counts + uint64_t{source} * d.lanes().count + lane] = static_cast<int32_t>(came);
}

// Each rank starts with itself and goes on with its successor, so that it follows the order of arrival.
template <class D>
WEFT_DEVICE void receive_lanes(const D& d) {
  const WarpShare share = warp_share(d.block, d.warp);
  WEFT_ROLLED
  for (uint32_t job = share.index; job < d.a.source_jobs.value * d.ranks(); job += share.total) {
    const uint32_t source = (d.mesh.rank() + job / d.a.source_jobs) % d.ranks();
    const uint32_t in_source = job % d.a.source_jobs;
    receive_lane(d, source, in_source / d.a.receive_splits, in_source % d.a.receive_splits);
  }
}

// The first token of the block's first lane; all tokens where it has none.
template <class D>
WEFT_DEVICE uint32_t first_token(const D& d) {
  return d.block.index() < d.lanes().count ? lane_tokens(d, d.block.index()).first : d.a.call.tokens;
}

// What a block can do before it knows the call's number: read what its first token chose, and count what
// tokens before that one choose, or what all tokens choose where it has no lane. Returns whether it did; a
// block that needs both counts later. Warps from the second on, unless there is but one, since the first is
// busy.
template <class D>
WEFT_DEVICE bool prepare_send(const D& d) {
  const bool has_lane = d.block.index() < d.lanes().count;
  const bool tells = d.block.index() >= counting_blocks(d).first;
  const bool counts = has_lane != tells;
  const uint32_t apart = d.block.warps() > 1 ? d.warp.size() : 0;
  if (d.block.rank() < apart) return counts;
  const uint32_t rank = d.block.rank() - apart;
  const uint32_t size = d.block.size() - apart;
  if (!counts) return false;
  const uint32_t first = first_token(d);
  if (rank < d.warp.size() && first < d.a.call.tokens) read_choices(d, first);
  add_choices(d, first * d.top_k(), rank, size);
  return true;
}

}  // namespace low_latency

template <class MeshT, class Shape>
WEFT_KERNEL void low_latency_dispatch(const LowLatencyDispatchArgs& a, const MeshT& mesh,
                                      const Shape& shape) {
  low_latency::Dispatch<MeshT, Shape> d{a, mesh, shape, Block{}, Warp{}, {}};
  const low_latency::Joined joined = low_latency::join(a.call, d.block, d.warp, mesh);
  const Span traced(a.call.wait.trace, Work::kLowLatencyCall, d.block.rank() == 0);
  auto* shared_epoch = d.template at<uint64_t>(0);
  const bool sends = (a.call.phases & kPhaseSend) != 0;
  if (sends) low_latency::clear_choices(d);
  if (d.block.rank() == 0) *d.found() = 0;
  d.block.sync();
  // Asked for at once; used when it is known where it goes.
  const low_latency::FirstVecs first =
      low_latency::load_first_vecs(d, sends ? low_latency::first_token(d) : a.call.tokens);
  bool is_ready = false;
  d.epoch = low_latency::begin_call(a.call, d.block, d.warp, mesh, joined, shared_epoch, d.present(),
                                    Site::kLowLatencyDispatchSlot,
                                    [&] { is_ready = sends && low_latency::prepare_send(d); });
  if (sends) {
    low_latency::send_counts(d, is_ready);
    low_latency::send_lanes(d, is_ready, first);
  }
  if (a.call.phases & kPhaseReceive) {
    if (d.warp.index() == (d.block.warps() > 1 ? 1 : 0)) low_latency::find_segments(d);
    low_latency::receive_lanes(d);
  }
}

}  // namespace weft
