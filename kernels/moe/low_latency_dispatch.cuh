// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch.cuh: every token once to each rank that owns one of its experts, into a fixed slot there; the
// receiver copies it to the places of its experts.
// Send:     1 some blocks count this rank's tokens per expert and tell each peer   2 every block takes lanes of tokens:
//           quantises a row and stores it to all its ranks at once, then moves the lane's word at every peer
// Receive:  3 every block waits for all counts, so that it knows where segments begin   4 every warp takes (source, lane)
//           pairs and copies messages out as their word moves
// Order:    rows of an expert by source, then by token, then by slot: the same in every run.
// Waits:    for the peers' reading of the call before last; step 3 for every peer's counts; step 4 for a lane's word.
// Cost:     per (token, rank): row, scales and 16 + 8 * K bytes; per (lane, rank) one word; per rank 4 * Le bytes.
#pragma once

#include "kernels/core/quantise.cuh"
#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

// A lane tells its peers how far it is after this many tokens, and at its end.
inline constexpr uint32_t kTokensPerWord = 4;
inline constexpr uint32_t kVecsInFlight = 4;

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
  WEFT_DEVICE uint64_t rows_per_expert() const { return uint64_t{ranks()} * a.call.max_tokens; }
  WEFT_DEVICE Lanes lanes() const { return lanes_of(a.call.max_tokens); }
  WEFT_DEVICE MessageLayout message() const {
    return message_layout(shape.top_k, has_weights(), shape.row_bytes, shape.scale_bytes);
  }
  WEFT_DEVICE DispatchHalf half() const {
    return dispatch_half(shape.ranks, shape.experts_per_rank, lanes(), message().bytes);
  }
  WEFT_DEVICE RoutesLayout routes() const { return routes_layout(shape.ranks, lanes(), shape.top_k, has_weights()); }
  WEFT_DEVICE uint64_t half_at() const { return half_offset(a.call, shape.ranks, epoch); }
  // Offset in the window of message `index` of a lane of a source.
  WEFT_DEVICE uint64_t message_at(uint32_t source, uint32_t lane, uint32_t index) const {
    const uint64_t slot = (uint64_t{source} * lanes().count + lane) * lanes().capacity + index;
    return half_at() + half().messages + slot * message().bytes;
  }

  WEFT_DEVICE DispatchShared shared() const {
    return dispatch_shared(shape.ranks, shape.experts_per_rank, shape.top_k, block.warps());
  }
  template <class T>
  WEFT_DEVICE T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(block.shared() + offset);
  }
  WEFT_DEVICE uint32_t* present() const { return at<uint32_t>(shared().present); }
  WEFT_DEVICE uint32_t* sent() const { return at<uint32_t>(shared().sent); }
  WEFT_DEVICE uint32_t* table() const { return at<uint32_t>(shared().table); }
  WEFT_DEVICE std::byte** place() const { return at<std::byte*>(shared().place); }
  // Of the current token, by slot; a slot without an expert has rank R.
  WEFT_DEVICE uint32_t* slot_rank() const { return at<uint32_t>(shared().slot); }
  WEFT_DEVICE uint32_t* slot_expert() const { return slot_rank() + top_k(); }
  WEFT_DEVICE uint32_t* slot_place() const { return slot_expert() + top_k(); }
  WEFT_DEVICE int32_t* rows() const { return at<int32_t>(shared().row) + warp.index() * top_k(); }
};

// ---- step 1 --------------------------------------------------------------------------------------------------------

// Adds up, in table[expert - first_expert], the choices of `entries` entries of topk_idx for `experts` experts. The block.
template <class D>
WEFT_DEVICE void count_choices(const D& d, uint64_t entries, uint32_t first_expert, uint32_t experts) {
  for (uint32_t i = d.block.rank(); i < experts; i += d.block.size()) d.table()[i] = 0;
  d.block.sync();
  for (uint64_t i = d.block.rank(); i < entries; i += d.block.size()) {
    const int64_t expert = expert_at(d.a.call.topk_idx, d.a.call.id_bytes, i);
    if (expert >= first_expert && expert < int64_t{first_expert} + experts && expert < d.a.call.experts)
      add_local(&d.table()[expert - first_expert], uint32_t{1});
  }
  d.block.sync();
}

