// SPDX-License-Identifier: Apache-2.0
//
// exchange_run.cuh: what one block of an exchange knows (Run), and how long it waits for a peer
// (PeerPatience).
#pragma once

#include "kernels/collective/exchange_args.h"
#include "kernels/collective/message.cuh"
#include "kernels/core/channel.cuh"

namespace weft {

namespace exchange {

// Polls of a flag before the first pause: the data is mostly under way.
inline constexpr uint32_t kEagerLooks = Warp::kMaxSize == 1 ? 0 : 64;
// Sources that one thread has under way while it adds; registers bound it, of which conversions take many.
template <class Combiner>
inline constexpr uint32_t kSourcesInFlight = Combiner::kPerVec > 8 ? 2 : 8;

// Places of all ranks' inputs and outputs, in shared memory after a rendezvous.
struct Met {
  uint32_t all_have_places;
  uint32_t all_came;
  uint32_t lost;  // the slice, as the low half of its number, for which a thread waited in vain
  uint32_t reserved;
};
WEFT_DEVICE constexpr uint32_t places_bytes(uint32_t ranks) {
  return (static_cast<uint32_t>(sizeof(Met)) + 2 * ranks * 8 + 127) / 128 * 128;
}

template <class MeshT, class Shape>
struct Run {
  const ExchangeArgs& a;
  const MeshT& mesh;
  const Shape& shape;
  Block block;
  uint32_t self;
  uint32_t ranks;

  WEFT_DEVICE Exchange kind() const { return static_cast<Exchange>(shape.exchange); }
  WEFT_DEVICE uint32_t
  peer(uint32_t step) const {  // step counts from 1: every rank starts with its neighbour
    const uint32_t rank = self + step;
    return rank < ranks ? rank : rank - ranks;
  }
  WEFT_DEVICE bool is_root() const { return self == a.root; }
  WEFT_DEVICE bool adds() const {
    return kind() == Exchange::kAllReduce || kind() == Exchange::kReduceScatter ||
           kind() == Exchange::kReduce;
  }
  // Kinds whose parts go from one rank to another as they are.
  WEFT_DEVICE bool has_parts() const { return !has_shares(kind()) && kind() != Exchange::kReduceScatter; }
  // Whether peers touch this buffer of a rank.
  WEFT_DEVICE bool needs(uint32_t which, uint32_t rank) const {
    if (kind() == Exchange::kBroadcast) return which == 0 ? goes_on() && rank == a.root : rank != a.root;
    if (which == 0) return adds();
    if (kind() == Exchange::kGather || kind() == Exchange::kReduce) return rank == a.root;
    return kind() != Exchange::kReduceScatter;
  }

  WEFT_DEVICE uint32_t owners() const { return exchange_owners(kind(), ranks); }
  // The number of a rank's share; a rank without one has a number beyond the last.
  WEFT_DEVICE uint32_t share(uint32_t rank) const {
    if (kind() == Exchange::kAllReduce) return rank;
    const bool is_roots = kind() == Exchange::kReduce && ranks == 2;
    const uint32_t first = is_roots ? a.root : a.root + 1;
    return rank >= first ? rank - first : rank + ranks - first;
  }
  WEFT_DEVICE bool owns(uint32_t rank) const { return share(rank) < owners(); }
  WEFT_DEVICE bool goes_on() const { return has_shares(kind()) && owners() > 1; }
  // Whether `from` sends to `to`: sends() in the first exchange, sends_on() in the one from the owners of shares.
  WEFT_DEVICE bool sends(uint32_t from, uint32_t to) const {
    if (kind() == Exchange::kBroadcast || kind() == Exchange::kScatter) return from == a.root;
    if (kind() == Exchange::kReduce) return owns(to);
    return kind() != Exchange::kGather || to == a.root;
  }
  WEFT_DEVICE bool sends_on(uint32_t from, uint32_t to) const {
    if (kind() == Exchange::kAllReduce) return true;
    return owns(from) && (to == a.root) == (kind() == Exchange::kReduce);
  }
  WEFT_DEVICE Met* met() const { return reinterpret_cast<Met*>(block.shared()); }
  WEFT_DEVICE std::byte** places(uint32_t which) const {  // 0: inputs, 1: outputs; by rank
    return reinterpret_cast<std::byte**>(met() + 1) + which * ranks;
  }
};

// For what peers owe to a block.
struct PeerPatience {
  Patience patience;
  uint32_t block;

  // Call after each poll in vain for `peer`. True: time is up, or another thread has raised a fault.
  WEFT_DEVICE bool ends(uint32_t looks, uint32_t peer, uint64_t expected, uint64_t seen) {
    if (looks >= kEagerLooks) pause(looks - kEagerLooks);
    if (!patience.ends(looks)) return false;
    const WaitRule& rule = patience.rule;
    if (patience.is_late())
      raise(rule.fault, Site::kCollective, rule.self, peer, expected, seen, patience.waited_ns, block << 16);
    return true;
  }
};

}  // namespace exchange

}  // namespace weft
