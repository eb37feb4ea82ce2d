// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine.cuh: rows return to their tokens and are summed there.
//
// Steps: 1. All ranks say where their staging is.
//        2. Push warps send rows to their owners, burst by burst, a signal each.
//        3. One watch warp per block follows the signals.
//        4. Sum warps add a token's rows as soon as their bursts came.
//
// Waits: step 1 for every peer's address, step 3 for the bursts of every peer, step 4 for step 3 in shared
// memory.
//
// Why a watch warp: when every sum warp polled and acquired its own bursts, combine slowed down severely
// (seen on 4 H200). Why exactly is open: rows that are summed while others arrive still cost more than both
// alone.
//
// Sums: float32, from the bias on, ranks ascending or as sum_place says, one rounding. Rows of this rank
// itself are read in place.
//
// Cost: per (token, other rank): row_bytes + 4 * K bytes over the link, written and read once more at the
// owner.
#pragma once

#include "kernels/moe/high_throughput_combine_stream.cuh"

namespace weft {

template <class MeshT, class Shape>
WEFT_KERNEL void combine_rows(const CombineArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  const BlockSpan traced(a.wait.trace, Work::kCombine);
  auto* flags = reinterpret_cast<uint32_t*>(block.shared());
  auto* counters =
      reinterpret_cast<uint32_t*>(block.shared() + 128);  // where dispatch_rows has its PeerPlaces
  const combine::Progress progress{&flags[2], counters, counters + mesh.ranks()};
  for (uint32_t i = block.rank(); i < 2 * mesh.ranks(); i += block.size()) counters[i] = 0;
  if (block.rank() == 0) *progress.failed = 0;

  const uint64_t epoch = a.state->epoch + 1;
  const Rendezvous rendezvous = rendezvous_of(a);
  if (!begin_rendezvous(a, rendezvous, block, warp, mesh, epoch, flags)) return;
  combine::push_rows(a, rendezvous, block, warp, mesh, shape, epoch);
  combine::watch_bursts(a, warp, mesh, epoch, progress);
  combine::add_rows(a, rendezvous, block, warp, mesh, shape, epoch, progress);
  finish_launch(block, a.state, &flags[1]);
}

}  // namespace weft
