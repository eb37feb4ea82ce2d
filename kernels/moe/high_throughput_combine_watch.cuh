// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine_watch.cuh: which bursts have come. One watch warp of a block follows the signals of all
// peers and notes in shared memory how far each has come; without one, every sum warp waits for itself.
#pragma once

#include "kernels/moe/rendezvous.cuh"

namespace weft {
namespace combine {

inline constexpr uint32_t kBurstsAtOnce = 8;  // signals of a peer that a look asks for: memory is far
inline constexpr uint32_t kLookEveryNs = 500;
inline constexpr uint32_t kSharedPollNs = 200;

// In shared memory: how far the bursts of each peer have come.
struct Progress {
  uint32_t* failed;
  uint32_t* bursts_here;  // [R] all below may be read
  uint32_t* bursts_seen;  // [R] all below have been signalled; the watch warp's own
};

template <class MeshT>
WEFT_DEVICE const uint64_t* burst_signal(const CombineArgs& a, const MeshT& mesh, uint32_t peer,
                                         uint32_t burst) {
  return reinterpret_cast<const uint64_t*>(mesh.local() + a.at.burst_signal) + uint64_t{peer} * kMaxBursts +
         burst;
}

// How many of a peer's bursts from `first` on have come without a gap: kBurstsAtOnce at most. Their rows
// are visible afterwards. One thread.
WEFT_DEVICE uint32_t bursts_come(const uint64_t* signals, uint64_t epoch, uint32_t first, uint32_t bursts) {
  uint64_t seen[kBurstsAtOnce];
  WEFT_UNROLL
  for (uint32_t i = 0; i < kBurstsAtOnce; ++i) seen[i] = first + i < bursts ? peek(signals + first + i) : 0;
  bool has_come[kBurstsAtOnce];
  uint32_t count = 0;
  WEFT_UNROLL
  for (uint32_t i = 0; i < kBurstsAtOnce; ++i) {
    has_come[i] = seen[i] >= epoch && count == i;
    count += has_come[i];
  }
  // Not a fence, which would also wait for all that the SM is sending.
  WEFT_UNROLL
  for (uint32_t i = 0; i < kBurstsAtOnce; ++i)
    if (has_come[i]) load_acquire(signals + first + i);
  return count;
}

// The result of one poll of the signals of a lane's peers.
struct Look {
  bool has_moved;
  bool is_missing;
  uint32_t missing_peer;
};

// Follows the signals of the peers that fall to this lane.
template <class MeshT>
WEFT_DEVICE Look look_at_signals(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                                 uint32_t* bursts_seen) {
  Look look{};
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    if (peer == mesh.rank()) continue;
    const uint32_t rows = row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count;
    const uint32_t bursts = (rows + burst_rows(rows) - 1) / burst_rows(rows);
    const uint32_t came = bursts_come(burst_signal(a, mesh, peer, 0), epoch, bursts_seen[peer], bursts);
    bursts_seen[peer] += came;
    look.has_moved = look.has_moved || came != 0;
    if (bursts_seen[peer] == bursts) continue;
    look.is_missing = true;
    look.missing_peer = peer;
  }
  return look;
}

// The watch warp: runs until every burst is here, or until no burst has come for too long.
template <class MeshT>
WEFT_DEVICE void watch_bursts(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                              const Progress& progress) {
  if (a.watch_warps.count == 0 || warp.index() != a.watch_warps.first) return;
  Patience patience{a.wait};
  for (uint32_t looks = 0;; ++looks) {
    const Look look = look_at_signals(a, warp, mesh, epoch, progress.bursts_seen);
    if (warp.any(look.has_moved)) {
      for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size())
        store_release_block(&progress.bursts_here[peer], progress.bursts_seen[peer]);
      patience.since_ns = 0;
    }
    if (!warp.any(look.is_missing)) return;
    pause_ns(kLookEveryNs);
    if (!warp.any(patience.ends(looks))) continue;
    if (look.is_missing)
      raise(a.wait.fault, Site::kCombineRecv, a.wait.self, look.missing_peer, epoch, epoch - 1,
            patience.waited_ns);
    if (warp.rank() == 0) store_release_block(progress.failed, 1);
    return;
  }
}

template <class MeshT>
WEFT_DEVICE bool wait_for_signals(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                                  const int32_t* send_row) {
  return wait_peers(
      warp, mesh.ranks(), epoch, Site::kCombineRecv, a.wait,
      [&](uint32_t peer) {
        const uint32_t size = burst_rows(row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count);
        return burst_signal(a, mesh, peer, static_cast<uint32_t>(send_row[peer]) / size);
      },
      [&](uint32_t peer) { return peer != mesh.rank() && send_row[peer] >= 0; },
      [&](uint32_t peer, uint64_t seen, uint64_t waited_ns) {
        raise(a.wait.fault, Site::kCombineRecv, a.wait.self, peer, epoch, seen, waited_ns);
      });
}

template <class MeshT>
WEFT_DEVICE bool wait_for_token(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                                const Progress& progress, uint64_t token) {
  const int32_t* send_row = a.send_row + token * mesh.ranks();
  if (a.watch_warps.count == 0) return wait_for_signals(a, warp, mesh, epoch, send_row);
  bool failed = false;
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    if (peer == mesh.rank() || send_row[peer] < 0) continue;
    const Span traced(a.wait.trace, Site::kCombineRecv, peer);
    const uint32_t size = burst_rows(row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count);
    const uint32_t burst = static_cast<uint32_t>(send_row[peer]) / size;
    while (!failed &&
           load_acquire_block(&progress.bursts_here[peer]) <= burst) {  // bounded by the watch warp
      pause_ns(kSharedPollNs);
      failed = load_acquire_block(progress.failed) != 0;
    }
  }
  warp.sync();  // what a lane has acquired, all of the warp have: a vote alone orders no memory
  return !warp.any(failed);
}

}  // namespace combine
}  // namespace weft
