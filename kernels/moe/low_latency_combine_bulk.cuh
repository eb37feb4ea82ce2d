// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_bulk.cuh: the combine of low_latency_combine.cuh for launches on few SMs, with reduced replies: the same
// weights, replies and words, but no lines. The registers of few SMs cannot hold enough loads under way to hide the
// latency of memory. So rows and replies come through shared memory by bulk copies, and replies leave by bulk copies.
// Send:    1 weights, as there
//          2 every warp takes (owner, batch) pairs, sums each message's rows and sends the sum; then the batch's word moves
// Receive: 3 every warp takes tokens, waits for the batches that bring its replies, and sums them
// Sums, waits: as there.
//
// While one list of rows is summed, the next one's are on their way. In float32, in the order of the list.
#pragma once

#include "kernels/moe/low_latency_combine.cuh"
#include "kernels/moe/low_latency_combine_receive.cuh"
#include "kernels/moe/low_latency_combine_send.cuh"
#include "kernels/moe/low_latency_layout.h"

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

// ---- step 2

// The replies of a warp's (owner, batch) pairs. The warp.
template <class C>
class Replies {
 public:
  WEFT_DEVICE Replies(const C& c, RowLists<C>& lists)
      : c_(c), lists_(lists), share_(warp_share(c.block, c.warp)), job_(share_.index) {}

  WEFT_DEVICE RowList take() {
    while (index_ == messages_)
      if (!begin_batch()) return {};
    return list();
  }

 private:
  WEFT_DEVICE bool begin_batch() {
    if (job_ >= c_.a.owner_jobs.value * c_.ranks()) return false;
    const RoutesLayout routes = c_.routes();
    owner_ = (c_.mesh.rank() + 1 + job_ / c_.a.owner_jobs) % c_.ranks();
    batch_ = job_ % c_.a.owner_jobs;
    job_ += share_.total;
    const uint32_t batch_at = owner_ * c_.batches().count + batch_;
    record_ = c_.a.routes + routes.records + batch_at * c_.batches().capacity * routes.record_words;
    const uint32_t noted =
        load_relaxed(reinterpret_cast<const uint32_t*>(c_.a.routes) + routes.counts + batch_at);
    index_ = 0;
    messages_ = c_.present()[owner_] == 0 ? 0 : noted & kMaxBatchTokens;
    if (messages_ != 0 && !owner_agrees(c_, owner_)) messages_ = 0;
    return true;
  }
  WEFT_DEVICE RowList list() {
    const Message m{record_, owner_, 0, 0, false};
    uint32_t count = list_rows(c_, [&](uint32_t k) { return m.record[1 + k]; });
    std::byte* out = count == 0 ? nullptr
                                : near_window(c_.mesh, owner_) +
                                      c_.reply_at(static_cast<uint32_t>(m.record[0]), c_.slots()[0], false);
    const MessageWeights<C> weights(c_, m);
    list_weights(c_, count, [&](uint32_t k) { return float_of_bits(weights(k)); });
    if (lists_masked(c_, count)) count = drop_masked(c_, count);
    RowList list = lists_.list(
        c_, count,
        [&](uint32_t i) { return c_.a.x + static_cast<uint64_t>(c_.rows()[i]) * c_.a.x_row_bytes; },
        [&](uint32_t i) { return c_.weights()[i]; });
    list.out = out;
    record_ += c_.routes().record_words;
    if (++index_ != messages_) return list;
    list.owner = owner_;
    list.word = batch_;
    list.messages = messages_;
    return list;
  }

  const C& c_;
  RowLists<C>& lists_;
  WarpShare share_;
  uint32_t job_;
  uint32_t owner_ = 0;
  uint32_t batch_ = 0;
  const int32_t* record_ = nullptr;
  uint32_t index_ = 0;
  uint32_t messages_ = 0;
};

// A batch's word, which moves when the last of its replies has arrived, while others leave.
template <class C, class Writer>
class LateWord {
 public:
  WEFT_DEVICE LateWord(const C& c, Writer& writer) : c_(c), writer_(writer) {}

  // A piece has left.
  WEFT_DEVICE void count_piece() {
    if (messages_ == 0 || ++pieces_ != kBehind) return;
    writer_.template drain_but<kBehind>();
    tell();
  }
  // All pieces of the list's batch have left, if it ends one.
  WEFT_DEVICE void note(const RowList& list) {
    if (list.messages == 0) return;
    finish();
    owner_ = list.owner;
    word_ = list.word;
    messages_ = list.messages;
    pieces_ = 0;
  }
  WEFT_DEVICE void finish() {
    if (messages_ == 0) return;
    writer_.drain();
    tell();
  }

 private:
  static constexpr uint32_t kBehind = 6;  // pieces: most of a row

  WEFT_DEVICE void tell() {
    if (c_.warp.rank() == 0)
      c_.mesh.to(owner_).put_value(word_offset(c_.a.call, c_.ranks(), c_.epoch, c_.mesh.rank(), word_),
                                   c_.epoch.number * kWordEpoch | kWordDone | messages_);
    messages_ = 0;
  }

  const C& c_;
  Writer& writer_;
  uint32_t owner_ = 0;
  uint32_t word_ = 0;
  uint32_t messages_ = 0;  // 0: no word is late
  uint32_t pieces_ = 0;    // that have left since
};

// The reply of a message whose rows are all masked. The warp.
template <class C>
WEFT_DEVICE void clear_reply(const C& c, std::byte* reply) {
  for (uint32_t vec = c.warp.rank(); vec < c.row_vecs(); vec += c.warp.size())
    store_vec(reinterpret_cast<Vec16*>(reply) + vec, Vec16{});
  c.warp.sync();
}

