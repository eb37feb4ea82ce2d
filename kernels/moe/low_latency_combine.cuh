// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine.cuh: the experts' rows return to their tokens and are summed there.
// Send:    1 every rank tells its peers the weights of its tokens (exact: only that it has come)
//          2 every warp takes a piece of the messages of one (owner, lane), in the dispatch's terms: sums a
//            message's rows with their weights and stores one reply per token (exact: one per row, as it
//            is), then moves the lane's word. What came as lines is answered as lines, and no word moves
// Receive: 3 every warp takes a part of one token, waits for the lanes that bring its replies, or for
//            lines, and sums them
// Sums:    float32. Reduced: slots of one rank in order, rounded to bf16, then ranks in the order of their
//          first slots, one rounding. Exact: slots in order, one rounding.
// Waits:   for the peers' reading of the call before last; step 2 for an owner's weights, and, where other
//          kernels of this rank raise signals, for those of the rows it sends; step 3 for words or lines.
// Cost:    per (token, rank) (exact: per slot) one row, as lines 8/7 of it; per rank and token 4 * K bytes
//          of weights, or a line; per (lane, piece, rank) a word.
#pragma once

#include "kernels/core/quantise.cuh"
#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

template <class MeshT, class Shape>
struct Combine {
  const LowLatencyCombineArgs& a;
  const MeshT& mesh;
  const Shape& shape;
  Block block;
  Warp warp;
  Epoch epoch;

  WEFT_DEVICE uint32_t ranks() const { return static_cast<uint32_t>(shape.ranks); }
  WEFT_DEVICE uint32_t top_k() const { return static_cast<uint32_t>(shape.top_k); }
  WEFT_DEVICE Lanes lanes() const { return a.call.lanes; }
  WEFT_DEVICE uint64_t tag() const { return line_tag(epoch.number); }
  // Tokens that came as lines are answered so, unless the answers are LogFMT.
  WEFT_DEVICE bool answers_lines() const { return a.call.lines != 0 && !is_log(shape.reply); }
  WEFT_DEVICE bool sent_lines() const { return a.routes[routes().lines] != 0 && answers_lines(); }
  WEFT_DEVICE RoutesLayout routes() const {
    return routes_layout(shape.ranks, lanes(), shape.top_k, shape.weights != 0);
  }
  WEFT_DEVICE uint64_t stride() const { return reply_stride(shape.row_bytes, shape.reply); }
  WEFT_DEVICE CombineLayout layout() const {
    return combine_layout(shape.ranks, a.call.max_tokens, shape.top_k, stride());
  }
  WEFT_DEVICE uint64_t part_at(bool lines) const {
    return half_offset(a.call, shape.ranks, epoch) + (lines ? a.call.lines_at : 0);
  }
  WEFT_DEVICE uint64_t dispatch_epoch() const {
    return *reinterpret_cast<const uint64_t*>(a.routes + routes().epoch);
  }
  // The part of a row that makes one piece of a reply.
  WEFT_DEVICE Range vecs_of(uint32_t piece) const { return part_of(row_vecs(), piece, a.pieces); }
  WEFT_DEVICE uint32_t row_vecs() const { return static_cast<uint32_t>(shape.row_bytes / sizeof(Vec16)); }
  // What a receiver takes at a time, of units that pieces are made of: a part of one piece.
  WEFT_DEVICE Range part_of_units(uint32_t units, uint32_t split) const {
    const Range piece = part_of(units, split / a.piece_splits, a.pieces);
    const Range part = part_of(piece.last - piece.first, split % a.piece_splits, a.piece_splits);
    return {piece.first + part.first, piece.first + part.last};
  }
  WEFT_DEVICE uint64_t reply_at(uint64_t token, uint64_t k, bool lines) const {
    return part_at(lines) + layout().replies + (token * top_k() + k) * stride();
  }
  // Offset in the window of the weights that `owner` sends for its token.
  WEFT_DEVICE uint64_t weights_at(uint32_t owner, uint32_t token) const {
    return part_at(a.call.lines != 0) + layout().weights +
           (uint64_t{owner} * a.call.max_tokens + token) * weights_stride(top_k());
  }
  WEFT_DEVICE uint32_t weight_vecs() const { return vecs_in(top_k() * sizeof(float)); }
  WEFT_DEVICE bool takes_own_weights() const { return is_reduced(shape.reply) && a.topk_weights; }

  WEFT_DEVICE CombineShared shared() const { return combine_shared(shape.ranks, shape.top_k, block.warps()); }
  template <class T>
  WEFT_DEVICE T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(block.shared() + offset);
  }
  WEFT_DEVICE uint32_t* present() const { return at<uint32_t>(shared().present); }
  WEFT_DEVICE int32_t* rows() const { return at<int32_t>(shared().row) + warp.index() * top_k(); }
  WEFT_DEVICE uint32_t* slots() const { return at<uint32_t>(shared().slot) + warp.index() * top_k(); }
  WEFT_DEVICE float* weights() const { return at<float>(shared().weight) + warp.index() * top_k(); }
  WEFT_DEVICE uint32_t* slot_rank() const { return at<uint32_t>(shared().rank) + warp.index() * top_k(); }
  WEFT_DEVICE Vec16* owners_weights() const {
    return at<Vec16>(shared().owners) + warp.index() * weight_vecs();
  }
};

