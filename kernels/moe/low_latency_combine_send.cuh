// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine_send.cuh: delivers: tells peers the weights of this rank's tokens, and answers what the dispatch
// brought: a reply for each message or row, built at its place in the owner's window, then the batch's word there, unless
// the replies are lines.
#pragma once

#include "kernels/moe/low_latency_combine_sum.cuh"

namespace weft {
namespace low_latency {

// ---- step 1

// The block.
template <class C>
WEFT_DEVICE void send_weights_to(const C& c, uint32_t peer) {
  const uint32_t parts = c.has_lines() ? parts_of(c.weight_vecs()) : c.weight_vecs();
  WEFT_ROLLED
  for (uint32_t i = c.block.rank(); i < c.a.call.tokens * parts; i += c.block.size()) {
    const uint32_t token = i / parts;
    const LinePart part{i % parts};
    const Vec16 vec = c.weight_vec(token, (c.has_lines() ? part.vec() : part.index) * 4);
    auto* theirs = reinterpret_cast<Vec16*>(near_window(c.mesh, peer) + c.weights_at(c.mesh.rank(), token));
    if (c.has_lines())
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
    if (c.has_lines()) {  // no rank that answers waits for the handshake
      if (c.block.rank() + c.warp.size() == c.block.size())
        send_handshake(c.a.call, c.mesh, c.epoch, peer, c.dispatch_epoch());
      continue;
    }
    c.block.sync();
    if (c.block.rank() == 0) send_handshake(c.a.call, c.mesh, c.epoch, peer, c.dispatch_epoch());
    c.block.sync();  // the handshake would wait for all that the block's warps answer by then
  }
}

// ---- step 2

// Loads the experts' rows that are listed. await_owner() runs when the first are on their way, and before a
// weight is used; no sum is made if it returns false.
template <class C, class RowOf, class AwaitOwner>
struct RowSource {
  const C& c;
  const VecLayout& layout;
  RowOf row_of;
  AwaitOwner await_owner;
  bool is_ready = false;

