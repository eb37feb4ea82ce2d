// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_layout.cuh: counts and places of rows, before any row moves.
//   dispatch_layout  counts tokens per rank and per expert and marks which token goes to which rank
//   dispatch_notify  gives every row its place, and tells all ranks how many rows go where
// dispatch_notify's blocks: the first counts the rows for each peer, sends this rank's counts to all of them,
// waits for theirs, sums them up, and reports to the host; meanwhile the others scan the tokens, one peer at
// a time, for the places of rows. Waits: the first block, for the counts of every rank. Cost: one record of
// 48 + 4 * (R + local experts) bytes per peer.
#pragma once

#include "kernels/core/reach.cuh"
#include "kernels/moe/high_throughput_args.h"
#include "kernels/moe/routes.cuh"

namespace weft {

namespace layout {

inline constexpr uint32_t kRanksAtOnce = 64;

// Marks the ranks of one token and counts it in the block's tables.
WEFT_DEVICE void count_token(const LayoutArgs& a, uint64_t token, int32_t* per_rank, int32_t* per_expert) {
  for (uint32_t first = 0; first < a.ranks; first += kRanksAtOnce) {
    uint64_t goes = 0;
    for (uint32_t k = 0; k < a.top_k; ++k) {
      const int64_t expert = expert_at(a.topk_idx, a.id_bytes, token * a.top_k + k);
      if (expert < 0 || expert >= a.experts) continue;
      const uint32_t rank = static_cast<uint32_t>(expert) / a.experts_per_rank;
      if (rank < first || rank >= first + kRanksAtOnce) continue;
      add_local(&per_expert[expert], int32_t{1});
      goes |= uint64_t{1} << (rank - first);
    }
    for (uint32_t rank = first; rank < a.ranks && rank < first + kRanksAtOnce; ++rank) {
      const bool in_rank = (goes >> (rank - first) & 1) != 0;
      a.token_in_rank[token * a.ranks + rank] = in_rank ? 1 : 0;
      if (in_rank) add_local(&per_rank[rank], int32_t{1});
    }
  }
}

// A rank's row takes the place of its right-most slot among those of the token's other ranks.
WEFT_DEVICE void place_token(const LayoutArgs& a, uint64_t token) {
  auto rank_of = [&](uint32_t k) {
    const int64_t expert = expert_at(a.topk_idx, a.id_bytes, token * a.top_k + k);
    return expert < 0 || expert >= a.experts
               ? -1
               : static_cast<int32_t>(static_cast<uint32_t>(expert) / a.experts_per_rank);
  };
  int32_t next = 0;
  for (uint32_t k = 0; k < a.top_k; ++k) {
    const int32_t rank = rank_of(k);
    bool is_last = rank >= 0;
    for (uint32_t later = k + 1; is_last && later < a.top_k; ++later) is_last = rank_of(later) != rank;
    if (is_last) a.sum_place[token * a.ranks + static_cast<uint32_t>(rank)] = next++;
  }
}

}  // namespace layout

// Blocks count in shared memory, i32[R + experts]. A cluster that is the whole grid sums it up there and stores the sums.
// Other grids add to what is in global memory, which has to be zero.
template <class MeshT, class Shape>
WEFT_KERNEL void dispatch_layout(const LayoutArgs& a, const MeshT&, const Shape&) {
  const Block block;
  const Cluster cluster;
  auto* per_rank = reinterpret_cast<int32_t*>(block.shared());
  int32_t* per_expert = per_rank + a.ranks;
  for (uint32_t i = block.rank(); i < a.ranks + a.experts; i += block.size()) per_rank[i] = 0;
  block.sync();
  const uint64_t threads = uint64_t{block.count()} * block.size();
  for (uint64_t token = uint64_t{block.index()} * block.size() + block.rank(); token < a.tokens;
       token += threads) {
    layout::count_token(a, token, per_rank, per_expert);
    if (a.sum_place) layout::place_token(a, token);
  }
  cluster.sync();
  if (cluster.blocks() == block.count()) {
    const uint32_t first = cluster.rank() * block.size() + block.rank();
    for (uint32_t i = first; i < a.ranks + a.experts; i += cluster.blocks() * block.size()) {
      int32_t sum = 0;
      for (uint32_t other = 0; other < cluster.blocks(); ++other)
        sum += *cluster.shared_of(other, &per_rank[i]);
      a.counts[i] = sum;
    }
    cluster.sync();  // shared memory stays until all have read it
  } else {
    for (uint32_t i = block.rank(); i < a.ranks + a.experts; i += block.size())
      if (per_rank[i] != 0) add_local(&a.counts[i], per_rank[i]);
  }
}

namespace notify {

inline constexpr uint32_t kTokensAtOnce = 4;  // of a thread: memory is far

// Exclusive scan over the tokens of value_of(token), by the whole block; place(token, value, before) gets
// each result. shared: u32[warps].
template <class ValueOf, class Place>
WEFT_DEVICE void scan_tokens(Block block, Warp warp, uint32_t* shared, uint64_t tokens, ValueOf value_of,
                             Place place) {
  uint32_t total = 0;
  for (uint64_t first = 0; first < tokens; first += uint64_t{block.size()} * kTokensAtOnce) {
    const uint64_t token = first + uint64_t{warp.index()} * warp.size() * kTokensAtOnce + warp.rank();
    uint32_t values[kTokensAtOnce];
    WEFT_UNROLL
    for (uint32_t i = 0; i < kTokensAtOnce; ++i) {
      const uint64_t at = token + i * warp.size();
      values[i] = at < tokens ? value_of(at) : 0;
    }
    uint32_t before[kTokensAtOnce];
    uint32_t warp_total = 0;
    WEFT_UNROLL
    for (uint32_t i = 0; i < kTokensAtOnce; ++i) {
      before[i] = warp_total + warp.scan_exclusive(values[i]);
      warp_total += warp.sum(values[i]);
    }
    if (warp.rank() == 0) shared[warp.index()] = warp_total;
    block.sync();
    uint32_t before_warp = total;
    for (uint32_t w = 0; w < block.warps(); ++w) {
      if (w < warp.index()) before_warp += shared[w];
      total += shared[w];
    }
    WEFT_UNROLL
    for (uint32_t i = 0; i < kTokensAtOnce; ++i) {
      const uint64_t at = token + i * warp.size();
      if (at < tokens) place(at, values[i], before_warp + before[i]);
    }
    block.sync();
  }
}

WEFT_DEVICE void scan_peer(const NotifyArgs& a, Block block, Warp warp, uint32_t* shared, uint32_t ranks,
                           uint32_t peer) {
  scan_tokens(
      block, warp, shared, a.mine.tokens,
      [&](uint64_t token) { return uint32_t{a.token_in_rank[token * ranks + peer] != 0}; },
      [&](uint64_t token, uint32_t goes, uint32_t before) {
        a.send_row[token * ranks + peer] = goes ? static_cast<int32_t>(before) : -1;
      });
}

WEFT_DEVICE void scan_slots(const NotifyArgs& a, Block block, Warp warp, uint32_t* shared, uint32_t ranks) {
  scan_tokens(
      block, warp, shared, a.mine.tokens,
      [&](uint64_t token) {
        uint32_t copies = 0;
        for (uint32_t peer = 0; peer < ranks; ++peer) copies += a.token_in_rank[token * ranks + peer] != 0;
        return copies;
      },
      [&](uint64_t token, uint32_t, uint32_t before) { a.slot_base[token] = static_cast<int32_t>(before); });
}

WEFT_DEVICE uint64_t record_at(const HighThroughputOffsets& at, uint64_t epoch, uint32_t ranks,
                               uint32_t source) {
  return at.count_record + ((epoch & 1) * ranks + source) * at.record_words * 4;
}

// Where that of a source is found here.
template <class MeshT>
WEFT_DEVICE const std::byte* record_from(const MeshT& mesh, const HighThroughputOffsets& at, uint64_t epoch,
                                         uint32_t source) {
  return mesh.local() + records_of(mesh, source) + record_at(at, epoch, mesh.ranks(), source);
}

// rows_to[peer], u32[R] of shared memory, becomes how many tokens go to each peer. The block.
WEFT_DEVICE void count_rows(const NotifyArgs& a, Block block, Warp warp, uint32_t* rows_to, uint32_t ranks) {
  for (uint32_t i = block.rank(); i < ranks; i += block.size()) rows_to[i] = 0;
  block.sync();
  if (a.mine.tokens == 0) return;
  for (uint32_t first = 0; first < ranks; first += warp.size()) {  // a lane keeps the count of one of these
    const uint32_t end = first + warp.size() < ranks ? first + warp.size() : ranks;
    uint32_t rows = 0;
    for (uint64_t base = uint64_t{warp.index()} * warp.size(); base < a.mine.tokens; base += block.size()) {
      const uint64_t token = base + warp.rank();
      for (uint32_t peer = first; peer < end; ++peer) {
        const bool goes = token < a.mine.tokens && a.token_in_rank[token * ranks + peer] != 0;
        const uint32_t going = warp.count(goes);
        if (first + warp.rank() == peer) rows += going;
      }
    }
    if (first + warp.rank() < end) add_local(&rows_to[first + warp.rank()], rows);
  }
  block.sync();
}

// One warp per peer writes this rank's record there, then its signal.
template <class MeshT>
WEFT_DEVICE void send_counts(const NotifyArgs& a, Block block, Warp warp, const MeshT& mesh,
                             const uint32_t* rows_to, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  for (uint32_t peer = warp.index(); peer < ranks; peer += block.warps()) {
    auto channel = mesh.to(peer);
    auto* record = reinterpret_cast<uint32_t*>(channel.mapped() + record_at(a.at, epoch, ranks, mesh.rank()));
    const auto* header = reinterpret_cast<const uint32_t*>(&a.mine);
    constexpr uint32_t kHeaderWords = sizeof(CountHeader) / 4;
    for (uint32_t i = warp.rank(); i < kHeaderWords; i += warp.size()) record[i] = header[i];
    for (uint32_t i = warp.rank(); i < ranks; i += warp.size()) record[kHeaderWords + i] = rows_to[i];
    const uint32_t first_expert = peer * a.experts_per_rank;
    for (uint32_t i = warp.rank(); i < a.experts_per_rank && first_expert + i < a.mine.experts;
         i += warp.size())
      record[kHeaderWords + ranks + i] = static_cast<uint32_t>(a.tokens_per_expert[first_expert + i]);
    warp.sync();
    if (warp.rank() == 0) channel.put_value(a.at.count_signal + mesh.rank() * 8, epoch);
  }
}

// Thread `peer` turns column `peer` of the counts into rank prefixes and reports its totals.
template <class MeshT>
WEFT_DEVICE void sum_counts(const NotifyArgs& a, Block block, const MeshT& mesh, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  constexpr uint32_t kHeaderWords = sizeof(CountHeader) / 4;
  auto record_of = [&](uint32_t source) {
    return reinterpret_cast<const uint32_t*>(record_from(mesh, a.at, epoch, source));
  };
  auto* per_rank = reinterpret_cast<RankCounts*>(a.report + 1);
  auto* per_expert = reinterpret_cast<int32_t*>(per_rank + ranks);
  for (uint32_t rank = block.rank(); rank < ranks; rank += block.size()) {
    const auto* theirs = reinterpret_cast<const CountHeader*>(record_of(rank));
    RankCounts totals{0, 0, theirs->free_bytes, theirs->staging_bytes};
    for (uint32_t other = 0; other < ranks; ++other) {
      totals.received_rows += record_of(other)[kHeaderWords + rank];
      totals.sent_rows += record_of(rank)[kHeaderWords + other];
      a.prefix[other * ranks + rank] = static_cast<int32_t>(totals.received_rows);
    }
    per_rank[rank] = totals;
  }
  const uint32_t first_expert = mesh.rank() * a.experts_per_rank;
  for (uint32_t i = block.rank(); i < a.experts_per_rank && first_expert + i < a.mine.experts;
       i += block.size()) {
    uint32_t tokens = 0;
    for (uint32_t source = 0; source < ranks; ++source) tokens += record_of(source)[kHeaderWords + ranks + i];
    per_expert[i] = static_cast<int32_t>(tokens);
  }
}

// The first word in which another rank's header differs from this one's, or kAgreedWords.
WEFT_DEVICE uint32_t first_difference(const uint32_t* theirs, const uint32_t* mine) {
  uint32_t found = kAgreedWords;
  WEFT_UNROLL
  for (uint32_t i = 0; i < kAgreedWords; ++i) {
    const uint32_t word = kAgreedWords - 1 - i;
    if (theirs[word] != mine[word]) found = word;
  }
  return found;
}

// Reports the first rank that disagrees with this one, and about what. One warp.
template <class MeshT>
WEFT_DEVICE void compare_headers(const NotifyArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  const auto* mine = reinterpret_cast<const uint32_t*>(&a.mine);
  for (uint32_t first = 0; first < ranks; first += warp.size()) {
    const uint32_t rank = first + warp.rank();
    const auto* theirs =
        reinterpret_cast<const uint32_t*>(record_from(mesh, a.at, epoch, rank < ranks ? rank : mesh.rank()));
    const uint32_t word = first_difference(theirs, mine);
    const uint32_t disagreeing = warp.min(word == kAgreedWords ? ranks : rank);
    if (disagreeing == ranks) continue;
    if (rank == disagreeing) {
      a.report->disagreeing_word = word;
      a.report->disagreeing_rank = rank;
      a.report->theirs = theirs[word];
      a.report->mine = mine[word];
    }
    return;
  }
  if (warp.rank() == 0) a.report->disagreeing_word = kAgreedWords;
}

// Tells all peers this rank's counts, waits for theirs, and reports what follows from them. The block;
// shared: u32[R + 1].
template <class MeshT>
WEFT_DEVICE void exchange_counts(const NotifyArgs& a, Block block, Warp warp, const MeshT& mesh,
                                 uint32_t* shared) {
  const uint32_t ranks = mesh.ranks();
  const uint64_t epoch = a.state->epoch + 1;
  uint32_t* all_came = shared;
  uint32_t* rows_to = shared + 1;
  const bool takes_part = !is_void(a.wait, load_gave_up(a.wait));
  count_rows(a, block, warp, rows_to, ranks);
  if (takes_part) send_counts(a, block, warp, mesh, rows_to, epoch);
  if (warp.index() == 0) {
    const bool came =
        takes_part && wait_all_peers(warp, ranks, epoch, Site::kCounts, a.wait, [&](uint32_t peer) {
          return word_from(mesh, peer, a.at.count_signal) + peer;
        });
    if (warp.rank() == 0) *all_came = came ? 1 : 0;
  }
  block.sync();
  const bool is_barrier = a.mine.experts == 0;  // nobody looks at what it counts
  if (*all_came != 0 && !is_barrier) {
    sum_counts(a, block, mesh, epoch);
    if (warp.index() == block.warps() - 1) compare_headers(a, warp, mesh, epoch);
  }
  block.sync();
  if (block.rank() != 0) return;
  a.state->epoch = epoch;
  if (a.host_waits) store_release(&a.report->epoch, epoch);
}

}  // namespace notify

template <class MeshT, class Shape>
WEFT_KERNEL void dispatch_notify(const NotifyArgs& a, const MeshT& mesh, const Shape&) {
  const Block block;
  const Warp warp;
  auto* shared = reinterpret_cast<uint32_t*>(block.shared());  // u32[R + 1] or u32[warps]
  const BlockSpan traced(a.wait.trace, Work::kNotify);
  const uint32_t ranks = mesh.ranks();
  for (uint32_t job = block.index(); job < ranks + 2; job += block.count()) {
    if (job == 0) notify::exchange_counts(a, block, warp, mesh, shared);
    if (job == 1) notify::scan_slots(a, block, warp, shared, ranks);
    if (job >= 2) notify::scan_peer(a, block, warp, shared, ranks, job - 2);
  }
}

}  // namespace weft