// ---- step 1
// --------------------------------------------------------------------------------------------------------

// The block.
template <class C>
WEFT_DEVICE void send_weights_to(const C& c, uint32_t peer) {
  const uint32_t parts = c.a.call.lines != 0 ? parts_of(c.weight_vecs()) : c.weight_vecs();
  WEFT_ROLLED
  for (uint32_t i = c.block.rank(); i < c.a.call.tokens * parts; i += c.block.size()) {
    const uint32_t token = i / parts;
    const LinePart part{i % parts};
    const uint32_t first = (c.a.call.lines != 0 ? part.vec() : part.index) * 4;
    const float* weights = c.a.topk_weights + uint64_t{token} * c.top_k();
    Vec16 vec{};
    WEFT_UNROLL
    for (uint32_t w = 0; w < 4; ++w)
      if (first + w < c.top_k()) vec.words[w] = bits_of_float(weights[first + w]);
    auto* theirs = reinterpret_cast<Vec16*>(c.mesh.to(peer).mapped() + c.weights_at(c.mesh.rank(), token));
    if (c.a.call.lines != 0)
      store_part(theirs, part, vec, c.tag());
    else
      store_vec(theirs + part.index, vec);
  }
}

template <class C>
WEFT_DEVICE void send_weights(const C& c) {
  WEFT_ROLLED
  for (uint32_t peer = c.block.count() - 1 - c.block.index(); peer < c.ranks(); peer += c.block.count()) {
    if (c.present()[peer] == 0) continue;
    if (c.takes_own_weights()) send_weights_to(c, peer);
    if (c.a.call.lines != 0) {  // nobody who answers waits for the greeting
      if (c.block.rank() + c.warp.size() == c.block.size())
        greet(c.a.call, c.mesh, c.epoch, peer, c.dispatch_epoch());
      continue;
    }
    c.block.sync();
    if (c.block.rank() == 0) greet(c.a.call, c.mesh, c.epoch, peer, c.dispatch_epoch());
    c.block.sync();  // the greeting would wait for all that the block's warps answer by then
  }
}

// ---- sums
// ----------------------------------------------------------------------------------------------------------

// Lists, in the warp's rows() and slots(), what is to be summed: item_of(k) for every slot k where it is not
// negative, in slot order. Returns how many. The warp.
template <class C, class ItemOf>
WEFT_DEVICE uint32_t list_rows(const C& c, ItemOf item_of) {
  uint32_t count = 0;
  for (uint32_t first = 0; first < c.top_k(); first += c.warp.size()) {
    const uint32_t k = first + c.warp.rank();
    const int32_t item = k < c.top_k() ? item_of(k) : -1;
    const uint32_t at = count + c.warp.count_below(item >= 0);
    count += c.warp.count(item >= 0);
    if (item < 0) continue;
    c.rows()[at] = item;
    c.slots()[at] = k;
  }
  c.warp.sync();
  return count;
}

// The weights of what is listed, by slot. The warp.
template <class C, class WeightOf>
WEFT_DEVICE void list_weights(const C& c, uint32_t count, WeightOf weight_of) {
  for (uint32_t i = c.warp.rank(); i < count; i += c.warp.size()) c.weights()[i] = weight_of(c.slots()[i]);
  c.warp.sync();
}

// How many vectors of how many rows a lane loads before it uses any: memory is far, and registers are few. A
// host core has neither trouble.
inline constexpr uint32_t kSendVecs = kIsHost ? 16 : 4;
inline constexpr uint32_t kSendRows = kIsHost ? 1 : 2;
inline constexpr uint32_t kReceiveVecs = kIsHost ? 16 : 1;
inline constexpr uint32_t kReceiveRows = kIsHost ? 1 : 8;