// The last blocks count, one peer each: they have the fewest lanes.
template <class D>
WEFT_DEVICE void send_counts(const D& d) {
  for (uint32_t peer = d.block.count() - 1 - d.block.index(); peer < d.ranks(); peer += d.block.count()) {
    if (d.present()[peer] == 0) continue;
    count_choices(d, uint64_t{d.a.call.tokens} * d.top_k(), peer * d.local_experts(), d.local_experts());
    auto* theirs = reinterpret_cast<uint32_t*>(d.mesh.to(peer).mapped() + d.half_at() + d.half().counts) +
                   uint64_t{d.mesh.rank()} * d.local_experts();
    for (uint32_t i = d.block.rank(); i < d.local_experts(); i += d.block.size()) theirs[i] = d.table()[i];
    d.block.sync();
    if (d.block.rank() == 0) greet(d.a.call, d.mesh, d.epoch, peer, 0);
  }
}

// ---- step 2 --------------------------------------------------------------------------------------------------------

// Warp 0: finds where a token goes. Its first slot for a rank carries the message.
template <class D>
WEFT_DEVICE void route_token(const D& d, uint32_t lane, uint32_t token) {
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size()) {
    const int64_t expert = chosen_expert(d.a.call, d.top_k(), token, k);
    const uint32_t rank = expert < 0 ? d.ranks() : static_cast<uint32_t>(expert) / d.local_experts();
    uint32_t twins = 0;
    bool is_first = true;
    for (uint32_t earlier = 0; earlier < k; ++earlier) {
      const int64_t other = chosen_expert(d.a.call, d.top_k(), token, earlier);
      if (other < 0) continue;
      twins += other == expert ? 1 : 0;
      is_first = is_first && static_cast<uint32_t>(other) / d.local_experts() != rank;
    }
    const bool goes = expert >= 0 && is_first && d.present()[rank] != 0;
    d.slot_rank()[k] = rank;
    d.slot_expert()[k] = expert < 0 ? 0 : static_cast<uint32_t>(expert) % d.local_experts();
    d.slot_place()[k] = expert < 0 ? 0 : d.table()[expert] + twins;
    d.place()[k] = goes ? d.mesh.to(rank).mapped() + d.message_at(d.mesh.rank(), lane, d.sent()[rank]) : nullptr;
  }
}

// Warp 0, after every slot was routed: the next token comes after this one.
template <class D>
WEFT_DEVICE void count_token(const D& d) {
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size()) {
    if (d.slot_rank()[k] == d.ranks()) continue;
    add_local(&d.table()[d.slot_rank()[k] * d.local_experts() + d.slot_expert()[k]], uint32_t{1});
    if (d.place()[k]) d.sent()[d.slot_rank()[k]] += 1;
  }
  d.warp.sync();
}

template <class D>
WEFT_DEVICE void store_to_all(const D& d, uint64_t offset, Vec16 vec) {
  for (uint32_t k = 0; k < d.top_k(); ++k)
    if (std::byte* place = d.place()[k]) store_vec(reinterpret_cast<Vec16*>(place + offset), vec);
}

template <class D>
WEFT_DEVICE void send_row_as_is(const D& d, const std::byte* row, const std::byte* scales) {
  const MessageLayout message = d.message();
  for (uint32_t i = d.block.rank(); i < d.shape.row_bytes / 16; i += d.block.size())
    store_to_all(d, message.row + i * 16, load_vec_streaming(reinterpret_cast<const Vec16*>(row) + i));
  for (uint32_t i = d.block.rank(); i < d.shape.scale_bytes / 4; i += d.block.size()) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(scales)[i];
    for (uint32_t k = 0; k < d.top_k(); ++k)
      if (std::byte* place = d.place()[k]) reinterpret_cast<uint32_t*>(place + message.scales)[i] = word;
  }
}

template <class D>
WEFT_DEVICE void send_scale(const D& d, uint32_t group, float scale) {
  const uint64_t scales = d.message().scales;
  for (uint32_t k = 0; k < d.top_k(); ++k) {
    std::byte* place = d.place()[k];
    if (!place) continue;
    if (d.shape.payload == kPayloadFp8Exponent) {
      reinterpret_cast<uint8_t*>(place + scales)[group] = ue8m0(scale);
    } else {
      reinterpret_cast<float*>(place + scales)[group] = scale;
    }
  }
}

// kGroupLanes neighbours take a group of channels; a warp's lanes stay together, since they exchange maxima.
template <class D>
WEFT_DEVICE void send_row_as_fp8(const D& d, const std::byte* row) {
  const uint32_t units = static_cast<uint32_t>(d.shape.row_bytes) / kLaneElems;
  for (uint32_t first = d.warp.index() * d.warp.size(); first < units; first += d.block.size()) {
    const uint32_t unit = first + d.warp.rank();
    const bool is_inside = unit < units;
    float values[kLaneElems];
    load_lane(values, is_inside ? row + uint64_t{unit} * kLaneElems * 2 : nullptr);
    const Fp8Scale scale = fp8_scale(group_max(d.warp, values), d.shape.payload != kPayloadFp8);
    if (!is_inside) continue;
    const Fp8Lane lane = fp8_lane(values, scale.multiply);
    for (uint32_t v = 0; v < kLaneElems / 16; ++v)
      store_to_all(d, d.message().row + uint64_t{unit} * kLaneElems + v * 16, lane.vecs[v]);
    if (unit % kGroupLanes == 0) send_scale(d, unit / kGroupLanes, scale.scale);
  }
}

