// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_replies.cuh: where the replies of a token come from: peers, whose lines a warp waits for as it loads
// them, and this rank itself, which sums its own rows meanwhile.
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

}  // namespace low_latency
}  // namespace weft