// The sum of weight * element over the `count` listed rows, for this part of what the wire counts.
// source(held, row, count, first, last) loads kVecs of kRows rows from `row` on, or returns false: no sum is
// made then. put(index, vec) gets the sums as bf16. The warp.
template <uint32_t kVecs, uint32_t kRows, class C, class Source, class Put>
WEFT_DEVICE bool sum_rows(const C& c, Range part, uint32_t count, Source source, Put put) {
  const uint32_t step = c.warp.size();
  WEFT_ROLLED
  for (uint32_t base = part.first; base < part.last; base += kVecs * step) {
    const uint32_t first = base + c.warp.rank();
    float sums[kVecs][Bf16::kPerVec] = {};
    WEFT_ROLLED
    for (uint32_t row = 0; row < count; row += kRows) {
      Vec16 held[kRows][kVecs] = {};
      if (!source(held, row, count, first, part.last)) return false;
      WEFT_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        if (row + r >= count) continue;
        const float weight = c.weights()[row + r];
        WEFT_UNROLL
        for (uint32_t v = 0; v < kVecs; ++v) {
          if (first + v * step >= part.last) continue;
          float values[Bf16::kPerVec] = {};
          Bf16::add(values, held[r][v]);
          for (uint32_t e = 0; e < Bf16::kPerVec; ++e)
            sums[v][e] = add(sums[v][e], multiply(weight, values[e]));
        }
      }
    }
    WEFT_UNROLL
    for (uint32_t v = 0; v < kVecs; ++v)
      if (first + v * step < part.last) put(first + v * step, Bf16::round(sums[v]));
  }
  return true;
}

WEFT_DEVICE LogGrid grid_of(uint32_t range) {
  return log_grid(float_of_bf16(range & 0xffffu), float_of_bf16(range >> 16));
}

// Whether all groups of a block may travel as LogFMT. Every lane asks for its own groups. The warp.
template <class C>
WEFT_DEVICE bool block_fits(const C& c, const uint32_t* ranges, uint32_t groups) {
  bool fits = true;
  for (uint32_t group = c.warp.rank(); group < groups; group += c.warp.size())
    fits = fits && grid_of(load_relaxed(ranges + group)).fits();
  return !c.warp.any(!fits);
}

// A lane's channels of the weighted sum of the listed rows, rounded to bf16. `at` is their place in a row.
template <class C, class RowOf>
WEFT_DEVICE void sum_lane(const C& c, float (&sums)[kLaneElems], uint64_t at, uint32_t count, RowOf row_of) {
  for (uint32_t i = 0; i < kLaneElems; ++i) sums[i] = 0;
  for (uint32_t row = 0; row < count; ++row) {
    const float weight = c.weights()[row];
    float values[kLaneElems];
    load_lane(values, row_of(row) + at);
    for (uint32_t i = 0; i < kLaneElems; ++i) sums[i] = add(sums[i], multiply(weight, values[i]));
  }
  for (uint32_t i = 0; i < kLaneElems; ++i) sums[i] = float_of_bf16(bf16_bits(sums[i]));
}

// Smallest and largest magnitude of a group; every lane of the group gets them.
struct GroupRange {
  float largest;
  float smallest;
};
WEFT_DEVICE GroupRange group_range(Warp warp, const float (&values)[kLaneElems]) {
  float smallest = magnitude(values[0]);
  for (uint32_t i = 1; i < kLaneElems; ++i)
    smallest = magnitude(values[i]) < smallest ? magnitude(values[i]) : smallest;
  return {group_max(warp, values), -warp.max_within<kGroupLanes>(-smallest)};
}

// Both are bf16 numbers already.
WEFT_DEVICE uint32_t range_word(GroupRange range) {
  return bits_of_float(range.largest) >> 16 | (bits_of_float(range.smallest) >> 16) << 16;
}

WEFT_DEVICE void store_lane_bf16(const float (&values)[kLaneElems], std::byte* out) {
  for (uint32_t v = 0; v < kLaneElems / 8; ++v) {
    float eight[Bf16::kPerVec];
    for (uint32_t i = 0; i < 4; ++i) {  // the low halves of the words first, then the high ones
      eight[i] = values[Bf16::kPerVec * v + 2 * i];
      eight[4 + i] = values[Bf16::kPerVec * v + 2 * i + 1];
    }
    store_vec(reinterpret_cast<Vec16*>(out) + v, Bf16::round(eight));
  }
}

// Writes one block of channels of the listed rows' sum to a reply, as LogFMT if all its groups fit. Sums
// twice: the first time for the ranges, which decide and travel too. The warp.
template <class C, class RowOf>
WEFT_DEVICE void encode_block(const C& c, uint32_t first_group, uint32_t groups, uint32_t count, RowOf row_of,
                              std::byte* reply) {
  auto* ranges = reinterpret_cast<uint32_t*>(reply + c.shape.row_bytes) + first_group;
  const uint32_t lanes = groups * kGroupLanes;
  const uint64_t block_at = uint64_t{first_group} * kGroupElems * 2;
  bool fits = true;
  for (uint32_t first = 0; first < lanes; first += c.warp.size()) {
    const uint32_t lane = first + c.warp.rank();
    float sums[kLaneElems] = {};
    if (lane < lanes) sum_lane(c, sums, block_at + uint64_t{lane} * kLaneElems * 2, count, row_of);
    const GroupRange range = group_range(c.warp, sums);
    if (lane >= lanes) continue;
    fits = fits && log_grid(range.largest, range.smallest).fits();
    if (lane % kGroupLanes == 0) ranges[lane / kGroupLanes] = range_word(range);
  }
  fits = !c.warp.any(!fits);
  for (uint32_t first = 0; first < lanes; first += c.warp.size()) {
    const uint32_t lane = first + c.warp.rank();
    const uint64_t at = block_at + uint64_t{lane} * kLaneElems * 2;
    float sums[kLaneElems] = {};
    if (lane < lanes) sum_lane(c, sums, at, count, row_of);
    const GroupRange range = group_range(c.warp, sums);
    if (lane >= lanes) continue;
    if (!fits) {
      store_lane_bf16(sums, reply + at);
      continue;
    }
    const LogLane codes = log_lane(log_grid(range.largest, range.smallest), sums);
    auto* out =
        reinterpret_cast<uint32_t*>(reply + block_at + uint64_t{lane / kGroupLanes} * kLogGroupBytes) +
        lane % kGroupLanes * kLogLaneWords;
    for (uint32_t w = 0; w < kLogLaneWords; ++w) out[w] = codes.words[w];
  }
}

