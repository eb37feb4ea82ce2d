// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine_watch.cuh: which chunks have come. One watch warp of a block follows the signals of all
// peers and notes in shared memory how far each has come; without one, every sum warp waits for itself.
#pragma once

#include "kernels/moe/rendezvous.cuh"

namespace weft {
namespace combine {

inline constexpr uint32_t kChunksAtOnce = 8;  // signals of a peer that a look asks for: memory is far
inline constexpr uint32_t kLookEveryNs = 500;
inline constexpr uint32_t kSharedPollNs = 200;

// In shared memory: how far the chunks of each peer have come.
struct Progress {
  uint32_t* failed;
  uint32_t* chunks_here;  // [R] all below may be read
  uint32_t* chunks_seen;  // [R] all below have been signalled; the watch warp's own
};

template <class MeshT>
WEFT_DEVICE const uint64_t* chunk_signal(const CombineArgs& a, const MeshT& mesh, uint32_t peer,
                                         uint32_t chunk) {
  return reinterpret_cast<const uint64_t*>(mesh.local() + a.at.chunk_signal) + uint64_t{peer} * kMaxChunks +
         chunk;
}

// How many of a peer's chunks from `first` on have come without a gap: kChunksAtOnce at most. Their rows
// are visible afterwards. One thread.
WEFT_DEVICE uint32_t chunks_come(const uint64_t* signals, uint64_t epoch, uint32_t first, uint32_t chunks) {
  uint64_t seen[kChunksAtOnce];
  WEFT_UNROLL
  for (uint32_t i = 0; i < kChunksAtOnce; ++i) seen[i] = first + i < chunks ? peek(signals + first + i) : 0;
  bool has_come[kChunksAtOnce];
  uint32_t count = 0;
  WEFT_UNROLL
  for (uint32_t i = 0; i < kChunksAtOnce; ++i) {
    has_come[i] = seen[i] >= epoch && count == i;
    count += has_come[i];
  }
  // Not a fence, which would also wait for all that the SM is sending.
  WEFT_UNROLL
  for (uint32_t i = 0; i < kChunksAtOnce; ++i)
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
                                 uint32_t* chunks_seen) {
  Look look{};
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    if (peer == mesh.rank()) continue;
    const uint32_t rows = row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count;
    const uint32_t chunks = (rows + chunk_rows(rows) - 1) / chunk_rows(rows);
    const uint32_t came = chunks_come(chunk_signal(a, mesh, peer, 0), epoch, chunks_seen[peer], chunks);
    chunks_seen[peer] += came;
    look.has_moved = look.has_moved || came != 0;
    if (chunks_seen[peer] == chunks) continue;
    look.is_missing = true;
    look.missing_peer = peer;
  }
  return look;
}

// The watch warp: runs until every chunk is here, or until no chunk has come for too long.
template <class MeshT>
WEFT_DEVICE void watch_chunks(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch,
                              const Progress& progress) {
  if (a.watch_warps.count == 0 || warp.index() != a.watch_warps.first) return;
  Patience patience{a.wait};
  for (uint32_t looks = 0;; ++looks) {
    const Look look = look_at_signals(a, warp, mesh, epoch, progress.chunks_seen);
    if (warp.any(look.has_moved)) {
      for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size())
        store_release_block(&progress.chunks_here[peer], progress.chunks_seen[peer]);
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
        const uint32_t size = chunk_rows(row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count);
        return chunk_signal(a, mesh, peer, static_cast<uint32_t>(send_row[peer]) / size);
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
    const uint32_t size = chunk_rows(row_span(a.prefix, mesh.ranks(), mesh.rank(), peer).count);
    const uint32_t chunk = static_cast<uint32_t>(send_row[peer]) / size;
    while (!failed &&
           load_acquire_block(&progress.chunks_here[peer]) <= chunk) {  // bounded by the watch warp
      pause_ns(kSharedPollNs);
      failed = load_acquire_block(progress.failed) != 0;
    }
  }
  return !warp.any(failed);
}

}  // namespace combine
}  // namespace weft