// Word `index` of the head of the current token's message to `rank`.
template <class D>
WEFT_DEVICE uint32_t head_word(const D& d, uint32_t token, uint32_t rank, uint32_t index) {
  const MessageLayout message = d.message();
  if (index < message.expert) return index == 0 ? token : 0;
  const uint32_t k = (index - static_cast<uint32_t>(message.expert)) % d.top_k();
  if (index < message.place) return d.slot_rank()[k] == rank ? d.slot_expert()[k] : ~uint32_t{0};
  if (index < message.weight) return d.slot_place()[k];
  const bool has_weight = d.has_weights() && index < message.weight + d.top_k();
  return has_weight ? bits_of_float(d.a.topk_weights[uint64_t{token} * d.top_k() + k]) : 0;
}

template <class D>
WEFT_DEVICE void send_heads(const D& d, uint32_t token) {
  const uint32_t vecs = static_cast<uint32_t>(d.message().row / 16);
  for (uint32_t i = d.block.rank(); i < d.top_k() * vecs; i += d.block.size()) {
    std::byte* place = d.place()[i / vecs];
    if (!place) continue;
    Vec16 vec;
    for (uint32_t w = 0; w < 4; ++w) vec.words[w] = head_word(d, token, d.slot_rank()[i / vecs], i % vecs * 4 + w);
    store_vec(reinterpret_cast<Vec16*>(place) + i % vecs, vec);
  }
}

// Warp 0, after the block's stores: tells peers how many messages of the lane they have.
template <class D>
WEFT_DEVICE void move_words(const D& d, uint32_t lane, uint64_t done) {
  for (uint32_t peer = d.warp.rank(); peer < d.ranks(); peer += d.warp.size()) {
    if (d.present()[peer] == 0) continue;
    d.mesh.to(peer).signal(word_offset(d.a.call, d.ranks(), d.epoch, d.mesh.rank(), lane),
                           d.epoch.number * kWordEpoch | done | d.sent()[peer]);
  }
}

// One lane's tokens, in order. The block.
template <class D>
WEFT_DEVICE void send_lane(const D& d, uint32_t lane) {
  const uint32_t tokens = d.a.call.tokens;
  const uint32_t share = d.lanes().share(tokens);
  const uint32_t first = lane * share < tokens ? lane * share : tokens;
  const uint32_t last = first + share < tokens ? first + share : tokens;
  for (uint32_t i = d.block.rank(); i < d.ranks(); i += d.block.size()) d.sent()[i] = 0;
  if (first < last) count_choices(d, uint64_t{first} * d.top_k(), 0, d.ranks() * d.local_experts());
  d.block.sync();
  for (uint32_t token = first; token < last; ++token) {
    if (d.warp.index() == 0) route_token(d, lane, token);
    d.block.sync();
    const std::byte* row = d.a.x + token * d.a.x_row_bytes;
    if (d.shape.payload == kPayloadCopy) {
      send_row_as_is(d, row, d.a.x_scales + uint64_t{token} * d.shape.scale_bytes);
    } else {
      send_row_as_fp8(d, row);
    }
    send_heads(d, token);
    d.block.sync();
    if (d.warp.index() != 0) continue;
    count_token(d);
    if ((token - first) % kTokensPerWord == kTokensPerWord - 1 && token + 1 < last) move_words(d, lane, 0);
  }
  if (d.warp.index() == 0) move_words(d, lane, kWordDone);
}

template <class D>
WEFT_DEVICE void send_lanes(const D& d) {
  for (uint32_t lane = d.block.index(); lane < d.lanes().count; lane += d.block.count()) {
    send_lane(d, lane);
    d.block.sync();
  }
}

// ---- step 3 --------------------------------------------------------------------------------------------------------

