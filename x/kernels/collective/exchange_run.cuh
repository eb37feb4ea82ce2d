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

// Looks at a flag before the first pause: what is waited for is mostly under way.
inline constexpr uint32_t kEagerLooks = Warp::kMaxSize == 1 ? 0 : 64;
// Sources that one thread has under way while it adds; registers bound it, of which conversions take many.
template <class Combiner>
inline constexpr uint32_t kSourcesInFlight = Combiner::kPerVec > 8 ? 2 : 8;

// Places of all ranks' inputs and outputs, in shared memory after a meeting.
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
  WEFT_DEVICE bool pushes() const { return kind() == Exchange::kAllGather || kind() == Exchange::kAllToAll; }
  // Whether peers touch this buffer.
  WEFT_DEVICE bool needs(uint32_t which) const {
    return kind() == Exchange::kAllReduce || which == (pushes() ? 1 : 0);
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

  // One more look at what `peer` owes was in vain. True: time is up, or another thread has raised a fault.
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
