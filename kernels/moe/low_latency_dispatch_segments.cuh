// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_segments.cuh: receives counts: waits for those of all sources and finds where each source's rows
// begin among those of an expert. One warp of every block does it for the block; the last block reports.
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

}  // namespace low_latency
}  // namespace weft
