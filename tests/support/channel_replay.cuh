// SPDX-License-Identifier: Apache-2.0
//
// channel_replay.cuh: a launch that says all it knows from memory, so that a graph may replay it.
// Steps of a launch, one warp: 1 the next round   2 fill the source   3 put it with a signal, add 1 behind it
// 4 wait for the peer's signal of the round   5 compare its bytes.
// Waits: step 4, bounded by the wait rule, which names the peer. After a fault a launch does nothing.
#pragma once

#include "kernels/core/wait.cuh"

namespace weft {

struct ChannelReplayArgs {
  WaitRule wait;
  uint64_t* rounds;    // that are done; memory of the device
  uint64_t* wrong;     // words that were not what the peer put; memory that the host sees
  uint64_t signal_at;  // u64 in the window: the peer's round
  uint64_t added_at;   // u64: how often the peer has added 1
  uint64_t source_at;  // two places of `bytes` each, and as many at
  uint64_t data_at;
  uint64_t bytes;  // a multiple of 16
  uint32_t peer;
  uint32_t reserved;
};
static_assert(sizeof(ChannelReplayArgs) == 104);  // for the host and for GPUs
struct ChannelReplayShape {};

WEFT_DEVICE uint64_t replay_pattern(uint32_t rank, uint64_t round, uint64_t word) {
  return (round * 0x9e3779b97f4a7c15u + word) ^ uint64_t { rank } << 60;
}

template <class MeshT, class Shape>
WEFT_KERNEL void channel_replay(const ChannelReplayArgs& a, const MeshT& mesh, const Shape&) {
  const Warp warp;
  if (Block().index() != 0 || warp.index() != 0 || load_relaxed(&a.wait.fault->raised) != 0) return;
  // A source is free again after two rounds: the peer tells of a round once it has the one before.
  const uint64_t round = *a.rounds + 1, place = (round & 1) * a.bytes;
  auto* source = reinterpret_cast<uint64_t*>(mesh.local() + a.source_at + place);
  for (uint64_t i = warp.rank(); i < a.bytes / 8; i += warp.size())
    source[i] = replay_pattern(mesh.rank(), round, i);
  auto to = mesh.to(a.peer);
  to.put_with_signal(warp, a.data_at + place, a.source_at + place, a.bytes, a.signal_at, round);
  bool came = true;
  if (warp.rank() == 0) {
    to.signal_add(a.added_at, 1);
    uint64_t seen = 0, waited_ns = 0;
    const auto* signal = reinterpret_cast<const uint64_t*>(mesh.local() + a.signal_at);
    came = poll_host_signal(signal, round, a.wait, seen, waited_ns);
    if (!came) raise(a.wait.fault, Site::kLoop, a.wait.self, a.peer, round, seen, waited_ns);
  }
  if (warp.any(!came)) return;
  uint32_t wrong = 0;
  const auto* data = reinterpret_cast<const uint64_t*>(mesh.local() + a.data_at + place);
  for (uint64_t i = warp.rank(); i < a.bytes / 8; i += warp.size())
    wrong += load_relaxed(data + i) != replay_pattern(a.peer, round, i);
  wrong = warp.sum(wrong);
  if (warp.rank() != 0) return;
  *a.wrong += wrong;
  *a.rounds = round;
}

}  // namespace weft