// A lane's channels of one reply, decoded where its block travelled as LogFMT.
template <class C>
WEFT_DEVICE void decode_lane(const C& c, float (&values)[kLaneElems], const std::byte* reply,
                             uint64_t block_at, uint32_t lane, bool fits) {
  if (!fits) return load_lane<true>(values, reply + block_at + uint64_t{lane} * kLaneElems * 2);
  const auto* ranges =
      reinterpret_cast<const uint32_t*>(reply + c.shape.row_bytes) + block_at / (2 * kGroupElems);
  const auto* words =
      reinterpret_cast<const uint32_t*>(reply + block_at + uint64_t{lane / kGroupLanes} * kLogGroupBytes) +
      lane % kGroupLanes * kLogLaneWords;
  LogLane codes;
  for (uint32_t w = 0; w < kLogLaneWords; ++w) codes.words[w] = load_relaxed(words + w);
  log_lane_values(values, grid_of(load_relaxed(ranges + lane / kGroupLanes)), codes);
}

// Writes one block of channels of the listed replies' sum. The warp.
template <class C, class ReplyOf>
WEFT_DEVICE void decode_block(const C& c, uint32_t first_group, uint32_t groups, uint32_t count,
                              ReplyOf reply_of, std::byte* out) {
  const uint32_t lanes = groups * kGroupLanes;
  const uint64_t block_at = uint64_t{first_group} * kGroupElems * 2;
  for (uint32_t first = 0; first < lanes; first += c.warp.size()) {
    const uint32_t lane = first + c.warp.rank();
    float sums[kLaneElems] = {};
    for (uint32_t row = 0; row < count; ++row) {
      const std::byte* reply = reply_of(row);
      const bool fits =
          block_fits(c, reinterpret_cast<const uint32_t*>(reply + c.shape.row_bytes) + first_group, groups);
      if (lane >= lanes) continue;
      float values[kLaneElems];
      decode_lane(c, values, reply, block_at, lane, fits);
      for (uint32_t i = 0; i < kLaneElems; ++i) sums[i] = add(sums[i], multiply(c.weights()[row], values[i]));
    }
    if (lane < lanes) store_lane_bf16(sums, out + block_at + uint64_t{lane} * kLaneElems * 2);
  }
}

// ---- step 2
// --------------------------------------------------------------------------------------------------------

// A message of which this warp answers a piece.
struct Message {
  const int32_t* record;
  uint32_t owner;
  uint32_t piece;
  bool as_lines;
};

// Loads the experts' rows that are listed. get_ready() runs when the first are on their way, and before a
// weight is used; no sum is made if it returns false.
template <class C, class RowOf, class GetReady>
struct RowSource {
  const C& c;
  const Wire& wire;
  RowOf row_of;
  GetReady get_ready;
  bool is_ready = false;

  template <uint32_t kRows, uint32_t kVecs>
  WEFT_DEVICE bool operator()(Vec16 (&held)[kRows][kVecs], uint32_t row, uint32_t count, uint32_t first,
                              uint32_t last) {
    WEFT_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      if (row + r >= count) continue;
      const auto* vecs = reinterpret_cast<const Vec16*>(row_of(row + r));
      WEFT_UNROLL
      for (uint32_t v = 0; v < kVecs; ++v) {
        const uint32_t index = first + v * c.warp.size();
        if (index < last && wire.holds(index)) held[r][v] = load_vec(vecs + wire.vec(index));
      }
    }
    is_ready = is_ready || get_ready();
    return is_ready;
  }
};

