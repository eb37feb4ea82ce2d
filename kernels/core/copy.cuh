// SPDX-License-Identifier: Apache-2.0
//
// copy.cuh: copies by a group of threads, for sizes that are not worth a RowPipe.
#pragma once

#include "kernels/target/target.h"

namespace weft {

// Copies `bytes` between 4-byte aligned places with the widest accesses that both alignments allow.
template <class Group>
WEFT_DEVICE void copy_bytes(Group group, void* dst, const void* src, uint64_t bytes) {
  if (group.size() == 1 && copy_alone(dst, src, bytes)) return;
  const uint64_t bits = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | bytes;
  if (bits % 16 == 0) {
    for (uint64_t i = group.rank(); i < bytes / 16; i += group.size())
      store_vec(static_cast<Vec16*>(dst) + i, load_vec(static_cast<const Vec16*>(src) + i));
    return;
  }
  for (uint64_t i = group.rank(); i < bytes / 4; i += group.size())
    static_cast<uint32_t*>(dst)[i] = static_cast<const uint32_t*>(src)[i];
}

}  // namespace weft
