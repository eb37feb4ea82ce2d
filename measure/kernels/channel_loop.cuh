// SPDX-License-Identifier: Apache-2.0
//
// channel_loop.cuh: what `weft bench channel` times: two ranks and one call of their channels, again and
// again, from one warp each.
// Steps of a repetition: 1 both meet   2 kRoundTrip: the calls go to and fro, and each side waits for the
// other's; kOneWay: rank `first` makes all calls, tells the other at the end, and waits for its answer
// 3 `first` notes the time that step 2 took; kPosting, the time of its calls alone, without what comes of them.
// Waits: for one word of the own window; bounded by the wait rule, which names the peer.
#pragma once

#include "kernels/core/wait.cuh"

namespace weft {

enum class ChannelCall : uint32_t { kPut, kPutWithSignal, kSignal, kAdd, kPutFlush };
enum class ChannelWay : uint32_t { kRoundTrip, kOneWay, kPosting };

struct ChannelLoopArgs {
  WaitRule wait;
  uint64_t* nanoseconds;  // [repeats] of step 2; written by `first`
  uint64_t signal_at;     // u64 in the window: what the peer has said last; its first value is `said`
  uint64_t added_at;      // u64 in the window: what the peer has added
  uint64_t src_at;        // `places` places of `bytes` each, and as many at
  uint64_t dst_at;
  uint64_t bytes;
  uint64_t said;  // of both words before the launch
  uint64_t added;
  uint32_t places;
  uint32_t peer;
  uint32_t is_first;
  uint32_t call;
  uint32_t way;
  uint32_t count;  // calls, or round trips, of a repetition
  uint32_t repeats;
  uint32_t reserved;
};

struct ChannelLoopShape {};

namespace channel_loop {

// One rank's side.
template <class MeshT>
struct Side {
  const ChannelLoopArgs& a;
  const MeshT& mesh;
  uint64_t said, added;
  Warp warp{};
  uint64_t posted_ns = 0;

  WEFT_DEVICE bool wait(uint64_t at, uint64_t want) {
    uint64_t seen = 0, waited_ns = 0;
    bool came = true;
    if (warp.rank() == 0) {
      const auto* word = reinterpret_cast<const uint64_t*>(mesh.local() + at);
      came = poll_host_signal(word, want, a.wait, seen, waited_ns);
      if (!came) raise(a.wait.fault, Site::kLoop, a.wait.self, a.peer, want, seen, waited_ns);
    }
    return !warp.any(!came);
  }
  WEFT_DEVICE void tell(uint64_t value) {
    if (warp.rank() == 0) mesh.to(a.peer).put_value(a.signal_at, value);
  }
  // Both ranks publish this value and wait for the other's.
  WEFT_DEVICE bool meet() {
    tell(++said);
    return wait(a.signal_at, said);
  }
  // Call number `i`, which says `value` where it says something.
  WEFT_DEVICE void call(uint32_t i, uint64_t value) {
    auto to = mesh.to(a.peer);
    const uint64_t place = (i % a.places) * a.bytes;
    switch (static_cast<ChannelCall>(a.call)) {
      case ChannelCall::kPut:
        return to.put(warp, a.dst_at + place, a.src_at + place, a.bytes);
      case ChannelCall::kPutWithSignal:
        return to.put_with_signal(warp, a.dst_at + place, a.src_at + place, a.bytes, a.signal_at, value);
      case ChannelCall::kPutFlush:
        to.put(warp, a.dst_at + place, a.src_at + place, a.bytes);
        if (warp.rank() == 0) to.flush();
        return warp.sync();
      case ChannelCall::kSignal:
        if (warp.rank() == 0) to.put_value(a.signal_at, value);
        return;
      case ChannelCall::kAdd:
        if (warp.rank() == 0) to.signal_add(a.added_at, 1);
        return;
    }
  }
  WEFT_DEVICE bool round_trips() {
    const bool adds = static_cast<ChannelCall>(a.call) == ChannelCall::kAdd;
    for (uint32_t i = 0; i < a.count; ++i) {
      ++(adds ? added : said);
      if (a.is_first) call(i, said);
      if (!wait(adds ? a.added_at : a.signal_at, adds ? added : said)) return false;
      if (!a.is_first) call(i, said);
    }
    return true;
  }
  // The other rank's word never decreases: calls repeat the last value, and the last call raises it.
  WEFT_DEVICE bool one_way() {
    if (a.is_first) {
      for (uint32_t i = 0; i < a.count; ++i) call(i, said);
      posted_ns = now_ns();
    }
    return a.is_first ? meet() : wait(a.signal_at, said + 1) && meet();
  }
};

}  // namespace channel_loop

template <class MeshT, class Shape>
WEFT_KERNEL void channel_loop_run(const ChannelLoopArgs& a, const MeshT& mesh, const Shape&) {
  const Warp warp;
  if (Block().index() != 0 || warp.index() != 0) return;
  channel_loop::Side<MeshT> side{a, mesh, a.said, a.added};
  for (uint32_t i = 0; i < a.repeats; ++i) {
    if (!side.meet()) return;
    const uint64_t start_ns = now_ns();
    const bool went =
        static_cast<ChannelWay>(a.way) == ChannelWay::kRoundTrip ? side.round_trips() : side.one_way();
    if (!went) return;
    const uint64_t end_ns =
        static_cast<ChannelWay>(a.way) == ChannelWay::kPosting ? side.posted_ns : now_ns();
    if (a.is_first && warp.rank() == 0) a.nanoseconds[i] = end_ns - start_ns;
  }
}

}  // namespace weft