// This warp's piece of the listed rows' sum, to a reply, unless get_ready() returns false: it runs once,
// before a weight is used.
template <class C, class GetReady>
WEFT_DEVICE bool write_reply(const C& c, const Message& m, uint32_t count, std::byte* reply,
                             GetReady get_ready) {
  const uint32_t piece = m.piece;
  auto row_of = [&](uint32_t i) { return c.a.x + static_cast<uint64_t>(c.rows()[i]) * c.a.x_row_bytes; };
  if (!is_log(c.shape.reply)) {
    const Wire wire{m.as_lines, c.row_vecs(), c.tag()};
    const RowSource<C, decltype(row_of), GetReady> source{c, wire, row_of, get_ready};
    return sum_rows<kSendVecs, kSendRows>(
        c, wire.range(piece, c.a.pieces), count, source,
        [&](uint32_t index, Vec16 vec) { wire.store(reinterpret_cast<Vec16*>(reply), index, vec); });
  }
  if (!get_ready()) return false;
  const auto block_elems = static_cast<uint32_t>(log_block_elems(c.shape.row_bytes / 2));
  const Range blocks = part_of(static_cast<uint32_t>(c.shape.row_bytes) / 2 / block_elems, piece, c.a.pieces);
  for (uint32_t b = blocks.first; b < blocks.last; ++b)
    encode_block(c, b * block_elems / kGroupElems, block_elems / kGroupElems, count, row_of, reply);
  return true;
}

// Asks for this warp's piece of the listed rows while there is something else to wait for.
template <class C>
WEFT_DEVICE void prefetch_rows(const C& c, uint32_t piece, uint32_t count) {
  constexpr uint32_t kLineBytes = 128;
  const Range vecs = c.vecs_of(piece);
  const uint32_t lines = ((vecs.last - vecs.first) * 16 + kLineBytes - 1) / kLineBytes;
  WEFT_ROLLED
  for (uint32_t i = 0; i < count; ++i) {
    const std::byte* row = c.a.x + static_cast<uint64_t>(c.rows()[i]) * c.a.x_row_bytes + vecs.first * 16;
    WEFT_ROLLED
    for (uint32_t line = c.warp.rank(); line < lines; line += c.warp.size())
      prefetch(row + line * kLineBytes);
  }
}

// Waits until this rank's own kernels have said that the rows of a message are there. The warp.
template <class C>
WEFT_DEVICE bool await_rows(const C& c, const int32_t* record) {
  const uint32_t rows_per_expert = c.ranks() * c.a.call.max_tokens;
  bool all_there = true;
  for (uint32_t k = c.warp.rank(); k < c.top_k(); k += c.warp.size()) {
    if (record[1 + k] < 0) continue;
    const auto row = static_cast<uint32_t>(record[1 + k]);
    const uint32_t expert = row / rows_per_expert;
    const uint32_t* signal =
        c.a.signals + uint64_t{expert} * c.a.signals_per_expert + row % rows_per_expert / c.a.signal_rows;
    uint32_t seen = 0;
    uint64_t waited_ns = 0;
    if (poll(c.a.call.wait, waited_ns, [&] { return (seen = load_acquire(signal)) >= c.a.signal_value; }))
      continue;
    raise(c.a.call.wait.fault, Site::kLowLatencySignal, c.a.call.wait.self, expert, c.a.signal_value, seen,
          waited_ns);
    all_there = false;
  }
  c.warp.sync();
  return !c.warp.any(!all_there);
}

// Waits for an owner's weights, if it sends any, unless these are lines; the host, where that is near, also
// leaves out an owner that means another call. The warp.
template <class C>
WEFT_DEVICE bool owner_is_ready(const C& c, uint32_t owner) {
  bool is_ready = true;
  if (((c.takes_own_weights() && c.a.call.lines == 0) || kIsHost) && c.warp.rank() == 0) {
    is_ready = await_greeting(c.a.call, c.mesh, c.epoch, owner, Site::kLowLatencyCombineRecv);
    if (is_ready && kIsHost) is_ready = agrees(c.a.call, c.mesh, c.epoch, owner, c.dispatch_epoch());
  }
  return !c.warp.any(!is_ready);
}

// Waits for the weights of an owner's token, where they are lines, and lists them. The warp.
template <class C>
WEFT_DEVICE bool take_weight_lines(const C& c, uint32_t owner, uint32_t token, uint32_t count) {
  const auto* lines = reinterpret_cast<const Vec16*>(c.mesh.local() + c.weights_at(owner, token));
  auto look = [&] {
    return !c.warp.any(!take_lines(c.warp, lines, c.weight_vecs(), c.tag(), c.owners_weights()));
  };
  if (!await_lines(c.a.call, c.warp, c.mesh, c.epoch, owner, Site::kLowLatencyCombineRecv, look))
    return false;
  c.warp.sync();
  const auto* weights = reinterpret_cast<const float*>(c.owners_weights());
  list_weights(c, count, [&](uint32_t k) { return weights[k]; });
  return true;
}

