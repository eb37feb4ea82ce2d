// SPDX-License-Identifier: Apache-2.0
//
// copy_pages.cuh: a list of stretches of memory, each from one place to another.
// Steps: every stretch is cut into units; warps take units in turn.
// Waits: for nobody.
// Cost:  each byte is read once and stored once; 24 bytes a stretch.
#pragma once

#include "kernels/core/copy.cuh"

namespace weft {

struct PageCopy {
  uint64_t src, dst, bytes;
};

struct CopyPagesArgs {
  const PageCopy* pages;  // [count], device
  uint64_t longest_bytes;
  uint32_t count;
};
static_assert(sizeof(CopyPagesArgs) == 24);

struct CopyPagesShape {};

inline constexpr uint64_t kCopyUnitBytes = 4096;

template <class MeshT, class Shape>
WEFT_KERNEL void copy_pages(const CopyPagesArgs& a, const MeshT&, const Shape&) {
  const Block block;
  const Warp warp;
  const uint64_t units_per_page = (a.longest_bytes + kCopyUnitBytes - 1) / kCopyUnitBytes;
  const uint64_t warps = uint64_t{block.count()} * block.warps();
  for (uint64_t unit = uint64_t{block.index()} * block.warps() + warp.index();
       unit < units_per_page * a.count; unit += warps) {
    const PageCopy page = a.pages[unit / units_per_page];
    const uint64_t offset = unit % units_per_page * kCopyUnitBytes;
    if (offset >= page.bytes) continue;
    const uint64_t left = page.bytes - offset;
    copy_any(warp, reinterpret_cast<std::byte*>(page.dst) + offset,
             reinterpret_cast<const std::byte*>(page.src) + offset,
             left < kCopyUnitBytes ? left : kCopyUnitBytes);
  }
}

}  // namespace weft
