// SPDX-License-Identifier: Apache-2.0
//
// engram.cuh: reads entries of a table that is spread over the ranks. Nobody else takes part in a read.
// Steps: every warp takes an entry, finds its rank, and copies it out of that rank's window.
// Waits: none.
// Cost:  row_bytes per entry, over the link where the entry is another rank's.
#pragma once

#include "kernels/core/channel.cuh"
#include "kernels/core/copy.cuh"
#include "kernels/core/roles.cuh"
#include "kernels/moe/engram_args.h"
#include "kernels/moe/routes.cuh"

namespace weft {

// An index that names no entry leaves its row as it is, and a fault says so.
template <class MeshT, class Shape>
WEFT_KERNEL void engram_fetch(const EngramArgs& a, const MeshT& mesh, const Shape& /*shape*/) {
  const Block block;
  const Warp warp;
  const Share share = share_of(block, warp, {0, block.warps()});
  const uint64_t entries = a.entries_per_rank * mesh.ranks();
  for (uint64_t item = share.index; item < a.count; item += share.total) {
    const int64_t index = expert_at(a.indices, a.id_bytes, item);
    if (index < 0 || static_cast<uint64_t>(index) >= entries) {
      if (warp.rank() == 0)
        raise(a.wait.fault, Site::kEngramIndex, a.wait.self, a.wait.self, entries,
              static_cast<uint64_t>(index), 0);
      continue;
    }
    const auto rank = static_cast<uint32_t>(static_cast<uint64_t>(index) / a.entries_per_rank);
    const uint64_t at = static_cast<uint64_t>(index) % a.entries_per_rank * a.row_bytes;
    copy_any(warp, a.out + item * a.row_bytes, mesh.to(rank).mapped() + at, a.row_bytes);
  }
}

}  // namespace weft