// One reply: the weighted sum of the message's listed rows, to the slot of the first of them.
template <class C, class GetReady>
WEFT_DEVICE bool answer_reduced(const C& c, const Message& m, uint32_t count, GetReady get_ready) {
  const auto token = static_cast<uint32_t>(m.record[0]);
  auto get_weights = [&] {
    if (!get_ready()) return false;
    if (c.takes_own_weights() && c.a.call.lines != 0) return take_weight_lines(c, m.owner, token, count);
    const auto* weights =
        c.takes_own_weights()
            ? reinterpret_cast<const uint32_t*>(c.mesh.local() + c.weights_at(m.owner, token))
            : reinterpret_cast<const uint32_t*>(m.record) + 1 + c.top_k();
    list_weights(c, count, [&](uint32_t k) { return float_of_bits(load_relaxed(weights + k)); });
    return true;
  };
  std::byte* reply = c.mesh.to(m.owner).mapped() + c.reply_at(token, c.slots()[0], m.as_lines);
  return write_reply(c, m, count, reply, get_weights);
}

// One reply per row, as it is.
template <class C, class GetReady>
WEFT_DEVICE bool answer_exact(const C& c, const Message& m, GetReady get_ready) {
  const auto token = static_cast<uint32_t>(m.record[0]);
  if (!get_ready()) return false;
  for (uint32_t slot = 0; slot < c.top_k(); ++slot) {
    if (m.record[1 + slot] < 0) continue;
    list_rows(c, [&](uint32_t k) { return k == slot ? m.record[1 + k] : -1; });
    list_weights(c, 1, [](uint32_t) { return 1.0f; });
    std::byte* reply = c.mesh.to(m.owner).mapped() + c.reply_at(token, slot, m.as_lines);
    write_reply(c, m, 1, reply, [] { return true; });
    c.warp.sync();
  }
  return true;
}

// A piece of all replies to one lane of one owner, then, unless they are lines, the lane's word there. The
// warp.
template <class C>
WEFT_DEVICE void answer_lane(const C& c, uint32_t owner, uint32_t lane, uint32_t piece) {
  const RoutesLayout routes = c.routes();
  const uint32_t lane_at = owner * c.lanes().count + lane;
  Message m{c.a.routes + routes.records + lane_at * c.lanes().capacity * routes.record_words, owner, piece,
            false};
  // The first record is asked for before it is known whether there is one: memory is far.
  const uint32_t noted =
      load_relaxed(reinterpret_cast<const uint32_t*>(c.a.routes) + routes.counts + lane_at);
  const uint32_t messages = noted & kMaxLaneTokens;
  m.as_lines = (noted & kCameAsLines) != 0 && c.answers_lines();
  uint32_t count = list_rows(c, [&](uint32_t k) { return m.record[1 + k]; });
  if (messages == 0 || c.present()[owner] == 0) return;
  const Span traced(c.a.call.wait.trace, Work::kAnswer, c.warp.rank() == 0, owner);
  bool is_ready = false;
  auto get_ready = [&] {
    if (!c.a.signals) prefetch_rows(c, piece, count);
    is_ready = is_ready || owner_is_ready(c, owner);
    return is_ready;
  };
  WEFT_ROLLED
  for (uint32_t index = 0; index < messages; ++index, m.record += routes.record_words) {
    if (index > 0) count = list_rows(c, [&](uint32_t k) { return m.record[1 + k]; });
    if (c.a.signals && !await_rows(c, m.record)) return;
    if (count == 0) continue;
    if (!(is_reduced(c.shape.reply) ? answer_reduced(c, m, count, get_ready) : answer_exact(c, m, get_ready)))
      return;
    c.warp.sync();
  }
  if (c.warp.rank() == 0 && !m.as_lines)
    c.mesh.to(owner).put_value(
        word_offset(c.a.call, c.ranks(), c.epoch, c.mesh.rank(), lane * c.a.pieces.value + piece),
        c.epoch.number * kWordEpoch | kWordDone | messages);
}

// Owners start with this rank's successor; its own tokens come last, when their weights have surely come.
template <class C>
WEFT_DEVICE void answer_lanes(const C& c) {
  const WarpShare share = warp_share(c.block, c.warp);
  WEFT_ROLLED
  for (uint32_t job = share.index; job < c.a.owner_jobs.value * c.ranks(); job += share.total) {
    const uint32_t owner = (c.mesh.rank() + 1 + job / c.a.owner_jobs) % c.ranks();
    const uint32_t in_owner = job % c.a.owner_jobs;
    answer_lane(c, owner, in_owner / c.a.pieces, in_owner % c.a.pieces);
  }
}

// ---- step 3
// --------------------------------------------------------------------------------------------------------

// Notes in slot_rank() where a token's slots went. The warp.
template <class C>
WEFT_DEVICE void find_ranks(const C& c, uint32_t token) {
  for (uint32_t k = c.warp.rank(); k < c.top_k(); k += c.warp.size()) {
    const int64_t expert = chosen_expert(c.a.call, c.top_k(), token, k);
    c.slot_rank()[k] = expert < 0
                           ? c.ranks()
                           : static_cast<uint32_t>(expert) / static_cast<uint32_t>(c.shape.experts_per_rank);
  }
  c.warp.sync();
}

