// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_receive.cuh: receives: sums each token's replies as the words of their batches move or their lines
// come. Replies are those of peers, whose lines a warp waits for as it loads them, and this rank's own, whose rows it sums
// meanwhile.
#pragma once

#include "kernels/moe/low_latency_combine_sum.cuh"

namespace weft {
namespace low_latency {

// Lists, in the warp's own_rows() and weights(), this rank's own rows of a token, in slot order, as their record has them,
// but for masked slots. weight_of(k) are the bits of a slot's. Returns how many. The warp.
template <class C, class WeightOf>
WEFT_DEVICE uint32_t list_own_rows(const C& c, const int32_t* record, bool has_record, WeightOf weight_of) {
  uint32_t count = 0;
  for (uint32_t first = 0; first < c.top_k(); first += c.warp.size()) {
    const uint32_t k = first + c.warp.rank();
    const int32_t row = k < c.top_k() ? record[1 + k] : -1;
    const bool has_row = has_record && row >= 0;
    const uint32_t weight = has_row ? weight_of(k) : kMaskedWeight;
    const bool is_here = has_row && (!c.takes_own_weights() || weight != kMaskedWeight);
    const uint32_t at = count + c.warp.count_below(is_here);
    count += c.warp.count(is_here);
    if (!is_here) continue;
    c.own_rows()[at] = row;
    c.weights()[at] = float_of_bits(weight);
  }
  c.warp.sync();
  return count;
}
// The same of a token of this rank, whose batch has no other. moved: of has_moved().
template <class C>
WEFT_DEVICE uint32_t list_own_rows(const C& c, uint32_t token, bool moved) {
  const RoutesLayout routes = c.routes();
  const uint32_t batch_at = c.mesh.rank() * c.batches().count + token;
  const int32_t* record = c.a.routes + routes.records + batch_at * routes.record_words;
  const bool has_record = (c.a.routes[routes.counts + batch_at] & kMaxBatchTokens) != 0;
  return list_own_rows(c, record, has_record, [&](uint32_t k) {
    return c.takes_own_weights() ? c.weight_bits(token, k, moved)
                                 : static_cast<uint32_t>(record[1 + c.top_k() + k]);
  });
}

// This rank's own reply: the rounded sum of the `count` rows that list_own_rows() has listed. The warp.
template <class Element, uint32_t kVecs, class C>
WEFT_DEVICE void sum_own_rows(const C& c, const VecLayout& layout, uint32_t count, Vec16 (&made)[kVecs],
                              uint32_t first, uint32_t last) {
  float sums[kVecs][Element::kPerVec] = {};
  WEFT_ROLLED
  for (uint32_t row = 0; row < count; row += kOwnRows) {
    Vec16 held[kOwnRows][kVecs] = {};
    WEFT_UNROLL
    for (uint32_t r = 0; r < kOwnRows; ++r) {
      if (row + r >= count) continue;
      const auto* vecs = reinterpret_cast<const Vec16*>(c.a.x + static_cast<uint64_t>(c.own_rows()[row + r]) *
                                                                    c.a.x_row_bytes);
      layout.load_row(c.warp, held[r], vecs, first, last);
    }
    WEFT_UNROLL
    for (uint32_t r = 0; r < kOwnRows; ++r) {
      if (row + r >= count) continue;
      const float weight = c.weights()[row + r];
      WEFT_UNROLL
      for (uint32_t v = 0; v < kVecs; ++v) {
        float values[Element::kPerVec] = {};
        Element::add(values, held[r][v]);
        for (uint32_t e = 0; e < Element::kPerVec; ++e)
          sums[v][e] = add(sums[v][e], multiply(weight, values[e]));
      }
    }
  }
  WEFT_UNROLL
  for (uint32_t v = 0; v < kVecs; ++v) made[v] = Element::round(sums[v]);
}

// Loads the listed replies. It waits for replies that come as lines; one that does not come counts as
// zeros. It makes this rank's own reply itself.
template <class C, class Element>
struct ReplySource {
  const C& c;
  const VecLayout& layout;
  uint32_t token;
  uint32_t own;       // which of the listed replies this rank makes itself; none: one beyond all
  uint32_t own_rows;  // of how many rows

  WEFT_DEVICE const Vec16* reply(uint32_t row) const {
    return reinterpret_cast<const Vec16*>(
        C::Delivery::reply(c, peer(row), token, c.rows()[row], layout.lines));
  }
  WEFT_DEVICE uint32_t peer(uint32_t row) const { return c.slot_rank()[c.slots()[row]]; }

