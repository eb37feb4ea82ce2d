// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_bulk.cuh: the combine of low_latency_combine.cuh for launches on few SMs, with reduced replies: the same
// weights, replies and words, but no lines. The registers of few SMs cannot hold enough loads under way to hide the
// latency of memory. So rows and replies come through shared memory by bulk copies, and replies leave by bulk copies.
// Send:    1 weights, as there
//          2 every warp takes (owner, batch) pairs, sums each message's rows and sends the sum; then the batch's word moves
// Receive: 3 every warp takes tokens, waits for the batches that bring its replies, and sums them
// Sums, waits: as there.
#pragma once

#include "kernels/moe/low_latency_combine.cuh"
#include "kernels/moe/low_latency_combine_bulk_sum.cuh"

namespace weft {
namespace low_latency {

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
    queue.sees_arrived();
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