// Whether slot k of the warp's token gets a reply of its own. One thread.
template <class C>
WEFT_DEVICE bool has_reply(const C& c, uint32_t k) {
  const uint32_t rank = c.slot_rank()[k];
  bool is_own = rank != c.ranks() && c.present()[rank] != 0;
  WEFT_ROLLED
  for (uint32_t earlier = 0; is_own && is_reduced(c.shape.reply) && earlier < k; ++earlier)
    is_own = c.slot_rank()[earlier] != rank;
  return is_own;
}

// Whether it has got it, where no lines come. One thread.
template <class C>
WEFT_DEVICE bool await_reply(const C& c, uint32_t token, uint32_t k, uint32_t piece) {
  if (!has_reply(c, k)) return false;
  const uint32_t rank = c.slot_rank()[k];
  const uint32_t lane = token / c.a.call.lane_tokens;
  const auto* word = reinterpret_cast<const uint64_t*>(
      c.mesh.local() + word_offset(c.a.call, c.ranks(), c.epoch, rank, lane * c.a.pieces.value + piece));
  const uint64_t start = cycles();
  uint64_t seen = 0;
  const bool came = await(c.a.call, word, c.epoch.number * kWordEpoch + kWordDone, rank,
                          Site::kLowLatencyCombineRecv, kWordEpoch, seen);
  if (c.a.call.wait_cycles && token == 0 && piece == 0)
    add_local(&c.a.call.wait_cycles[rank], cycles() - start);
  return came;
}

// Loads the listed replies. Those that come as lines it waits for, and one that does not come counts as
// zeros.
template <class C>
struct ReplySource {
  const C& c;
  const Wire& wire;
  uint32_t token;

  WEFT_DEVICE const Vec16* reply(uint32_t row) const {
    return reinterpret_cast<const Vec16*>(
        c.mesh.local() + c.reply_at(token, static_cast<uint32_t>(c.rows()[row]), wire.lines));
  }
  WEFT_DEVICE uint32_t peer(uint32_t row) const { return c.slot_rank()[c.slots()[row]]; }

  template <uint32_t kRows, uint32_t kVecs>
  WEFT_DEVICE bool operator()(Vec16 (&held)[kRows][kVecs], uint32_t row, uint32_t count, uint32_t first,
                              uint32_t last) {
    uint32_t missing = 0;  // rows of which not all came, in this lane
    uint32_t lost = 0;     // rows of peers that are masked, or have become so
    uint64_t waited_ns = 0;
    auto look = [&] {
      missing = 0;
      WEFT_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        if (row + r >= count) continue;
        WEFT_UNROLL
        for (uint32_t v = 0; v < kVecs; ++v) {
          const uint32_t index = first + v * c.warp.size();
          if (index < last && !wire.load(reply(row + r), index, held[r][v])) missing |= 1u << r;
        }
      }
      if (!wire.lines || !c.warp.any(missing != 0)) return true;
      if (c.a.call.masked) lost |= masked_rows<kRows>(row, count);
      return !c.warp.any((missing & ~lost) != 0);
    };
    if (!poll_together(c.warp, c.a.call.wait, waited_ns, look))
      lost = lose_rows<kRows>(row, missing, waited_ns);
    if (lost == 0) return true;
    WEFT_UNROLL
    for (uint32_t r = 0; r < kRows; ++r)
      for (uint32_t v = 0; v < kVecs; ++v)
        if ((lost >> r & 1) != 0) held[r][v] = Vec16{};
    return true;
  }

  // The same in every lane.
  template <uint32_t kRows>
  WEFT_DEVICE uint32_t masked_rows(uint32_t row, uint32_t count) const {
    uint32_t masked = 0;
    WEFT_ROLLED
    for (uint32_t r = 0; r < kRows && row + r < count; ++r)
      if (c.warp.any(is_masked(c.a.call, peer(row + r)))) masked |= 1u << r;
    return masked;
  }
  template <uint32_t kRows>
  WEFT_DEVICE uint32_t lose_rows(uint32_t row, uint32_t missing, uint64_t waited_ns) const {
    uint32_t lost = 0;
    WEFT_ROLLED
    for (uint32_t r = 0; r < kRows; ++r) {
      if (!c.warp.any((missing >> r & 1) != 0)) continue;
      lost |= 1u << r;
      if (c.warp.rank() == 0)
        lose_lines(c.a.call, c.mesh, c.epoch, peer(row + r), Site::kLowLatencyCombineRecv, waited_ns);
    }
    return lost;
  }
};

