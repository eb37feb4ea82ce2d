// SPDX-License-Identifier: Apache-2.0
//
// two_level_notify.cuh: dispatch_notify() where ranks do not all map each other: counts and places, before any row
// moves.
// Steps: as dispatch_notify(); a record also says how many messages go to each domain, and leaves for port peers from
// an outbox. From all of them follow the places of rows that come back, too.
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

WEFT_DEVICE bool goes_to_domain(const TwoLevelNotifyArgs& a, uint32_t ranks, uint64_t token,
                                uint32_t domain) {
  const Domains& domains = a.domains;
  for (uint32_t i = domains.first[domain]; i < domains.first[domain + 1]; ++i)
    if (a.base.token_in_rank[token * ranks + domains.members[i]] != 0) return true;
  return false;
}

WEFT_DEVICE void scan_domain(const TwoLevelNotifyArgs& a, Block block, Warp warp, uint32_t* shared,
                             uint32_t ranks, uint32_t domain) {
  notify::scan_tokens(
      block, warp, shared, a.base.mine.tokens,
      [&](uint64_t token) { return uint32_t{goes_to_domain(a, ranks, token, domain)}; },
      [&](uint64_t token, uint32_t goes, uint32_t before) {
        a.routes.send_pair[token * a.domains.count + domain] = goes ? static_cast<int32_t>(before) : -1;
      });
}

// pairs_to[domain], u32[D] of shared memory, becomes how many tokens go to each. The block.
WEFT_DEVICE void count_pairs(const TwoLevelNotifyArgs& a, Block block, Warp warp, uint32_t* pairs_to,
                             uint32_t ranks) {
  for (uint32_t domain = 0; domain < a.domains.count; ++domain) {
    if (block.rank() == 0) pairs_to[domain] = 0;
    block.sync();
    uint32_t pairs = 0;
    for (uint64_t token = block.rank(); token < a.base.mine.tokens; token += block.size())
      pairs += goes_to_domain(a, ranks, token, domain) ? 1 : 0;
    pairs = warp.sum(pairs);
    if (warp.rank() == 0) add_local(&pairs_to[domain], pairs);
  }
  block.sync();
}

// Which word of a record says how many messages go to a domain.
WEFT_DEVICE uint32_t pair_word(const TwoLevelNotifyArgs& a, uint32_t ranks, uint32_t domain) {
  return kHeaderWords + ranks + a.base.experts_per_rank + domain;
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
  for (uint32_t i = warp.rank(); i < a.domains.count; i += warp.size())
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
  const uint64_t bytes = round_up(pair_word(a, ranks, a.domains.count) * 4, 16);
  for (uint32_t peer = warp.index(); peer < ranks; peer += block.warps()) {
    const uint64_t outgoing = a.at.counts_out + ((epoch & 1) * ranks + peer) * a.base.at.record_words * 4;
    const Outgoing<MeshT> record(mesh, peer, near_window(mesh, peer), to, outgoing,
                                 port_places(mesh).records);
    write_record(a, warp, reinterpret_cast<uint32_t*>(record.at()), ranks, peer, rows_to, pairs_to);
    record.send(warp, bytes, signal, epoch);
  }
}

// Thread `rank`: in the staging of that rank, rows lie by source, then by the member that they come back from; its own it
// reads where they are. Notes where this domain's begin, and reports how many there are.
template <class MeshT>
WEFT_DEVICE void place_returns(const TwoLevelNotifyArgs& a, Block block, const MeshT& mesh, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  const Domains& domains = a.domains;
  auto* per_rank = reinterpret_cast<RankCounts*>(a.base.report + 1);
  for (uint32_t rail_peer = block.rank(); rail_peer < ranks; rail_peer += block.size()) {
    const uint32_t domain = domains.domain[rail_peer];
    const bool is_mine = domain == domains.domain[mesh.rank()];
    uint32_t rows = 0;
    for (uint32_t source = 0; source < ranks; ++source) {
      if (domains.rail_peer(source, domain) != rail_peer) continue;
      const auto* record =
          reinterpret_cast<const uint32_t*>(notify::record_from(mesh, a.base.at, epoch, source));
      for (uint32_t i = 0; i < domains.size(domain); ++i) {
        const uint32_t member = domains.member(domain, i);
        if (is_mine) a.routes.back_first[source * domains.widest + i] = static_cast<int32_t>(rows);
        if (member != rail_peer) rows += record[kHeaderWords + member];
      }
    }
    per_rank[rail_peer].sent_rows = rows;
  }
}

