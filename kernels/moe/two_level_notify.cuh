// SPDX-License-Identifier: Apache-2.0
//
// two_level_notify.cuh: dispatch_notify() where ranks do not all map each other: counts and places, before any row
// moves.
// Steps: as dispatch_notify(); a record also says how many messages go to each island, and leaves for port peers from an
// outbox. From all of them follow the places of rows that come back, too.
// Waits: the first block, for the counts of every rank. Cost: one record of 48 + 4 * (R + I + local experts) bytes per
// peer.
#pragma once

#include "kernels/core/reach.cuh"
#include "kernels/moe/high_throughput_layout.cuh"
#include "kernels/moe/two_level_args.h"

namespace weft {
namespace two_level {

inline constexpr uint32_t kHeaderWords = sizeof(CountHeader) / 4;

// Fills sorted[0..count) with those i that have a key of 0 or more, by key; keys differ. Then -1.
template <class KeyOf>
WEFT_DEVICE void sort_places(uint32_t count, int32_t* sorted, KeyOf key_of) {
  for (uint32_t i = 0; i < count; ++i) sorted[i] = -1;
  uint32_t filled = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const int32_t key = key_of(i);
    if (key < 0) continue;
    uint32_t at = filled++;
    for (; at > 0 && key_of(static_cast<uint32_t>(sorted[at - 1])) > key; --at) sorted[at] = sorted[at - 1];
    sorted[at] = static_cast<int32_t>(i);
  }
}

WEFT_DEVICE bool goes_to_island(const TwoLevelNotifyArgs& a, uint32_t ranks, uint64_t token,
                                uint32_t island) {
  const Islands& is = a.islands;
  for (uint32_t i = is.first[island]; i < is.first[island + 1]; ++i)
    if (a.base.token_in_rank[token * ranks + is.members[i]] != 0) return true;
  return false;
}

WEFT_DEVICE void scan_island(const TwoLevelNotifyArgs& a, Block block, Warp warp, uint32_t* shared,
                             uint32_t ranks, uint32_t island) {
  notify::scan_tokens(
      block, warp, shared, a.base.mine.tokens,
      [&](uint64_t token) { return uint32_t{goes_to_island(a, ranks, token, island)}; },
      [&](uint64_t token, uint32_t goes, uint32_t before) {
        a.routes.send_pair[token * a.islands.count + island] = goes ? static_cast<int32_t>(before) : -1;
      });
}

// pairs_to[island], u32[I] of shared memory, becomes how many tokens go to each. The block.
WEFT_DEVICE void count_pairs(const TwoLevelNotifyArgs& a, Block block, Warp warp, uint32_t* pairs_to,
                             uint32_t ranks) {
  for (uint32_t island = 0; island < a.islands.count; ++island) {
    if (block.rank() == 0) pairs_to[island] = 0;
    block.sync();
    uint32_t pairs = 0;
    for (uint64_t token = block.rank(); token < a.base.mine.tokens; token += block.size())
      pairs += goes_to_island(a, ranks, token, island) ? 1 : 0;
    pairs = warp.sum(pairs);
    if (warp.rank() == 0) add_local(&pairs_to[island], pairs);
  }
  block.sync();
}

// Which word of a record says how many messages go to an island.
WEFT_DEVICE uint32_t pair_word(const TwoLevelNotifyArgs& a, uint32_t ranks, uint32_t island) {
  return kHeaderWords + ranks + a.base.experts_per_rank + island;
}

WEFT_DEVICE void write_record(const TwoLevelNotifyArgs& a, Warp warp, uint32_t* record, uint32_t ranks,
                              uint32_t peer, const uint32_t* rows_to, const uint32_t* pairs_to) {
  const auto* header = reinterpret_cast<const uint32_t*>(&a.base.mine);
  const uint32_t experts = a.base.experts_per_rank, first_expert = peer * experts;
  for (uint32_t i = warp.rank(); i < kHeaderWords; i += warp.size()) record[i] = header[i];
  for (uint32_t i = warp.rank(); i < ranks; i += warp.size()) record[kHeaderWords + i] = rows_to[i];
  for (uint32_t i = warp.rank(); i < experts; i += warp.size())
    record[kHeaderWords + ranks + i] = first_expert + i < a.base.mine.experts
                                           ? static_cast<uint32_t>(a.base.tokens_per_expert[first_expert + i])
                                           : 0;
  for (uint32_t i = warp.rank(); i < a.islands.count; i += warp.size())
    record[pair_word(a, ranks, i)] = pairs_to[i];
  warp.sync();
}

// One warp per peer writes this rank's record there, then its signal; or has it put there.
template <class MeshT>
WEFT_DEVICE void send_counts(const TwoLevelNotifyArgs& a, Block block, Warp warp, const MeshT& mesh,
                             const uint32_t* rows_to, const uint32_t* pairs_to, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  const uint64_t to = notify::record_at(a.base.at, epoch, ranks, mesh.rank());
  const uint64_t signal = a.base.at.count_signal + mesh.rank() * 8;
  const uint64_t bytes = round_up(pair_word(a, ranks, a.islands.count) * 4, 16);
  for (uint32_t peer = warp.index(); peer < ranks; peer += block.warps()) {
    const uint64_t outgoing = a.at.counts_out + ((epoch & 1) * ranks + peer) * a.base.at.record_words * 4;
    const Outgoing<MeshT> record(mesh, peer, near_window(mesh, peer), to, outgoing,
                                 port_places(mesh).records);
    write_record(a, warp, reinterpret_cast<uint32_t*>(record.at()), ranks, peer, rows_to, pairs_to);
    record.send(warp, bytes, signal, epoch);
  }
}

// Thread `rank`: in the staging of that rank, rows lie by source, then by the member that they come back from; its own it
// reads where they are. Notes where this island's begin, and reports how many there are.
template <class MeshT>
WEFT_DEVICE void place_returns(const TwoLevelNotifyArgs& a, Block block, const MeshT& mesh, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  const Islands& is = a.islands;
  auto* per_rank = reinterpret_cast<RankCounts*>(a.base.report + 1);
  for (uint32_t hub = block.rank(); hub < ranks; hub += block.size()) {
    const uint32_t island = is.island[hub];
    const bool is_mine = island == is.island[mesh.rank()];
    uint32_t rows = 0;
    for (uint32_t source = 0; source < ranks; ++source) {
      if (is.hub(source, island) != hub) continue;
      const auto* record =
          reinterpret_cast<const uint32_t*>(notify::record_from(mesh, a.base.at, epoch, source));
      for (uint32_t i = 0; i < is.size(island); ++i) {
        const uint32_t member = is.member(island, i);
        if (is_mine) a.routes.back_first[source * is.widest + i] = static_cast<int32_t>(rows);
        if (member != hub) rows += record[kHeaderWords + member];
      }
    }
    per_rank[hub].sent_rows = rows;
  }
}

// Thread `rank`: how many messages that rank sends to each island. One thread also gives the records of those that this
// rank serves their places.
template <class MeshT>
WEFT_DEVICE void sum_pairs(const TwoLevelNotifyArgs& a, Block block, const MeshT& mesh, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  const Islands& is = a.islands;
  const auto pairs = [&](uint32_t source, uint32_t island) {
    const auto* record =
        reinterpret_cast<const uint32_t*>(notify::record_from(mesh, a.base.at, epoch, source));
    return static_cast<int32_t>(record[pair_word(a, ranks, island)]);
  };
  for (uint32_t source = block.rank(); source < ranks; source += block.size())
    for (uint32_t island = 0; island < is.count; ++island)
      a.routes.pairs[source * is.count + island] = pairs(source, island);
  if (block.rank() != 0) return;
  for (uint32_t island = 0; island < is.count; ++island) a.routes.handed_on[island] = 0;
  int32_t messages = 0;
  for (uint32_t i = 0; i < is.served_count; ++i) {
    const int32_t from_it = pairs(is.served[i], is.island[mesh.rank()]);
    a.routes.hub_first[is.served[i]] = messages;
    a.routes.handed_on[is.island[is.served[i]]] += from_it;
    messages += from_it;
  }
  for (uint32_t island = 1; island < is.count; ++island)
    a.routes.handed_on[island] += a.routes.handed_on[island - 1];
}

// Writes in which order a token's islands are added, by the last of their ranks, and the members of this rank's own. The
// block, for all tokens.
WEFT_DEVICE void order_sums(const TwoLevelNotifyArgs& a, Block block, uint32_t ranks, uint32_t own) {
  const Islands& is = a.islands;
  for (uint64_t token = block.rank(); token < a.base.mine.tokens; token += block.size()) {
    const auto place_of = [&](uint32_t rank) {
      return a.base.token_in_rank[token * ranks + rank] != 0 ? a.base.sum_place[token * ranks + rank] : -1;
    };
    const auto last_in = [&](uint32_t island) {
      int32_t last = -1;
      for (uint32_t i = is.first[island]; i < is.first[island + 1]; ++i) {
        const int32_t place = place_of(is.members[i]);
        if (place > last) last = place;
      }
      return last;
    };
    sort_places(is.count, a.routes.island_order + token * is.count, last_in);
    sort_places(is.widest, a.routes.own_order + token * is.widest,
                [&](uint32_t i) { return i < is.size(own) ? place_of(is.member(own, i)) : -1; });
  }
}

// Tells all peers this rank's counts, waits for theirs, and reports what follows from them. The block;
// shared: u32[1 + R + I].
template <class MeshT>
WEFT_DEVICE void exchange_counts(const TwoLevelNotifyArgs& a, Block block, Warp warp, const MeshT& mesh,
                                 uint32_t* shared) {
  const uint32_t ranks = mesh.ranks();
  const uint64_t epoch = a.base.state->epoch + 1;
  uint32_t* all_came = shared;
  uint32_t* rows_to = shared + 1;
  uint32_t* pairs_to = rows_to + ranks;
  const bool takes_part = !is_void(a.base.wait, load_gave_up(a.base.wait));
  notify::count_rows(a.base, block, warp, rows_to, ranks);
  count_pairs(a, block, warp, pairs_to, ranks);
  if (takes_part) send_counts(a, block, warp, mesh, rows_to, pairs_to, epoch);
  if (warp.index() == 0) {
    const bool came =
        takes_part && wait_all_peers(warp, ranks, epoch, Site::kCounts, a.base.wait, [&](uint32_t peer) {
          return word_from(mesh, peer, a.base.at.count_signal + peer * 8);
        });
    if (warp.rank() == 0) *all_came = came ? 1 : 0;
  }
  block.sync();
  if (*all_came != 0) {
    notify::sum_counts(a.base, block, mesh, epoch);
    if (warp.index() == block.warps() - 1) notify::compare_headers(a.base, warp, mesh, epoch);
    block.sync();
    if (a.base.report->disagreeing_word == kAgreedWords && a.routes.pairs) {
      place_returns(a, block, mesh, epoch);
      sum_pairs(a, block, mesh, epoch);
    }
  }
  block.sync();
  if (block.rank() != 0) return;
  a.base.state->epoch = epoch;
  if (a.base.host_waits) store_release(&a.base.report->epoch, epoch);
}

}  // namespace two_level

template <class MeshT, class Shape>
WEFT_KERNEL void two_level_notify(const TwoLevelNotifyArgs& a, const MeshT& mesh, const Shape&) {
  const Block block;
  const Warp warp;
  auto* shared = reinterpret_cast<uint32_t*>(block.shared());  // u32[1 + R + I] or u32[warps]
  const BlockSpan traced(a.base.wait.trace, Work::kNotify);
  const uint32_t ranks = mesh.ranks();
  const uint32_t peers_at = 2, islands_at = peers_at + ranks, order_at = islands_at + a.islands.count;
  for (uint32_t job = block.index(); job <= order_at; job += block.count()) {
    if (job == 0) two_level::exchange_counts(a, block, warp, mesh, shared);
    if (job == 1) notify::scan_slots(a.base, block, warp, shared, ranks);
    if (job >= peers_at && job < islands_at)
      notify::scan_peer(a.base, block, warp, shared, ranks, job - peers_at);
    if (job >= islands_at && job < order_at)
      two_level::scan_island(a, block, warp, shared, ranks, job - islands_at);
    if (job == order_at && a.routes.island_order)
      two_level::order_sums(a, block, ranks, a.islands.island[mesh.rank()]);
  }
}

}  // namespace weft