  template <uint32_t kVecs>
  WEFT_DEVICE void sum_own(Vec16 (&made)[kVecs], uint32_t first, uint32_t last) const {
    sum_own_rows<Element>(c, layout, own_rows, made, first, last);
  }

  template <uint32_t kRows, uint32_t kVecs>
  WEFT_DEVICE bool operator()(Vec16 (&held)[kRows][kVecs], uint32_t row, uint32_t count, uint32_t first,
                              uint32_t last) {
    if (layout.is_only_one()) {
      for (uint32_t r = 0; r < kRows && row + r < count; ++r)
        if (row + r == own)
          sum_own(held[r], first, last);
        else
          load_row_alone(held[r], reply(row + r), first, last);
      return true;
    }
    const bool has_own = own >= row && own < row + kRows;
    Vec16 made[kVecs] = {};
    if (has_own) sum_own(made, first, last);
    uint32_t missing = 0;  // rows of which not all came, in this lane
    uint32_t lost = 0;     // rows of peers that are masked, or have become so
    uint64_t waited_ns = 0;
    auto look = [&] {
      missing = 0;
      WEFT_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        if (row + r >= count || row + r == own) continue;
        const auto row_of_reply = [&] { return reply(row + r); };
        layout.load_arrived(c.warp, held[r], row_of_reply, first, last, missing, r);
      }
      if (!layout.lines || !c.warp.any(missing != 0)) return true;
      if (c.a.call.masked) lost |= masked_rows<kRows>(row, count);
      return !c.warp.any((missing & ~lost) != 0);
    };
    if (!poll_together(c.warp, c.a.call.wait, waited_ns, look))
      lost = lose_rows<kRows>(row, missing, waited_ns);
    if (has_own) {
      WEFT_UNROLL
      for (uint32_t r = 0; r < kRows; ++r)
        for (uint32_t v = 0; v < kVecs; ++v)
          if (row + r == own) held[r][v] = made[v];
    }
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

// ---- step 3

// Notes in slot_rank() who replies for a token's slots. Of reduced replies these are the slots of the dispatch, of exact
// ones those of the ids now. Returns whether ids have moved since. The warp.
template <class C>
WEFT_DEVICE bool find_ranks(const C& c, uint32_t token) {
  const auto replier_of = [&](int64_t expert) {
    return expert < 0
               ? c.ranks()
               : c.replier(static_cast<uint32_t>(expert) / static_cast<uint32_t>(c.shape.experts_per_rank));
  };
  bool moved = false;
  for (uint32_t k = c.warp.rank(); k < c.top_k(); k += c.warp.size()) {
    const int64_t expert = c.sent_expert(token, k);
    moved = moved || (!c.has_sent_ids() && c.meant_expert(token, k) != expert);
    c.slot_rank()[k] = replier_of(expert);
  }
  moved = !c.has_sent_ids() && c.warp.any(moved);
  if (moved && !is_reduced(c.shape.reply))
    for (uint32_t k = c.warp.rank(); k < c.top_k(); k += c.warp.size())
      c.slot_rank()[k] = c.sent_slot(token, k) < 0 ? c.ranks() : replier_of(c.meant_expert(token, k));
  c.warp.sync();
  return moved;
}
// Says which slots of a token mean an expert that it was not sent to: they count as masked. The warp.
template <class C>
WEFT_DEVICE void report_strays(const C& c, uint32_t token) {
  for (uint32_t k = c.warp.rank(); k < c.top_k(); k += c.warp.size())
    if (c.sent_slot(token, k) == kStraySlot)
      raise(&c.a.call.wait.fault->mistake, Site::kCombineExpert, c.a.call.wait.self, k, token,
            static_cast<uint64_t>(c.meant_expert(token, k)), 0);
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

// Whether the slot has its reply, where replies do not come as lines. One thread.
template <class C>
WEFT_DEVICE bool await_reply(const C& c, uint32_t token, uint32_t k, uint32_t piece) {
  if (!has_reply(c, k)) return false;
  const uint32_t rank = c.slot_rank()[k];
  if (c.sums_own() && rank == c.mesh.rank()) return true;
  const uint32_t batch = token / c.a.call.batch_tokens;
  const auto* word = reinterpret_cast<const uint64_t*>(
      control_from(c.a.call, c.mesh, rank,
                   word_offset(c.a.call, c.ranks(), c.epoch, rank, batch * c.a.pieces.value + piece)));
  const uint64_t start = cycles();
  uint64_t seen = 0;
  const bool came = await(c.a.call, c.mesh, word, c.epoch.number * kWordEpoch + kWordDone, rank,
                          Site::kLowLatencyCombineRecv, kWordEpoch, seen);
  if (c.a.wait_cycles && token == 0 && piece == 0) add_local(&c.a.wait_cycles[rank], cycles() - start);
  return came;
}

// Statistics of a token's replies that come as lines: when the first line of each arrived. Lanes share them.
template <class C, class Source>
WEFT_DEVICE void note_waits(const C& c, const Source& source, uint32_t count) {
  const uint64_t start = cycles();
  for (uint32_t row = c.warp.rank(); row < count; row += c.warp.size()) {
    Vec16 tag;
    uint64_t waited_ns = 0;
    const LinePart last{kLineVecs};
    const uint32_t peer = source.peer(row);
    if (row == source.own || is_masked(c.a.call, peer)) continue;
    if (poll(c.a.call.wait, waited_ns, [&] { return load_part(source.reply(row), last, c.tag(), tag); }))
      add_local(&c.a.wait_cycles[peer], cycles() - start);
    else
      lose_lines(c.a.call, c.mesh, c.epoch, peer, Site::kLowLatencyCombineRecv, waited_ns);
  }
  c.warp.sync();
}

// One channel of combined, where that has other elements than the replies.
template <class C>
WEFT_DEVICE void store_channel(const C& c, std::byte* out, uint32_t channel, float sum) {
  if (c.shape.out_element == kElementFp32) {
    float* at = reinterpret_cast<float*>(out) + channel;
    *at = c.shape.accumulate != 0 ? *at + sum : sum;
    return;
  }
  const bool is_half = c.shape.out_element == kElementFp16;
  uint16_t* at = reinterpret_cast<uint16_t*>(out) + channel;
  if (c.shape.accumulate != 0) sum += is_half ? float_of_f16(*at) : float_of_bf16(*at);
  *at = static_cast<uint16_t>(is_half ? f16_bits(sum) : bf16_bits(sum));
}

// A vector's sums. One lane.
template <class Element, class C>
WEFT_DEVICE void store_sums(const C& c, std::byte* out, uint32_t vec, float (&sums)[Element::kPerVec]) {
  if (c.shape.out_element == c.shape.element) {
    Vec16* at = reinterpret_cast<Vec16*>(out) + vec;
    if (c.shape.accumulate != 0) Element::add(sums, load_vec(at));
    return store_vec(at, Element::round(sums));
  }
  WEFT_UNROLL
  for (uint32_t i = 0; i < Element::kPerVec; ++i) {
    // Of 16-bit elements those in the low halves of words come first.
    const uint32_t channel = Element::kPerVec == 8 ? i % 4 * 2 + i / 4 : i;
    store_channel(c, out, vec * Element::kPerVec + channel, sums[i]);
  }
}

// Where kAsksAhead: asks for the replies to a token that is summed soon. Those to a token of a port peer stand side by side.
template <class C>
WEFT_DEVICE void ask_for_replies(const C& c, uint32_t token) {
  if (!kAsksAhead || C::Delivery::kOwnersPlace || token >= c.a.call.tokens || c.sent_lines()) return;
  const auto row_bytes = static_cast<uint64_t>(c.shape.row_bytes);
  find_ranks(c, token);
  for (uint32_t k = 0; k < c.top_k(); ++k)
    if (has_reply(c, k)) ask_for_row(c.mesh.local() + c.reply_at(token, k, false), row_bytes);
}

// Which of the listed replies this rank makes itself; one beyond all where it makes none. The warp.
template <class C>
WEFT_DEVICE uint32_t find_own(const C& c, uint32_t count) {
  uint32_t own = ~uint32_t{0};
  WEFT_ROLLED
  for (uint32_t i = 0; c.sums_own() && i < count; ++i)
    if (c.slot_rank()[c.slots()[i]] == c.mesh.rank()) own = i;
  return own;
}

// A part of the sum of the `count` listed replies, of which this rank makes one of own_rows, if it makes any.
template <class Element, class C>
WEFT_DEVICE void sum_replies(const C& c, const VecLayout& layout, uint32_t token, uint32_t split,
                             uint32_t count, uint32_t own_rows) {
  const ReplySource<C, Element> source{c, layout, token, find_own(c, count), own_rows};
  std::byte* out = c.a.combined + uint64_t{token} * c.out_row_bytes();
  if (layout.lines && c.a.wait_cycles && token == 0 && split == 0) note_waits(c, source, count);
  const Range part =
      layout.lines ? layout.range(split, c.a.receive_splits) : c.part_of_units(c.row_vecs(), split);
  const auto weight_of = [&](uint32_t row) { return is_reduced(c.shape.reply) ? 1.0f : c.weights()[row]; };
  if (layout.is_only_one() && source.own >= count && c.shape.out_element == c.shape.element &&
      c.shape.accumulate == 0) {
    const auto row_of = [&](uint32_t row) { return reinterpret_cast<const std::byte*>(source.reply(row)); };
    if (sum_by_thread<Element>(c, part, count, row_of, weight_of, out)) return;
  }
  const auto put = [&](uint32_t index, float (&sums)[Element::kPerVec]) {
    if (layout.holds(index)) store_sums<Element>(c, out, layout.vec(index), sums);
  };
  if constexpr (kFewRanks > 0)
    if (is_reduced(c.shape.reply) && c.shape.ranks <= kFewRanks && c.shape.weights == 0)
      return (void)sum_rows<Element, kReceiveVecs * 2, kFewRanks>(c, part, count, source, weight_of, put);
  sum_rows<Element, kReceiveVecs, kReceiveRows>(c, part, count, source, weight_of, put);
}

// The same of LogFMT.
template <class C>
WEFT_DEVICE void decode_replies(const C& c, const VecLayout& layout, uint32_t token, uint32_t split,
                                uint32_t count) {
  const ReplySource<C, Bf16> source{c, layout, token, ~uint32_t{0}, 0};
  std::byte* out = c.a.combined + uint64_t{token} * c.out_row_bytes();
  const auto unit_bytes = static_cast<uint32_t>(log_block_elems(c.shape.row_bytes / 2) * 2);
  const Range part = c.part_of_units(static_cast<uint32_t>(c.shape.row_bytes) / unit_bytes, split);
  const uint32_t groups = unit_bytes / (2 * kGroupElems);
  auto reply_of = [&](uint32_t i) { return reinterpret_cast<const std::byte*>(source.reply(i)); };
  for (uint32_t b = part.first; b < part.last; ++b) decode_block(c, b * groups, groups, count, reply_of, out);
}

// One part of one token's sum. The warp.
template <class C>
WEFT_DEVICE void sum_token(const C& c, uint32_t token, uint32_t split) {
  const uint32_t piece = split / c.a.piece_splits;
  const float* weights = c.a.topk_weights + uint64_t{token} * c.top_k();
  const bool moved = find_ranks(c, token);
  if (moved && split == 0) report_strays(c, token);
  const uint32_t own_rows = c.sums_own() ? list_own_rows(c, token, moved) : 0;
  const VecLayout layout{c.sent_lines(), c.row_vecs(), c.tag()};
  const auto slot_of = [&](uint32_t k) {
    return moved && !is_reduced(c.shape.reply) ? static_cast<uint32_t>(c.sent_slot(token, k)) : k;
  };
  const uint32_t count = list_rows(c, [&](uint32_t k) {
    return (layout.lines ? has_reply(c, k) : await_reply(c, token, k, piece))
               ? C::Delivery::reply_number(c, token, slot_of(k))
               : -1;
  });
  if (!is_reduced(c.shape.reply) || is_log(c.shape.reply))
    list_weights(c, count, [&](uint32_t k) {
      return is_reduced(c.shape.reply) ? 1.0f : weights[c.weight_slot(k, slot_of(k))];
    });
  const Span traced(c.a.call.wait.trace, Work::kLowLatencySum, c.warp.rank() == 0);
  if (is_log(c.shape.reply))
    decode_replies(c, layout, token, split, count);
  else
    with_row_element(c.shape, [&](auto element) {
      sum_replies<decltype(element)>(c, layout, token, split, count, own_rows);
    });
  c.warp.sync();
}

// The last warp of all, which has least to sum, checks peers that bring no reply: they, too, may combine
// another dispatch. A fault that it raises ends the others' waits.
template <class C>
WEFT_DEVICE void check_peers(const C& c) {
  if (c.block.index() + 1 != c.block.count() || c.warp.index() + 1 != c.block.warps()) return;
  for (uint32_t peer = c.warp.rank(); peer < c.ranks(); peer += c.warp.size())
    if (c.present()[peer] != 0 &&
        await_handshake(c.a.call, c.mesh, c.epoch, peer, Site::kLowLatencyCombineRecv))
      agrees(c.a.call, c.mesh, c.epoch, peer, c.dispatch_epoch());
  c.warp.sync();
}

template <class C>
WEFT_DEVICE void sum_tokens(const C& c) {
  const WarpShare share = warp_share(c.block, c.warp);
  WEFT_ROLLED
  for (uint32_t job = share.index; job < c.a.call.tokens * c.a.receive_splits.value; job += share.total) {
    ask_for_replies(c, (job + share.total) / c.a.receive_splits);
    sum_token(c, job / c.a.receive_splits, job % c.a.receive_splits);
  }
}

}  // namespace low_latency
}  // namespace weft