// Thread `rank`: how many messages that rank sends to each domain. One thread also gives the records of this
// rank's sources their places.
template <class MeshT>
WEFT_DEVICE void sum_pairs(const TwoLevelNotifyArgs& a, Block block, const MeshT& mesh, uint64_t epoch) {
  const uint32_t ranks = mesh.ranks();
  const Domains& domains = a.domains;
  const auto pairs = [&](uint32_t source, uint32_t domain) {
    const auto* record =
        reinterpret_cast<const uint32_t*>(notify::record_from(mesh, a.base.at, epoch, source));
    return static_cast<int32_t>(record[pair_word(a, ranks, domain)]);
  };
  for (uint32_t source = block.rank(); source < ranks; source += block.size())
    for (uint32_t domain = 0; domain < domains.count; ++domain)
      a.routes.pairs[source * domains.count + domain] = pairs(source, domain);
  if (block.rank() != 0) return;
  for (uint32_t domain = 0; domain < domains.count; ++domain) a.routes.forwarded[domain] = 0;
  int32_t messages = 0;
  for (uint32_t i = 0; i < domains.source_count; ++i) {
    const int32_t from_it = pairs(domains.sources[i], domains.domain[mesh.rank()]);
    a.routes.source_first[domains.sources[i]] = messages;
    a.routes.forwarded[domains.domain[domains.sources[i]]] += from_it;
    messages += from_it;
  }
  for (uint32_t domain = 1; domain < domains.count; ++domain)
    a.routes.forwarded[domain] += a.routes.forwarded[domain - 1];
}

// Writes in which order a token's domains are added, by the last of their ranks, and the members of this rank's own.
// The block, for all tokens.
WEFT_DEVICE void order_sums(const TwoLevelNotifyArgs& a, Block block, uint32_t ranks, uint32_t own) {
  const Domains& domains = a.domains;
  for (uint64_t token = block.rank(); token < a.base.mine.tokens; token += block.size()) {
    const auto place_of = [&](uint32_t rank) {
      return a.base.token_in_rank[token * ranks + rank] != 0 ? a.base.sum_place[token * ranks + rank] : -1;
    };
    const auto last_in = [&](uint32_t domain) {
      int32_t last = -1;
      for (uint32_t i = domains.first[domain]; i < domains.first[domain + 1]; ++i) {
        const int32_t place = place_of(domains.members[i]);
        if (place > last) last = place;
      }
      return last;
    };
    sort_places(domains.count, a.routes.domain_order + token * domains.count, last_in);
    sort_places(domains.widest, a.routes.own_order + token * domains.widest,
                [&](uint32_t i) { return i < domains.size(own) ? place_of(domains.member(own, i)) : -1; });
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
  const uint32_t peers_at = 2, domains_at = peers_at + ranks, order_at = domains_at + a.domains.count;
  for (uint32_t job = block.index(); job <= order_at; job += block.count()) {
    if (job == 0) two_level::exchange_counts(a, block, warp, mesh, shared);
    if (job == 1) notify::scan_slots(a.base, block, warp, shared, ranks);
    if (job >= peers_at && job < domains_at)
      notify::scan_peer(a.base, block, warp, shared, ranks, job - peers_at);
    if (job >= domains_at && job < order_at)
      two_level::scan_domain(a, block, warp, shared, ranks, job - domains_at);
    if (job == order_at && a.routes.domain_order)
      two_level::order_sums(a, block, ranks, a.domains.domain[mesh.rank()]);
  }
}

}  // namespace weft
