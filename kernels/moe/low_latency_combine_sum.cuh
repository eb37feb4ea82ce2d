// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_sum.cuh: builds replies and sums: weighted sums of the rows that a warp has listed, as bf16 or as
// LogFMT where a block of channels allows, and what is read back of LogFMT. In float32, in the order of the list.
#pragma once

#include "kernels/core/logfmt.cuh"
#include "kernels/moe/low_latency_combine_call.cuh"

namespace weft {
namespace low_latency {

// So few ranks bring so few replies that a lane loads more of each; 0: that fits no lane.
inline constexpr uint32_t kFewRanks = kReceiveRows <= 4 || kSumVecs < 4 ? 0 : 4;

// The sum of weight * element over the `count` listed rows, for this part of what the layout counts.
// source(held, row, count, first, last) loads kVecs of kRows rows from `row` on, or returns false: no sum is
// made then. weight_of(row) is asked for after that. put(index, sums) gets a vector's sums. The warp.
template <class Element, uint32_t kVecs, uint32_t kRows, class C, class Source, class WeightOf, class Put>
WEFT_DEVICE bool sum_rows(const C& c, Range part, uint32_t count, Source source, WeightOf weight_of,
                          Put put) {
  const uint32_t step = c.warp.size();
  WEFT_ROLLED
  for (uint32_t base = part.first; base < part.last; base += kVecs * step) {
    const uint32_t first = base + c.warp.rank();
    float sums[kVecs][Element::kPerVec] = {};
    WEFT_ROLLED
    for (uint32_t row = 0; row < count; row += kRows) {
      Vec16 held[kRows][kVecs] = {};
      if (!source(held, row, count, first, part.last)) return false;
      WEFT_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        if (row + r >= count) continue;
        const float weight = weight_of(row + r);
        WEFT_UNROLL
        for (uint32_t v = 0; v < kVecs; ++v) {
          if (first + v * step >= part.last) continue;
          float values[Element::kPerVec] = {};
          Element::add(values, held[r][v]);
          for (uint32_t e = 0; e < Element::kPerVec; ++e)
            sums[v][e] = add(sums[v][e], multiply(weight, values[e]));
        }
      }
    }
    WEFT_UNROLL
    for (uint32_t v = 0; v < kVecs; ++v)
      if (first + v * step < part.last) put(first + v * step, sums[v]);
  }
  return true;
}

// The same by one host thread, where rows and their sum are no lines: all at once, to `out`. False: not of such elements, or
// of so many rows.
template <class Element, class C, class RowOf, class WeightOf>
WEFT_DEVICE bool sum_by_thread(const C& c, Range part, uint32_t count, RowOf row_of, WeightOf weight_of,
                               std::byte* out) {
  if constexpr (kSumsByThread) {
    if (count > kMostAddedRows) return false;
    const uint64_t first = uint64_t{part.first} * sizeof(Vec16);
    AddedRow rows[kMostAddedRows];
    for (uint32_t i = 0; i < count; ++i) rows[i] = {row_of(i) + first, weight_of(i)};
    return Element::template sum_by_thread<true>(out + first, rows, count,
                                                 uint64_t{part.last - part.first} * sizeof(Vec16),
                                                 is_past_caches(c.a.call, c.shape.row_bytes));
  }
  return false;
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

// Smallest and largest magnitude of a group; every lane of the group gets them. A group with NaN has an infinity for its
// largest: it does not fit, so that its block travels as it is.
struct GroupRange {
  float largest;
  float smallest;
};
WEFT_DEVICE GroupRange group_range(Warp warp, const float (&values)[kLaneElems]) {
  float smallest = magnitude(values[0]);
  for (uint32_t i = 1; i < kLaneElems; ++i)
    smallest = magnitude(values[i]) < smallest ? magnitude(values[i]) : smallest;
  const float largest = largest_or_nan(values, kLaneElems);
  const float bound = is_finite(largest) ? largest : float_of_bits(0x7f800000u);
  return {warp.max_within<kGroupLanes>(bound), -warp.max_within<kGroupLanes>(-smallest)};
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

}  // namespace low_latency
}  // namespace weft