// Statistics of a token's replies that come as lines: when the tag of the first line of each did. Lanes share
// them.
template <class C>
WEFT_DEVICE void note_waits(const C& c, const ReplySource<C>& source, uint32_t count) {
  const uint64_t start = cycles();
  for (uint32_t row = c.warp.rank(); row < count; row += c.warp.size()) {
    Vec16 tag;
    uint64_t waited_ns = 0;
    const LinePart last{kLineVecs};
    const uint32_t peer = source.peer(row);
    if (is_masked(c.a.call, peer)) continue;
    if (poll(c.a.call.wait, waited_ns, [&] { return load_part(source.reply(row), last, c.tag(), tag); }))
      add_local(&c.a.call.wait_cycles[peer], cycles() - start);
    else
      lose_lines(c.a.call, c.mesh, c.epoch, peer, Site::kLowLatencyCombineRecv, waited_ns);
  }
  c.warp.sync();
}

// One part of one token's sum. The warp.
template <class C>
WEFT_DEVICE void sum_token(const C& c, uint32_t token, uint32_t split) {
  const uint32_t piece = split / c.a.piece_splits;
  const float* weights = c.a.topk_weights + uint64_t{token} * c.top_k();
  find_ranks(c, token);
  const Wire wire{c.sent_lines(), c.row_vecs(), c.tag()};
  const uint32_t count = list_rows(c, [&](uint32_t k) {
    return (wire.lines ? has_reply(c, k) : await_reply(c, token, k, piece)) ? static_cast<int32_t>(k) : -1;
  });
  list_weights(c, count, [&](uint32_t k) { return is_reduced(c.shape.reply) ? 1.0f : weights[k]; });
  const Span traced(c.a.call.wait.trace, Work::kLowLatencySum, c.warp.rank() == 0);
  const ReplySource<C> source{c, wire, token};
  std::byte* out = c.a.combined + uint64_t{token} * c.shape.row_bytes;
  if (is_log(c.shape.reply)) {
    const auto unit_bytes = static_cast<uint32_t>(log_block_elems(c.shape.row_bytes / 2) * 2);
    const Range part = c.part_of_units(static_cast<uint32_t>(c.shape.row_bytes) / unit_bytes, split);
    const uint32_t groups = unit_bytes / (2 * kGroupElems);
    auto reply_of = [&](uint32_t i) { return reinterpret_cast<const std::byte*>(source.reply(i)); };
    for (uint32_t b = part.first; b < part.last; ++b)
      decode_block(c, b * groups, groups, count, reply_of, out);
  } else {
    if (wire.lines && c.a.call.wait_cycles && token == 0 && split == 0) note_waits(c, source, count);
    const Range part =
        wire.lines ? wire.range(split, c.a.receive_splits) : c.part_of_units(c.row_vecs(), split);
    sum_rows<kReceiveVecs, kReceiveRows>(c, part, count, source, [&](uint32_t index, Vec16 vec) {
      if (wire.holds(index)) store_vec(reinterpret_cast<Vec16*>(out) + wire.vec(index), vec);
    });
  }
  c.warp.sync();
}

// The last warp of all, which has least to sum: a peer that brings no reply may mean another dispatch too.
// What it raises ends the others' waits.
template <class C>
WEFT_DEVICE void check_peers(const C& c) {
  if (c.block.index() + 1 != c.block.count() || c.warp.index() + 1 != c.block.warps()) return;
  for (uint32_t peer = c.warp.rank(); peer < c.ranks(); peer += c.warp.size())
    if (c.present()[peer] != 0 &&
        await_greeting(c.a.call, c.mesh, c.epoch, peer, Site::kLowLatencyCombineRecv))
      agrees(c.a.call, c.mesh, c.epoch, peer, c.dispatch_epoch());
  c.warp.sync();
}

template <class C>
WEFT_DEVICE void sum_tokens(const C& c) {
  const WarpShare share = warp_share(c.block, c.warp);
  WEFT_ROLLED
  for (uint32_t job = share.index; job < c.a.call.tokens * c.a.receive_splits.value; job += share.total)
    sum_token(c, job / c.a.receive_splits, job % c.a.receive_splits);
}

}  // namespace low_latency

template <class MeshT, class Shape>
WEFT_KERNEL void low_latency_combine(const LowLatencyCombineArgs& a, const MeshT& mesh, const Shape& shape) {
  low_latency::Combine<MeshT, Shape> c{a, mesh, shape, Block{}, Warp{}, {}};
  const Span traced(a.call.wait.trace, Work::kLowLatencyCall, c.block.rank() == 0);
  const low_latency::Joined joined = low_latency::join(a.call, c.block, c.warp, mesh);
  auto* shared_epoch = c.template at<uint64_t>(0);
  c.epoch = low_latency::begin_call(a.call, c.block, c.warp, mesh, joined, shared_epoch, c.present(),
                                    Site::kLowLatencyCombineSlot, [] {});
  if (a.call.phases & kPhaseSend) {
    low_latency::send_weights(c);
    low_latency::answer_lanes(c);
  }
  if (a.call.phases & kPhaseReceive) {
    low_latency::check_peers(c);
    low_latency::sum_tokens(c);
  }
}

}  // namespace weft
