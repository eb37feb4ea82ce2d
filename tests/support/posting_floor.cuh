// SPDX-License-Identifier: Apache-2.0
//
// posting_floor.cuh: what a call of the channel over a NIC's queue cannot do without: two entries, and the two fences that order
// them, the doorbell record and the doorbell. One thread, `count` times; nobody reads what it writes.
// Waits: none.
#pragma once

#include "kernels/target/target.h"
#include "transports/ibgda/wire.h"

namespace weft {

struct PostingFloorArgs {
  std::byte* ring;  // 64 blocks; memory of the device
  uint32_t* record;
  uint64_t* doorbell;  // memory of the host, as registers are beyond PCIe too
  uint64_t* took_ns;   // memory that the host sees
  uint64_t count;
  uint32_t is_near;  // as IbgdaMesh::is_near
  uint32_t reserved;
};
static_assert(sizeof(PostingFloorArgs) == 48);  // for the host and for GPUs
struct PostingFloorShape {};

template <class MeshT, class Shape>
WEFT_KERNEL void posting_floor(const PostingFloorArgs& a, const MeshT&, const Shape&) {
  if (Block().index() != 0 || Block().rank() != 0) return;
  const ibgda::Heading at{0, 1, ibgda::kSignalled};
  const ibgda::Entry entry = ibgda::value_entry(at, {0, 0}, a.count);
  const uint64_t begin_ns = now_ns();
  for (uint64_t i = 0; i < a.count; ++i) {
    auto* block = reinterpret_cast<Vec16*>(a.ring + i % 32 * 2 * ibgda::kBlockBytes);
    WEFT_UNROLL
    for (uint32_t unit = 0; unit < 2 * ibgda::kBlockBytes / ibgda::kUnitBytes; ++unit)
      store_vec(block + unit, entry.units[unit % (ibgda::kBlockBytes / ibgda::kUnitBytes)]);
    if (a.is_near != 0) {
      store_release_local(a.record, static_cast<uint32_t>(i));
      store_register_local(a.doorbell, i);
    } else {
      store_release(a.record, static_cast<uint32_t>(i));
      store_register(a.doorbell, i);
    }
  }
  *a.took_ns = now_ns() - begin_ns;
}

}  // namespace weft