// The block: waits for the counts of all sources; table[source][expert] becomes where its segment begins.
template <class D>
WEFT_DEVICE void find_segments(const D& d) {
  if (d.warp.index() == 0) {
    for (uint32_t source = d.warp.rank(); source < d.ranks(); source += d.warp.size()) {
      if (d.present()[source] == 0) continue;
      if (!await_greeting(d.a.call, d.mesh, d.epoch, source, 0, Site::kLowLatencyDispatchRecv)) d.present()[source] = 0;
    }
  }
  d.block.sync();
  const bool reports = d.block.index() == 0;
  const auto* counts = reinterpret_cast<const uint32_t*>(d.mesh.local() + d.half_at() + d.half().counts);
  for (uint32_t expert = d.block.rank(); expert < d.own_experts(); expert += d.block.size()) {
    uint32_t begin = 0;
    for (uint32_t source = 0; source < d.ranks(); ++source) {
      const uint64_t at = uint64_t{source} * d.local_experts() + expert;
      const uint32_t count = d.present()[source] != 0 ? counts[at] : 0;
      d.table()[at] = begin;
      if (reports) d.a.layout_range[uint64_t{expert} * d.ranks() + source] = static_cast<int64_t>(uint64_t{begin} << 32 | count);
      begin += count;
    }
    if (!reports) continue;
    // Only tokens that name an expert more than once can bring more rows than there are tokens.
    if (begin > d.rows_per_expert())
      raise(d.a.call.wait.fault, Site::kLowLatencyCapacity, d.a.call.wait.self, expert, d.rows_per_expert(), begin, 0);
    d.a.counts[expert] = static_cast<int32_t>(begin);
    if (d.a.expert_stats) d.a.expert_stats[expert] += static_cast<int32_t>(begin);
  }
  if (reports && d.block.rank() == 0) *reinterpret_cast<uint64_t*>(d.a.routes + d.routes().epoch) = d.epoch.number;
  d.block.sync();
}

// ---- step 4 --------------------------------------------------------------------------------------------------------

// One lane per slot: where the rows of a message go, and what the combine will need to know. The warp.
template <class D>
WEFT_DEVICE void place_message(const D& d, uint32_t source, const uint32_t* head, int32_t* record) {
  const MessageLayout message = d.message();
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size()) {
    const auto expert = static_cast<int32_t>(head[message.expert + k]);
    // A rank that disagrees about sizes, which the call reports, may have written over this message.
    const bool is_expert = static_cast<uint32_t>(expert) < d.own_experts();
    const uint64_t in_expert =
        is_expert ? d.table()[uint64_t{source} * d.local_experts() + expert] + uint64_t{head[message.place + k]} : 0;
    const bool is_here = is_expert && in_expert < d.rows_per_expert();
    const uint64_t row = is_here ? expert * d.rows_per_expert() + in_expert : 0;
    d.rows()[k] = is_here ? static_cast<int32_t>(row) : -1;
    if (!record) continue;
    record[1 + k] = d.rows()[k];
    if (d.has_weights()) record[1 + d.top_k() + k] = static_cast<int32_t>(head[message.weight + k]);
    if (!is_here) continue;
    d.a.src_info[row] = static_cast<int32_t>(head[0]);
    if (d.a.out_weights && d.has_weights()) d.a.out_weights[row] = float_of_bits(head[message.weight + k]);
    if (d.a.out_source) d.a.out_source[row] = static_cast<int32_t>(source);
  }
  if (record && d.warp.rank() == 0) record[0] = static_cast<int32_t>(head[0]);
  d.warp.sync();
}

// Copies one part of a message's row to its places. The warp.
template <class D>
WEFT_DEVICE void copy_row(const D& d, const std::byte* row, uint32_t split) {
  const Range part = part_of(d.shape.row_bytes / 16, split, d.a.receive_splits);
  const uint32_t step = d.warp.size();
  for (uint64_t first = part.first + d.warp.rank(); first < part.last; first += kVecsInFlight * step) {
    Vec16 held[kVecsInFlight] = {};
    WEFT_UNROLL
    for (uint32_t i = 0; i < kVecsInFlight; ++i)
      if (first + i * step < part.last) held[i] = load_vec(reinterpret_cast<const Vec16*>(row) + first + i * step);
    for (uint32_t k = 0; k < d.top_k(); ++k) {
      const int32_t to = d.rows()[k];
      if (to < 0) continue;
      auto* out = reinterpret_cast<Vec16*>(d.a.out + static_cast<uint64_t>(to) * d.shape.row_bytes);
      WEFT_UNROLL
      for (uint32_t i = 0; i < kVecsInFlight; ++i)
        if (first + i * step < part.last) store_vec(out + first + i * step, held[i]);
    }
  }
}

