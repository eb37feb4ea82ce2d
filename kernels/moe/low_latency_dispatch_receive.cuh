// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_receive.cuh: receives counts and messages. One warp of every block waits for the counts of all sources
// and finds where each source's rows begin among those of an expert; the last block reports. The others follow the batches
// of all sources and copy each message to the rows of its experts as the batch's word moves or its lines come, and note
// where its answer goes.
#pragma once

#include "kernels/moe/low_latency_dispatch_call.cuh"

namespace weft {
namespace low_latency {

inline constexpr uint32_t kCountsInFlight = 8;

// ---- step 3

// The warp: waits for the counts of all sources for all experts here, from word `first` on, as many words as its lanes ask
// for at once, and notes them in begin(), in the same order. A source that does not say so sends nothing.
template <class D>
WEFT_DEVICE void await_counts(const D& d, uint32_t first) {
  const uint32_t words = d.ranks() * d.local_experts();
  auto at = [&](uint32_t i) { return first + d.warp.rank() + i * d.warp.size(); };
  auto source_of = [&](uint32_t i) { return at(i) / d.local_experts(); };
  auto word_at = [&](uint32_t i) { return d.count_word_at(source_of(i), at(i) % d.local_experts()); };
  auto is_awaited = [&](uint32_t i) {
    return at(i) < words && at(i) % d.local_experts() < d.own_experts() && d.sends_rows()[source_of(i)] != 0;
  };
  if (at(0) >= words) return;
  Span traced(d.a.call.wait.trace, Site::kLowLatencyDispatchRecv, source_of(0));
  uint64_t seen[kCountsInFlight] = {};
  auto all_came = [&] {
    bool came = true;
    WEFT_UNROLL
    for (uint32_t i = 0; i < kCountsInFlight; ++i)
      if (at(i) < words) seen[i] = load_relaxed(word_at(i));
    WEFT_UNROLL
    for (uint32_t i = 0; i < kCountsInFlight; ++i) {
      if (!is_awaited(i) || is_of_call(seen[i], d.epoch.number)) continue;
      traced.set_peer(source_of(i));
      came = false;
    }
    return came;
  };
  uint64_t waited_ns = 0;
  const auto& rule = wait_rule(d.a.call, d.mesh);
  const bool came = poll(rule, waited_ns, all_came);
  WEFT_UNROLL
  for (uint32_t i = 0; i < kCountsInFlight; ++i)
    if (at(i) < words) d.begin()[at(i)] = static_cast<uint32_t>(seen[i]);
  WEFT_ROLLED
  for (uint32_t i = 0; !came && i < kCountsInFlight; ++i) {
    if (!is_awaited(i)) continue;
    const uint64_t word = load_relaxed(word_at(i));
    if (is_of_call(word, d.epoch.number)) continue;
    lose(d.a.call, source_of(i), Site::kLowLatencyDispatchRecv, d.epoch.number, word >> 32, waited_ns);
    d.sends_rows()[source_of(i)] = 0;
  }
}

// The last block, which has least to unpack, looks for ranks that make another call; where that is cheap each block
// does. The warp.
template <class D>
WEFT_DEVICE void check_sources(const D& d) {
  for (uint32_t source = d.warp.rank(); source < d.ranks(); source += d.warp.size())
    if (d.sends_rows()[source] != 0 &&
        (!await_handshake(d.a.call, d.mesh, d.epoch, source, Site::kLowLatencyDispatchRecv) ||
         !agrees(d.a.call, d.mesh, d.epoch, source, 0)))
      d.sends_rows()[source] = 0;
  d.warp.sync();
}

// The same warp, when it knows how many rows each expert has: begin()[source][expert] becomes a place among all rows.
template <class D>
WEFT_DEVICE void pack_segments(const D& d, bool reports) {
  d.warp.sync();
  uint32_t before = 0;  // rows of the experts of earlier turns, with their padding
  WEFT_ROLLED
  for (uint32_t first = 0; first < d.own_experts(); first += d.warp.size()) {
    const uint32_t expert = first + d.warp.rank();
    const uint32_t rows = expert < d.own_experts() ? d.padded(d.expert_rows()[expert]) : 0;
    const uint32_t at = before + d.warp.scan_exclusive(rows);
    before = d.warp.broadcast(at + rows, d.warp.size() - 1);
    WEFT_ROLLED
    for (uint32_t source = 0; expert < d.own_experts() && source < d.ranks(); ++source) {
      uint32_t& segment = d.begin()[source * d.local_experts() + expert];
      if (reports) {
        const uint32_t next = source + 1 < d.ranks() ? d.begin()[(source + 1) * d.local_experts() + expert]
                                                     : d.expert_rows()[expert];
        d.a.layout_range[uint64_t{expert} * d.ranks() + source] =
            static_cast<int64_t>(uint64_t{at + segment} << 32 | (next - segment));
      }
      segment += at;
    }
  }
  if (reports && d.warp.rank() == 0 && before > d.a.max_rows)
    raise(d.a.call.wait.fault, Site::kPackedCapacity, d.a.call.wait.self, 0, d.a.max_rows, before, 0);
}

// One warp: waits for the counts of all sources; begin()[source][expert] becomes where its segment begins.
// The last block also reports them.
template <class D>
WEFT_DEVICE void find_segments(const D& d) {
  const Span traced(d.a.call.wait.trace, Work::kSegments, d.warp.rank() == 0);
  const bool reports = d.block.index() + 1 == d.block.count();
  for (uint32_t source = d.warp.rank(); source < d.ranks(); source += d.warp.size())
    d.sends_rows()[source] = d.present()[source];
  d.warp.sync();
  // Before the counts: a rank that makes another call has other counts, and counts that come through a port are there
  // once the handshake is.
  if (reports || D::kChecksFirst) check_sources(d);
  WEFT_ROLLED
  for (uint32_t first = 0; first < d.ranks() * d.local_experts(); first += kCountsInFlight * d.warp.size())
    await_counts(d, first);
  d.warp.sync();
  WEFT_ROLLED
  for (uint32_t expert = d.warp.rank(); expert < d.own_experts(); expert += d.warp.size()) {
    uint32_t begin = 0;
    WEFT_ROLLED
    for (uint32_t source = 0; source < d.ranks(); ++source) {
      uint32_t& segment = d.begin()[source * d.local_experts() + expert];
      const uint32_t count = d.sends_rows()[source] != 0 ? segment : 0;
      segment = begin;
      if (reports && !d.is_packed())
        d.a.layout_range[uint64_t{expert} * d.ranks() + source] =
            static_cast<int64_t>(uint64_t{begin} << 32 | count);
      begin += count;
    }
    if (d.is_packed()) d.expert_rows()[expert] = begin;
    if (!reports) continue;
    // With room for R * M rows, only tokens that name an expert more than once can bring too many.
    if (!d.is_packed() && begin > d.a.expert_rows)
      raise(d.a.call.wait.fault,
            d.a.expert_rows < d.ranks() * d.a.call.max_tokens ? Site::kExpertCapacity
                                                              : Site::kLowLatencyCapacity,
            d.a.call.wait.self, expert, d.a.expert_rows, begin, 0);
    d.a.counts[expert] = static_cast<int32_t>(begin);
    if (d.a.expert_stats) d.a.expert_stats[expert] += static_cast<int32_t>(begin);
  }
  if (d.is_packed()) pack_segments(d, reports);
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

// Vectors of a message that a lane asks for at once: memory is far.
inline constexpr uint32_t kVecsInFlight = 4;

// ---- step 4

// Where the scales of a row begin, in words.
template <class D>
WEFT_DEVICE uint64_t scales_of(const D& d, uint32_t expert, uint64_t in_expert) {
  const uint64_t row = d.a.tiled_scales ? tiled_row(in_expert, static_cast<uint64_t>(d.shape.scale_bytes) / 4)
                                        : in_expert * d.a.scale_row_stride;
  return expert * d.a.scale_expert_stride + row;
}

// Where the row of slot k of the message in head() goes, or -1: not here. Packed rows are all of one expert, as far as
// places go.
struct RowPlace {
  int32_t row;
  uint32_t expert;
  uint64_t in_expert;
};
template <class D>
WEFT_DEVICE RowPlace row_place(const D& d, uint32_t source, uint32_t k) {
  const auto* head = reinterpret_cast<const uint32_t*>(d.head());
  const uint32_t expert = d.own_expert(head[d.message().expert + k]);
  // A rank with other sizes may have overwritten this message; the call reports that rank.
  if (expert >= d.own_experts() || d.sends_rows()[source] == 0) return {-1, 0, 0};
  const uint64_t in_expert = d.begin()[source * d.local_experts() + expert] + head[d.message().place + k];
  if (d.is_packed())
    return in_expert < d.a.max_rows ? RowPlace{static_cast<int32_t>(in_expert), 0, in_expert}
                                    : RowPlace{-1, 0, 0};
  if (in_expert >= d.a.expert_rows) return {-1, 0, 0};
  return {static_cast<int32_t>(expert * d.a.expert_rows + in_expert), expert, in_expert};
}

// Whether the message in head() has a row for this rank: what crosses once for a domain may be for others of it. The
// warp.
template <class D>
WEFT_DEVICE bool is_for_this_rank(const D& d) {
  if (!d.is_shared()) return true;
  d.warp.sync();
  const auto* head = reinterpret_cast<const uint32_t*>(d.head());
  bool is_own = false;
  for (uint32_t k = d.warp.rank(); k < d.top_k(); k += d.warp.size())
    is_own = is_own || d.own_expert(head[d.message().expert + k]) < d.own_experts();
  return d.warp.any(is_own);
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

// One lane per slot, off the critical path: notes where the rows of the message in head() came from, for the
// combine. The warp.
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

// The same of a whole body, by one thread of the host that has nothing to wait for. `from` is its row, there or where the
// source keeps it.
template <class D>
WEFT_DEVICE void copy_body(const D& d, uint32_t count, const std::byte* from, const Vec16* body) {
  const auto row_bytes = static_cast<uint64_t>(d.shape.row_bytes);
  for (uint32_t k = 0; k < count; ++k) {
    std::byte* row = d.a.out + static_cast<uint64_t>(d.rows()[k]) * row_bytes;
    copy_row_alone(row, from, row_bytes, is_past_caches(d.a.call, d.shape.row_bytes));
  }
  for (uint32_t vec = vecs_in(row_bytes); vec < d.message().body_vecs(); ++vec)
    store_scales(d, count, vec, body[vec]);
}

// A message on its way here, of which this warp copies one part of the body.
template <class D>
struct Incoming {
  const D& d;
  uint32_t source;
  uint32_t batch;
  uint32_t split;
  VecLayout layout;  // of the body
  Range part;
  const Vec16* message;            // the lines, until a word says that there are others
  Vec16 held[kVecsInFlight] = {};  // of the part, from its first on
  bool has_first = false;          // these were asked for
  bool came = false;               // in this lane, all of these

  WEFT_DEVICE Incoming(const D& dispatch, uint32_t from, uint32_t of_batch, uint32_t of_split)
      : d(dispatch),
        source(from),
        batch(of_batch),
        split(of_split),
        layout{d.takes_lines(), d.message().body_vecs(), d.tag()},
        part(layout.range(split, d.a.receive_splits)),
        message(reinterpret_cast<const Vec16*>(d.mesh.local() + d.line_message_at(source, batch))) {}

  WEFT_DEVICE void load(uint32_t first) {
    const uint32_t head_vecs = d.message().head_vecs();
    const Vec16* body = message + (layout.lines ? parts_of(head_vecs) : head_vecs);
    came = true;
    WEFT_UNROLL
    for (uint32_t i = 0; i < kVecsInFlight; ++i) {
      const uint32_t index = first + d.warp.rank() + i * d.warp.size();
      if (index < part.last) came = layout.load(body, index, held[i]) && came;
    }
  }

  // A look at the head of lines, and, if the others are likely to come with it, at the part. Each lane's own.
  WEFT_DEVICE bool look(bool takes_first) {
    has_first = takes_first;
    if (takes_first) load(part.first);
    const bool head_came = take_lines(d.warp, message, d.message().head_vecs(), d.tag(), d.head());
    return head_came && (!takes_first || came);
  }
  // The messages that a word announces.
  WEFT_DEVICE void take(uint32_t index) {
    if (layout.lines) {
      layout.lines = false;
      part = layout.range(split, d.a.receive_splits);
    }
    message = reinterpret_cast<const Vec16*>(d.keeps_own(source) ? d.own_message(batch, index)
                                                                 : d.message_from(source, batch, index));
    has_first = !kCopiesAlone && !d.is_shared();  // which may be for another rank
    if (has_first) load(part.first);
    for (uint32_t i = d.warp.rank(); i < d.message().head_vecs(); i += d.warp.size())
      d.head()[i] = load_vec_fresh(message + i);
  }

  // Where the message's row is: in its body, or where its source keeps it. On the host.
  WEFT_DEVICE const std::byte* row_of_message() const {
    const auto* head = reinterpret_cast<const uint32_t*>(d.head());
    if (head[kHeadKeepsRow] != 0) return near_window(d.mesh, source) + d.source_row_at(source, head[0]);
    return reinterpret_cast<const std::byte*>(message + d.message().head_vecs());
  }

  // Copies the part to its places, and notes the record, if any, once the head has come. False: the rest of
  // the lines did not. The warp.
  WEFT_DEVICE bool unpack(int32_t* record) {
    const Span traced(d.a.call.wait.trace, Work::kUnpack, d.warp.rank() == 0, source);
    d.warp.sync();
    const uint32_t count = place_message(d, source);
    const bool is_full = kCopiesAlone && !layout.lines && d.a.receive_splits.value == 1;
    if (is_full) copy_body(d, count, row_of_message(), message + d.message().head_vecs());
    WEFT_ROLLED
    for (uint32_t first = is_full ? part.last : part.first; first < part.last;
         first += kVecsInFlight * d.warp.size()) {
      if (!has_first) load(first);
      has_first = false;
      if (layout.lines && d.warp.any(!came) && !await_load(first)) return false;
      uint32_t vecs[kVecsInFlight];
      WEFT_UNROLL
      for (uint32_t i = 0; i < kVecsInFlight; ++i) {
        const uint32_t index = first + d.warp.rank() + i * d.warp.size();
        vecs[i] = index < part.last && layout.holds(index) ? layout.vec(index) : ~uint32_t{0};
      }
      store_body(d, count, vecs, held);
    }
    if (record) note_message(d, source, record);
    d.warp.sync();
    return true;
  }
  WEFT_DEVICE bool await_load(uint32_t first) {
    return await_lines(d.a.call, d.warp, d.mesh, d.epoch, source, Site::kLowLatencyDispatchRecv, [&] {
      load(first);
      return !d.warp.any(!came);
    });
  }
};

template <class D>
WEFT_DEVICE const uint64_t* batch_word(const D& d, uint32_t source, uint32_t batch) {
  const uint64_t at = word_offset(d.a.call, d.ranks(), d.epoch, source, batch);
  if (board_of(d.a.call, d.mesh).control)
    return reinterpret_cast<const uint64_t*>(control_at(d.a.call, d.mesh, at));
  return reinterpret_cast<const uint64_t*>(d.inbox(source) + records_of(d.mesh, source) + at);
}

// Waits until a batch's word reaches `want`, or, where lines may come instead, until the lines of the first
// message have come; the word is then less than `want`. The warp. False: neither came.
template <class D>
WEFT_DEVICE bool await_either(const D& d, Incoming<D>& incoming, uint64_t want, uint64_t& word) {
  const uint64_t* at = batch_word(d, incoming.source, incoming.batch);
  const bool takes_first = d.sends_lines();  // a rank with few tokens mostly has peers with few
  auto look = [&] {
    word = d.warp.rank() == 0 ? load_signal(at) : 0;
    const bool came = incoming.look(takes_first);
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
  if (d.warp.rank() == 0 && !await(d.a.call, d.mesh, batch_word(d, incoming.source, incoming.batch), want,
                                   incoming.source, Site::kLowLatencyDispatchRecv, kWordEpoch, word))
    word = 0;
  word = d.warp.broadcast(word);
  return word >= want;
}

// Follows one batch until all its messages are unpacked. Returns what is to be noted of it. The warp.
template <class D>
WEFT_DEVICE uint32_t receive_messages(const D& d, uint32_t source, uint32_t batch, uint32_t split) {
  const uint64_t start = cycles();
  Incoming<D> incoming(d, source, batch, split);
  uint32_t unpacked = 0, noted = 0;
  for (uint64_t word = 0; (word & kWordDone) == 0;) {
    const uint64_t want = d.epoch.number * kWordEpoch + unpacked + 1;
    const bool is_first = unpacked == 0;
    if (!(is_first && incoming.layout.lines ? await_either(d, incoming, want, word)
                                            : await_word(d, incoming, want, word)))
      break;
    if (is_first && batch == 0 && split == 0 && d.a.wait_cycles && d.warp.rank() == 0)
      add_local(&d.a.wait_cycles[source], cycles() - start);
    const bool are_lines = word < want;
    if (are_lines) word = kWordDone | 1;  // a batch of lines has one message
    const auto arrived = static_cast<uint32_t>(word & kMaxBatchTokens);
    const RoutesLayout routes = d.routes();
    const uint64_t slot = (uint64_t{source} * d.batches().count + batch) * d.batches().capacity;
    WEFT_ROLLED
    for (; unpacked < arrived; ++unpacked) {
      if (!are_lines) incoming.take(unpacked);
      if (!is_for_this_rank(d)) continue;
      int32_t* record = d.a.routes + routes.records + (slot + noted) * routes.record_words;
      if (!incoming.unpack(split == 0 ? record : nullptr)) return 0;
      ++noted;
    }
    if (are_lines) return 1 | kCameAsLines;
  }
  return noted;
}

template <class D>
WEFT_DEVICE void receive_batch(const D& d, uint32_t source, uint32_t batch, uint32_t split) {
  const uint32_t came = d.present()[source] == 0 ? 0 : receive_messages(d, source, batch, split);
  if (split == 0 && d.warp.rank() == 0)
    d.a.routes[d.routes().counts + uint64_t{source} * d.batches().count + batch] = static_cast<int32_t>(came);
}

// Each rank starts with itself and goes on with its successor, so that it follows the order of arrival.
template <class D>
WEFT_DEVICE void receive_batches(const D& d) {
  const WarpShare share = warp_share(d.block, d.warp);
  WEFT_ROLLED
  for (uint32_t job = share.index; job < d.a.source_jobs.value * d.ranks(); job += share.total) {
    const uint32_t source = (d.mesh.rank() + job / d.a.source_jobs) % d.ranks();
    const uint32_t in_source = job % d.a.source_jobs;
    receive_batch(d, source, in_source / d.a.receive_splits, in_source % d.a.receive_splits);
  }
}

}  // namespace low_latency
}  // namespace weft
