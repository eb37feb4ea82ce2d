// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_bulk_sum.cuh: sums of rows that come through a queue in shared memory: while one list of rows is
// summed, the next one's are on their way. In float32, in the order of the list.
#pragma once

#include "kernels/moe/low_latency_bulk_layout.h"
#include "kernels/moe/low_latency_combine_answer.cuh"
#include "kernels/moe/low_latency_combine_receive.cuh"

namespace weft {
namespace low_latency {

// Rows to be summed, and what becomes of them. The lists are in shared memory.
struct RowList {
  const std::byte* const* rows;
  const float* weights;
  uint32_t count;
  bool is_there;
  std::byte* out;  // a reply, or a token's row
  // Of replies, with the last one of a batch: how many there are, and the word at the owner that says so.
  uint32_t owner;
  uint32_t word;
  uint32_t messages;
};

// A warp's two lists, in turns.
template <class C>
class RowLists {
 public:
  WEFT_DEVICE explicit RowLists(const C& c) {
    const CombineBulkShared at = combine_bulk_shared(c.shared().bytes, c.shape.top_k, c.block.warps());
    std::byte* part = c.block.shared() + at.parts + c.warp.index() * at.part_bytes;
    rows_ = reinterpret_cast<const std::byte**>(part + at.row);
    weights_ = reinterpret_cast<float*>(part + at.weight);
  }

  // `count` rows: row_of(i) and weight_of(i). The warp.
  template <class RowOf, class WeightOf>
  WEFT_DEVICE RowList list(const C& c, uint32_t count, RowOf row_of, WeightOf weight_of) {
    const uint32_t first = is_second_ ? c.top_k() : 0;
    is_second_ = !is_second_;
    for (uint32_t i = c.warp.rank(); i < count; i += c.warp.size()) {
      rows_[first + i] = row_of(i);
      weights_[first + i] = weight_of(i);
    }
    c.warp.sync();
    return {rows_ + first, weights_ + first, count, true, nullptr, 0, 0, 0};
  }

 private:
  const std::byte** rows_;
  float* weights_;
  bool is_second_ = false;
};

// The next piece to load: a piece of all rows of the current list before the next piece, then pieces of the next list.
struct RowsAsked {
  uint32_t offset = 0;
  uint32_t row = 0;
  bool of_next = false;
};

// Fills the queue.
template <class Queue>
WEFT_DEVICE void ask_for_rows(Queue& queue, RowsAsked& asked, const RowList& current, const RowList& next,
                              uint32_t row_bytes) {
  while (queue.has_room()) {
    // Values, not the list: a variable whose address is taken does not stay in registers.
    const std::byte* const* rows = asked.of_next ? next.rows : current.rows;
    const uint32_t count = asked.of_next ? next.count : current.count;
    if (asked.offset >= row_bytes || count == 0) {
      if (asked.of_next || !next.is_there) return;
      asked = {0, 0, true};
      continue;
    }
    const uint32_t left = row_bytes - asked.offset;
    queue.ask(rows[asked.row] + asked.offset, left < kQueuePieceBytes ? left : kQueuePieceBytes);
    if (++asked.row != count) continue;
    asked.row = 0;
    asked.offset += kQueuePieceBytes;
  }
}

// A lane's vectors of a piece: lanes take them in turns.
inline constexpr uint32_t kPieceVecs = kQueuePieceBytes / sizeof(Vec16);
inline constexpr uint32_t kPieceVecsOfLane = kPieceVecs / Warp::kMaxSize;

// The sum of the current list, piece by piece: put(first, sums) gets a lane's sums of the piece that begins with vector
// `first` of the row. The warp.
template <class Element, class C, class Queue, class Put>
WEFT_DEVICE void sum_list(const C& c, Queue& queue, RowsAsked& asked, const RowList& current,
                          const RowList& next, Put put) {
  const auto row_bytes = static_cast<uint32_t>(c.shape.row_bytes);
  WEFT_ROLLED
  for (uint32_t first = 0; current.count != 0 && first < c.row_vecs(); first += kPieceVecs) {
    float sums[kPieceVecsOfLane][Element::kPerVec] = {};
    WEFT_ROLLED
    for (uint32_t row = 0; row < current.count; ++row) {
      const float weight = current.weights[row];
      const Vec16* piece = queue.front();
      WEFT_UNROLL
      for (uint32_t v = 0; v < kPieceVecsOfLane; ++v) {
        const uint32_t at = c.warp.rank() + v * Warp::kMaxSize;
        if (first + at >= c.row_vecs()) continue;
        float values[Element::kPerVec] = {};
        Element::add(values, piece[at]);
        for (uint32_t e = 0; e < Element::kPerVec; ++e)
          sums[v][e] = add(sums[v][e], multiply(weight, values[e]));
      }
      queue.pop();
      ask_for_rows(queue, asked, current, next, row_bytes);
    }
    put(first, sums);
  }
}

// Sums each list that take() brings, until it brings none: put(list, first, sums), then done(list). The warp.
template <class Element, class C, class Queue, class Take, class Put, class Done>
WEFT_DEVICE void sum_lists(const C& c, Queue& queue, Take take, Put put, Done done) {
  const auto row_bytes = static_cast<uint32_t>(c.shape.row_bytes);
  RowsAsked asked;
  RowList next{};
  for (RowList current = take(); current.is_there; current = next) {
    ask_for_rows(queue, asked, current, RowList{}, row_bytes);
    next = take();
    ask_for_rows(queue, asked, current, next, row_bytes);
    sum_list<Element>(c, queue, asked, current, next,
                      [&](uint32_t first, auto& sums) { put(current, first, sums); });
    done(current);
    asked = asked.of_next ? RowsAsked{asked.offset, asked.row, false} : RowsAsked{};
  }
}

}  // namespace low_latency
}  // namespace weft