template <class C, class Queue, class Writer>
WEFT_DEVICE void answer_in_bulk(const C& c, Queue& queue, Writer& writer) {
  RowLists<C> lists(c);
  Replies<C> replies(c, lists);
  LateWord<C, Writer> word(c, writer);
  const auto row_bytes = static_cast<uint32_t>(c.shape.row_bytes);
  with_row_element(c.shape, [&](auto element) {
    using Element = decltype(element);
    const auto put = [&](const RowList& list, uint32_t first,
                         const float (&sums)[kPieceVecsOfLane][Element::kPerVec]) {
      std::byte* to = list.out + first * sizeof(Vec16);
      Vec16* piece = writer.begin(to);
      WEFT_UNROLL
      for (uint32_t v = 0; v < kPieceVecsOfLane; ++v) {
        const uint32_t at = c.warp.rank() + v * Warp::kMaxSize;
        if (first + at < c.row_vecs()) piece[at] = Element::round(sums[v]);
      }
      const uint32_t left = row_bytes - first * static_cast<uint32_t>(sizeof(Vec16));
      writer.finish(to, left < kQueuePieceBytes ? left : kQueuePieceBytes);
      word.count_piece();
    };
    sum_lists<Element>(
        c, queue, [&] { return replies.take(); }, put,
        [&](const RowList& list) {
          if (list.count == 0 && list.out) clear_reply(c, list.out);
          word.note(list);
        });
  });
  word.finish();
}

// ---- step 3

// The replies of a warp's tokens. The warp.
template <class C>
class Tokens {
 public:
  WEFT_DEVICE Tokens(const C& c, RowLists<C>& lists)
      : c_(c), lists_(lists), share_(warp_share(c.block, c.warp)), token_(share_.index) {}

  template <class Queue>
  WEFT_DEVICE RowList take(const Queue& queue) {
    if (token_ >= c_.a.call.tokens) return {};
    const uint32_t token = token_;
    token_ += share_.total;
    if (find_ranks(c_, token)) report_strays(c_, token);
    const uint32_t count = list_rows(
        c_, [&](uint32_t k) { return await_reply(c_, token, k, 0) ? static_cast<int32_t>(k) : -1; });
    queue.fence_acquired();
    RowList list = lists_.list(
        c_, count,
        [&](uint32_t i) {
          return c_.mesh.local() + c_.reply_at(token, static_cast<uint32_t>(c_.rows()[i]), false);
        },
        [](uint32_t) { return 1.0f; });
    list.out = c_.a.combined + uint64_t{token} * c_.out_row_bytes();
    return list;
  }

 private:
  const C& c_;
  RowLists<C>& lists_;
  WarpShare share_;
  uint32_t token_;
};

// A token without replies sums to zeros. The warp.
template <class Element, class C>
WEFT_DEVICE void put_zeros(const C& c, std::byte* out) {
  for (uint32_t vec = c.warp.rank(); vec < c.row_vecs(); vec += c.warp.size()) {
    float sums[Element::kPerVec] = {};
    store_sums<Element>(c, out, vec, sums);
  }
}

template <class C, class Queue>
WEFT_DEVICE void sum_in_bulk(const C& c, Queue& queue) {
  RowLists<C> lists(c);
  Tokens<C> tokens(c, lists);
  with_row_element(c.shape, [&](auto element) {
    using Element = decltype(element);
    const auto put = [&](const RowList& list, uint32_t first,
                         float (&sums)[kPieceVecsOfLane][Element::kPerVec]) {
      WEFT_UNROLL
      for (uint32_t v = 0; v < kPieceVecsOfLane; ++v) {
        const uint32_t vec = first + c.warp.rank() + v * Warp::kMaxSize;
        if (vec < c.row_vecs()) store_sums<Element>(c, list.out, vec, sums[v]);
      }
    };
    sum_lists<Element>(
        c, queue, [&] { return tokens.take(queue); }, put,
        [&](const RowList& list) {
          if (list.count == 0) put_zeros<Element>(c, list.out);
        });
  });
}

template <class Queue, class Writer, class MeshT, class Shape>
WEFT_DEVICE void combine_in_bulk(const LowLatencyCombineArgs& a, const MeshT& mesh, const Shape& shape) {
  Combine<MeshT, Shape> c{a, mesh, shape, workers_of(a.call, mesh), Warp{}, {}, {}};
  c.keep_layouts();
  const CombineBulkShared at = combine_bulk_shared(c.shared().bytes, shape.top_k, c.block.warps());
  const BlockSpan traced(a.call.wait.trace, Work::kLowLatencyCall);
  const Joined joined = join(a.call, Block{}, c.warp, mesh);
  std::byte* shared = c.block.shared();
  Queue queue(c.warp, shared + at.queues + c.warp.index() * queue_bytes(kBulkQueueSlots), kBulkQueueSlots);
  c.epoch = begin_call(a.call, c.block, c.warp, mesh, joined, c.template at<uint64_t>(0), c.present(),
                       Site::kLowLatencyCombineSlot, [] {});
  if (a.call.phases & kPhaseSend) {
    Writer writer(c.warp, shared + at.writers + c.warp.index() * kWriterBytes);
    send_weights(c);
    answer_in_bulk(c, queue, writer);
  }
  if (a.call.phases & kPhaseReceive) {
    check_peers(c);
    sum_in_bulk(c, queue);
  }
}

}  // namespace low_latency

template <class MeshT, class Shape>
WEFT_KERNEL void low_latency_combine_bulk(const LowLatencyCombineArgs& a, const MeshT& mesh,
                                          const Shape& shape) {
  if constexpr (kHasRowQueue)
    low_latency::combine_in_bulk<RowQueue, RowWriter>(a, mesh, shape);
  else
    low_latency_combine(a, mesh, shape);
}

}  // namespace weft
