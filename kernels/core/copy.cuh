// SPDX-License-Identifier: Apache-2.0
//
// copy.cuh: copies by a group of threads, for sizes that are not worth a RowPipe.
#pragma once

#include "kernels/target/target.h"

namespace weft {

// Loads that one thread has under way: memory is far. On the host the caches see to that.
inline constexpr uint32_t kLoadsInFlight = Warp::kMaxSize == 1 ? 1 : 4;

template <class Group>
WEFT_DEVICE void copy_vecs(Group group, Vec16* dst, const Vec16* src, uint64_t vecs) {
  const uint64_t step = group.size();
  uint64_t i = group.rank();
  for (; i + (kLoadsInFlight - 1) * step < vecs; i += kLoadsInFlight * step) {
    Vec16 held[kLoadsInFlight];
    WEFT_UNROLL
    for (uint32_t j = 0; j < kLoadsInFlight; ++j) held[j] = load_vec(src + i + j * step);
    WEFT_UNROLL
    for (uint32_t j = 0; j < kLoadsInFlight; ++j) store_vec(dst + i + j * step, held[j]);
  }
  for (; i < vecs; i += step) store_vec(dst + i, load_vec(src + i));
}

// Copies `bytes` between 4-byte aligned places with the widest accesses that both alignments allow.
template <class Group>
WEFT_DEVICE void copy_bytes(Group group, void* dst, const void* src, uint64_t bytes) {
  if (group.size() == 1 && copy_by_thread(dst, src, bytes)) return;
  const uint64_t bits = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src) | bytes;
  if (bits % 16 == 0)
    return copy_vecs(group, static_cast<Vec16*>(dst), static_cast<const Vec16*>(src), bytes / 16);
  for (uint64_t i = group.rank(); i < bytes / 4; i += group.size())
    static_cast<uint32_t*>(dst)[i] = static_cast<const uint32_t*>(src)[i];
}

// The same for any size and any alignment.
template <class Group>
WEFT_DEVICE void copy_any(Group group, void* dst, const void* src, uint64_t bytes) {
  const uint64_t places = reinterpret_cast<uint64_t>(dst) | reinterpret_cast<uint64_t>(src);
  const uint64_t word = places % 16 == 0 ? 16 : places % 4 == 0 ? 4 : 1;
  const uint64_t whole = word == 1 ? 0 : bytes / word * word;
  copy_bytes(group, dst, src, whole);
  for (uint64_t i = whole + group.rank(); i < bytes; i += group.size())
    static_cast<std::byte*>(dst)[i] = static_cast<const std::byte*>(src)[i];
}

}  // namespace weft
