// SPDX-License-Identifier: Apache-2.0
//
// reach.cuh: how a peer is reached. This rank stores into the windows of peers that it maps, itself included; other
// peers get data through their ports, from an outbox in this rank's window. It is the same in every lane of a warp.
// Kernels for ranks that all map each other know that there are no ports, and pay nothing.
#pragma once

#include "kernels/core/channel.cuh"

namespace weft {

template <class MeshT>
inline constexpr bool kHasPorts = !MappedMeshOnly<MeshT>;

// The window of a rank that this rank can store to; null for a port peer.
template <class MeshT>
WEFT_DEVICE std::byte* near_window(const MeshT& mesh, uint32_t peer) {
  if constexpr (!kHasPorts<MeshT>)
    return mesh.to(peer).mapped();
  else
    return peer == mesh.rank() ? mesh.local() : mesh.mapped_window(peer);
}

template <class MeshT>
WEFT_DEVICE bool is_port(const MeshT& mesh, uint32_t peer) {
  if constexpr (!kHasPorts<MeshT>)
    return false;
  else
    return near_window(mesh, peer) == nullptr;
}

// One thread: put_value() of any peer. The own rank's words do not go through a port either.
template <class MeshT>
WEFT_DEVICE void put_word(const MeshT& mesh, uint32_t peer, WindowOffset word, uint64_t value) {
  if constexpr (kHasPorts<MeshT>) {
    if (std::byte* window = near_window(mesh, peer))
      return store_release(reinterpret_cast<uint64_t*>(window + word), value);
  }
  mesh.to(peer).put_value(word, value);
}

}  // namespace weft