template <class D>
WEFT_DEVICE void copy_scales(const D& d, const uint32_t* scales, uint32_t split) {
  const Range part = part_of(d.shape.scale_bytes / 4, split, d.a.receive_splits);
  for (uint32_t k = 0; k < d.top_k(); ++k) {
    if (d.rows()[k] < 0) continue;
    const auto row = static_cast<uint64_t>(d.rows()[k]);
    uint32_t* out = d.a.out_scales + row / d.rows_per_expert() * d.a.scale_expert_stride +
                    row % d.rows_per_expert() * d.a.scale_row_stride;
    for (uint64_t i = part.first + d.warp.rank(); i < part.last; i += d.warp.size())
      out[i * d.a.scale_word_stride] = scales[i];
  }
}

// Unpacks messages first .. last-1 of a lane. The warp.
template <class D>
WEFT_DEVICE void unpack_messages(const D& d, uint32_t source, uint32_t lane, uint32_t split, uint32_t first, uint32_t last) {
  const MessageLayout message = d.message();
  const RoutesLayout routes = d.routes();
  for (uint32_t index = first; index < last; ++index) {
    const std::byte* at = d.mesh.local() + d.message_at(source, lane, index);
    const uint64_t slot = (uint64_t{source} * d.lanes().count + lane) * d.lanes().capacity + index;
    int32_t* record = split == 0 ? d.a.routes + routes.records + slot * routes.record_words : nullptr;
    place_message(d, source, reinterpret_cast<const uint32_t*>(at), record);
    copy_row(d, at + message.row, split);
    if (d.shape.scale_bytes != 0) copy_scales(d, reinterpret_cast<const uint32_t*>(at + message.scales), split);
    d.warp.sync();
  }
}

// Follows one lane's word until all its messages are unpacked. The warp.
template <class D>
WEFT_DEVICE void receive_lane(const D& d, uint32_t source, uint32_t lane, uint32_t split) {
  const auto* word =
      reinterpret_cast<const uint64_t*>(d.mesh.local() + word_offset(d.a.call, d.ranks(), d.epoch, source, lane));
  uint32_t unpacked = 0;
  bool is_done = d.present()[source] == 0;
  const uint64_t start = cycles();
  while (!is_done) {
    uint64_t seen = 0;
    const uint64_t want = d.epoch.number * kWordEpoch + unpacked + 1;
    if (d.warp.rank() == 0 && !await(d.a.call, word, want, source, Site::kLowLatencyDispatchRecv, kWordEpoch, seen)) seen = 0;
    seen = d.warp.broadcast(seen);
    if (seen < want) break;
    if (unpacked == 0 && lane == 0 && split == 0 && d.a.call.wait_cycles && d.warp.rank() == 0)
      add_local(&d.a.call.wait_cycles[source], cycles() - start);
    const auto arrived = static_cast<uint32_t>(seen & kMaxLaneTokens);
    unpack_messages(d, source, lane, split, unpacked, arrived);
    unpacked = arrived;
    is_done = (seen & kWordDone) != 0;
  }
  if (split == 0 && d.warp.rank() == 0)
    d.a.routes[d.routes().counts + uint64_t{source} * d.lanes().count + lane] = static_cast<int32_t>(unpacked);
}

// Each rank starts with itself and goes on with its successor, so that it follows the order of arrival.
template <class D>
WEFT_DEVICE void receive_lanes(const D& d) {
  const WarpShare share = warp_share(d.block, d.warp);
  const uint64_t per_source = uint64_t{d.lanes().count} * d.a.receive_splits;
  for (uint64_t job = share.index; job < per_source * d.ranks(); job += share.total) {
    const auto source = static_cast<uint32_t>((d.mesh.rank() + job / per_source) % d.ranks());
    const uint64_t in_source = job % per_source;
    receive_lane(d, source, static_cast<uint32_t>(in_source / d.a.receive_splits),
                 static_cast<uint32_t>(in_source % d.a.receive_splits));
  }
}

}  // namespace low_latency

template <class MeshT, class Shape>
WEFT_KERNEL void low_latency_dispatch(const LowLatencyDispatchArgs& a, const MeshT& mesh, const Shape& shape) {
  low_latency::Dispatch<MeshT, Shape> d{a, mesh, shape, Block{}, Warp{}, {}};
  d.epoch = low_latency::begin_call(a.call, d.block, d.warp, mesh, d.template at<uint64_t>(0), d.present(),
                                    Site::kLowLatencyDispatchSlot);
  if (a.call.phases & kPhaseSend) {
    low_latency::send_counts(d);
    low_latency::send_lanes(d);
  }
  if (a.call.phases & kPhaseReceive) {
    low_latency::find_segments(d);
    low_latency::receive_lanes(d);
  }
}

}  // namespace weft