  template <uint32_t kRows, uint32_t kVecs>
  WEFT_DEVICE bool operator()(Vec16 (&held)[kRows][kVecs], uint32_t row, uint32_t count, uint32_t first,
                              uint32_t last) {
    WEFT_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      if (row + r >= count) continue;
      layout.load_row(c.warp, held[r], reinterpret_cast<const Vec16*>(row_of(row + r)), first, last);
    }
    is_ready = is_ready || await_owner();
    return is_ready;
  }
};

// The part of a reply that a warp sums, in the layout's units. Warps share only pieces that travel as lines, because
// one word covers a whole piece.
template <class C>
WEFT_DEVICE Range range_of(const C& c, const Message& m, const VecLayout& layout) {
  const Range piece = layout.range(m.piece, c.reply_parts());
  if (parts_of_piece(c) == 1 || !layout.lines) return piece;
  const uint32_t middle = piece.first + (piece.last - piece.first) / kLineParts / 2 * kLineParts;
  return m.part == 0 ? Range{piece.first, middle} : Range{middle, piece.last};
}

// This warp's piece of the listed rows' sum, to a reply, unless await_owner() returns false: it runs once,
// before a weight is used.
template <class C, class AwaitOwner>
WEFT_DEVICE bool write_reply(const C& c, const Message& m, uint32_t count, std::byte* reply,
                             AwaitOwner await_owner) {
  const uint32_t piece = m.piece;
  auto row_of = [&](uint32_t i) { return c.a.x + static_cast<uint64_t>(c.rows()[i]) * c.a.x_row_bytes; };
  if (!is_log(c.shape.reply)) {
    const VecLayout layout{m.as_lines, c.row_vecs(), c.tag()};
    const bool is_ready = layout.is_only_one();  // weights are listed before rows are
    if (is_ready && !await_owner()) return false;
    const RowSource<C, decltype(row_of), AwaitOwner> source{c, layout, row_of, await_owner, is_ready};
    bool is_made = false;
    with_row_element(c.shape, [&](auto element) {
      using Element = decltype(element);
      const auto weight_of = [&](uint32_t row) { return c.weights()[row]; };
      const auto put = [&](uint32_t index, const float (&sums)[Element::kPerVec]) {
        layout.store(reinterpret_cast<Vec16*>(reply), index, Element::round(sums));
      };
      const Range part = range_of(c, m, layout);
      is_made = (is_ready && sum_by_thread<Element>(c, part, count, row_of, weight_of, reply)) ||
                sum_rows<Element, kSendVecs, kSendRows>(c, part, count, source, weight_of, put);
    });
    return is_made;
  }
  if (!await_owner()) return false;
  const auto block_elems = static_cast<uint32_t>(log_block_elems(c.shape.row_bytes / 2));
  const Range blocks =
      part_of(static_cast<uint32_t>(c.shape.row_bytes) / 2 / block_elems, piece, c.reply_parts());
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

// Where kAsksAhead: asks for the rows of a message that is answered next, and for where its reply goes.
template <class C>
WEFT_DEVICE void ask_ahead(const C& c, const Message& m) {
  if (!kAsksAhead) return;
  const auto row_bytes = static_cast<uint64_t>(c.shape.row_bytes);
  // Replies to port peers stand side by side.
  bool has_place = C::Delivery::kOwnersPlace || m.as_lines || is_past_caches(c.a.call, c.shape.row_bytes);
  for (uint32_t k = 0; k < c.top_k(); ++k) {
    const int32_t row = m.record[1 + k];
    if (row < 0) continue;
    ask_for_row(c.a.x + static_cast<uint64_t>(row) * c.a.x_row_bytes, row_bytes);
    if (!has_place)
      ask_for_row(near_window(c.mesh, m.owner) + c.reply_at(static_cast<uint32_t>(m.record[0]), k, false),
                  row_bytes);
    has_place = has_place || is_reduced(c.shape.reply);
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

// Waits for an owner's weights, if it sends any, unless these are lines. Where that is cheap, and where
// notes gave places, it also leaves out an owner that makes another call. The warp.
template <class C>
WEFT_DEVICE bool owner_agrees(const C& c, uint32_t owner) {
  bool is_ready = true;
  constexpr bool kChecks = kIsAllNear || C::Delivery::kOwnersPlace;
  if (((c.takes_own_weights() && !c.has_lines()) || kChecks) && c.warp.rank() == 0) {
    is_ready = await_handshake(c.a.call, c.mesh, c.epoch, owner, Site::kLowLatencyCombineRecv);
    if (is_ready && kChecks) is_ready = agrees(c.a.call, c.mesh, c.epoch, owner, c.dispatch_epoch());
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

// Replies where all ranks map each other: each has a slot at its owner.
template <class C>
struct MappedReplies {
  const C& c;
  uint32_t owner;
  uint32_t batch;

  WEFT_DEVICE std::byte* place(const Message& m, uint32_t token, const uint32_t* slot) const {
    return near_window(c.mesh, m.owner) + c.reply_at(token, *slot, m.as_lines);
  }
  WEFT_DEVICE void leave_out() const {}
  WEFT_DEVICE void finish(const Message& m, uint32_t messages) const {
    if (c.warp.rank() == 0 && !m.as_lines)
      c.mesh.to(m.owner).put_value(
          word_offset(c.a.call, c.ranks(), c.epoch, c.mesh.rank(), batch * c.a.pieces.value + m.piece),
          c.epoch.number * kWordEpoch | kWordDone | messages);
  }
};

// The bits of the weights of a message's slots: those that came with the dispatch, or those of its owner.
template <class C>
struct MessageWeights {
  const C& c;
  const Message& m;
  bool are_here;  // the token is of this rank, which tells itself nothing
  bool moved;
  const uint32_t* told;

  WEFT_DEVICE MessageWeights(const C& combine, const Message& message)
      : c(combine), m(message), are_here(c.takes_own_weights() && c.keeps_own(m.owner)), moved(false) {
    told = !c.takes_own_weights()
               ? reinterpret_cast<const uint32_t*>(m.record) + 1 + c.top_k()
               : reinterpret_cast<const uint32_t*>(c.mesh.local() + payload_of(c.mesh, m.owner) +
                                                   c.weights_at(m.owner, token()));
    if (are_here) moved = !c.has_sent_ids() && c.has_moved(token());
  }
  WEFT_DEVICE uint32_t token() const { return static_cast<uint32_t>(m.record[0]); }
  WEFT_DEVICE uint32_t operator()(uint32_t k) const {
    return are_here ? c.weight_bits(token(), k, moved) : load_relaxed(told + k);
  }
};

// Whether any of the weights that the warp has listed is the mask pattern. The warp.
template <class C>
WEFT_DEVICE bool lists_masked(const C& c, uint32_t count) {
  bool has_any = false;
  for (uint32_t i = c.warp.rank(); i < count; i += c.warp.size())
    has_any = has_any || bits_of_float(c.weights()[i]) == kMaskedWeight;
  return c.takes_own_weights() && c.warp.any(has_any);
}
// Takes these out of the warp's list, and returns how many are left. The warp.
template <class C>
WEFT_DEVICE uint32_t drop_masked(const C& c, uint32_t count) {
  uint32_t left = 0;
  WEFT_ROLLED
  for (uint32_t first = 0; first < count; first += c.warp.size()) {
    const uint32_t i = first + c.warp.rank();
    const float weight = i < count ? c.weights()[i] : 0.0f;
    const int32_t row = i < count ? c.rows()[i] : 0;
    const bool stays = i < count && bits_of_float(weight) != kMaskedWeight;
    c.warp.sync();  // all have read what is written over
    const uint32_t at = left + c.warp.count_below(stays);
    left += c.warp.count(stays);
    if (!stays) continue;
    c.rows()[at] = row;
    c.weights()[at] = weight;
  }
  c.warp.sync();
  return left;
}

// One reply: the weighted sum of the message's listed rows, to the slot of the first of them. Where it turns out that some
// are masked the sum begins anew, without them.
template <class C, class AwaitOwner, class Replies>
WEFT_DEVICE bool answer_reduced(const C& c, const Message& m, uint32_t count, AwaitOwner await_owner,
                                Replies& replies) {
  const auto token = static_cast<uint32_t>(m.record[0]);
  bool has_weights = false, has_masked = false;
  auto get_weights = [&] {
    if (has_weights) return true;
    if (!await_owner()) return false;
    if (c.takes_own_weights() && c.has_lines()) {
      if (!take_weight_lines(c, m.owner, token, count)) return false;
    } else {
      const MessageWeights<C> weights(c, m);
      list_weights(c, count, [&](uint32_t k) { return float_of_bits(weights(k)); });
    }
    has_weights = true;
    has_masked = lists_masked(c, count);
    return !has_masked;
  };
  std::byte* reply = replies.place(m, token, c.slots());
  WEFT_ROLLED
  while (!write_reply(c, m, count, reply, get_weights)) {
    if (!has_masked) return false;
    has_masked = false;
    count = drop_masked(c, count);
  }
  return true;
}

// One reply per row, as it is.
template <class C, class AwaitOwner, class Replies>
WEFT_DEVICE bool answer_exact(const C& c, const Message& m, AwaitOwner await_owner, Replies& replies) {
  const auto token = static_cast<uint32_t>(m.record[0]);
  if (!await_owner()) return false;
  for (uint32_t slot = 0; slot < c.top_k(); ++slot) {
    if (m.record[1 + slot] < 0) continue;
    list_rows(c, [&](uint32_t k) { return k == slot ? m.record[1 + k] : -1; });
    list_weights(c, 1, [](uint32_t) { return 1.0f; });
    std::byte* reply = replies.place(m, token, &slot);
    write_reply(c, m, 1, reply, [] { return true; });
    c.warp.sync();
  }
  return true;
}

// A piece of all replies to one batch of one owner, then, unless they are lines, the batch's word there. The
// warp.
template <class C>
WEFT_DEVICE void answer_batch(const C& c, uint32_t owner, uint32_t batch, uint32_t piece, uint32_t part) {
  const RoutesLayout routes = c.routes();
  const uint32_t batch_at = owner * c.batches().count + batch;
  Message m{c.a.routes + routes.records + batch_at * c.batches().capacity * routes.record_words, owner, piece,
            part, false};
  // The first record is asked for before it is known whether there is one: memory is far.
  const uint32_t noted =
      load_relaxed(reinterpret_cast<const uint32_t*>(c.a.routes) + routes.counts + batch_at);
  const uint32_t messages = noted & kMaxBatchTokens;
  m.as_lines = (noted & kCameAsLines) != 0 && c.answers_lines();
  uint32_t count = list_rows(c, [&](uint32_t k) { return m.record[1 + k]; });
  if (messages == 0 || c.present()[owner] == 0 || (part != 0 && !m.as_lines)) return;
  const Span traced(c.a.call.wait.trace, Work::kAnswer, c.warp.rank() == 0, owner);
  bool is_ready = false;
  auto await_owner = [&] {
    if (!c.a.signals) prefetch_rows(c, piece, count);
    is_ready = is_ready || owner_agrees(c, owner);
    return is_ready;
  };
  if (C::Delivery::kOwnersPlace && !await_owner()) return;
  typename C::Delivery::template Replies<C> replies{c, owner, batch};
  WEFT_ROLLED
  for (uint32_t index = 0; index < messages; ++index, m.record += routes.record_words) {
    if (index > 0) count = list_rows(c, [&](uint32_t k) { return m.record[1 + k]; });
    if (c.a.signals && !await_rows(c, m.record)) return;
    if (index + 1 < messages)
      ask_ahead(c, {m.record + routes.record_words, m.owner, m.piece, m.part, m.as_lines});
    if (count == 0) {
      replies.leave_out();
      continue;
    }
    if (!(is_reduced(c.shape.reply) ? answer_reduced(c, m, count, await_owner, replies)
                                    : answer_exact(c, m, await_owner, replies)))
      return;
    c.warp.sync();
  }
  replies.finish(m, messages);
}

// Owners start with this rank's successor; its own tokens come last, when their weights have surely come, or are summed
// where they are received.
template <class C>
WEFT_DEVICE void answer_batches(const C& c) {
  const WarpShare share = warp_share(c.block, c.warp);
  const uint32_t parts = parts_of_piece(c);
  WEFT_ROLLED
  for (uint32_t at = share.index; at < c.a.owner_jobs.value * c.owners() * parts; at += share.total) {
    const uint32_t job = at / parts;
    const uint32_t owner = (c.mesh.rank() + 1 + job / c.a.owner_jobs) % c.ranks();
    const uint32_t in_owner = job % c.a.owner_jobs;
    answer_batch(c, owner, in_owner / c.a.pieces, in_owner % c.a.pieces, at % parts);
  }
}

struct MappedCombine {
  template <class C>
  using Replies = MappedReplies<C>;
  static constexpr bool kOwnersPlace = false;

  template <class C>
  static WEFT_DEVICE uint64_t weights_at(const C& c, uint32_t owner, uint32_t token) {
    return c.part_at(c.a.call.lines != 0) + c.layout().weights +
           (uint64_t{owner} * c.a.call.max_tokens + token) * weights_stride(c.top_k());
  }
  static WEFT_DEVICE const Divisor& reply_parts(const LowLatencyCombineArgs& a) { return a.pieces; }
  template <class C>
  static WEFT_DEVICE int32_t reply_number(const C&, uint32_t /*token*/, uint32_t slot) {
    return static_cast<int32_t>(slot);
  }
  template <class C>
  static WEFT_DEVICE const std::byte* reply(const C& c, uint32_t /*peer*/, uint32_t token, int32_t number,
                                            bool lines) {
    return c.mesh.local() + c.reply_at(token, static_cast<uint32_t>(number), lines);
  }
  template <class C>
  static WEFT_DEVICE void send(const C& c) {
    send_weights(c);
    answer_batches(c);
  }
};

}  // namespace low_latency
}  // namespace weft
