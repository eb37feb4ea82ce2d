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

// A window may have a second part, of the same layout, for what ports write (docs/decisions/0105). PortPlaces are added to
// a place of the layout, here and at the peer alike: whatever goes to or comes from a port peer stands there.
struct PortPlaces {
  int64_t records;  // words, and what a host may have to copy, and what these are put from
  int64_t payload;  // the rest: in memory of the device where the network reaches it
};
template <class MeshT>
WEFT_DEVICE PortPlaces port_places(const MeshT& mesh) {
  if constexpr (requires { mesh.places(); })
    return mesh.places();
  else
    return {0, 0};
}
// The same towards one peer: none for a peer that this rank can store to.
template <class MeshT>
WEFT_DEVICE int64_t records_of(const MeshT& mesh, uint32_t peer) {
  return is_port(mesh, peer) ? port_places(mesh).records : 0;
}
template <class MeshT>
WEFT_DEVICE int64_t payload_of(const MeshT& mesh, uint32_t peer) {
  return is_port(mesh, peer) ? port_places(mesh).payload : 0;
}

// A place of the layout in the part that `places` names. Modulo 2^64: the host part stands before the window's base.
WEFT_DEVICE WindowOffset in_part(WindowOffset place, int64_t places) {
  return place + static_cast<uint64_t>(places);
}

// Where this rank finds the word at `place` of the layout that a peer moves.
template <class MeshT>
WEFT_DEVICE const uint64_t* word_from(const MeshT& mesh, uint32_t peer, WindowOffset place) {
  return reinterpret_cast<const uint64_t*>(mesh.local() + place + records_of(mesh, peer));
}

// One thread: put_value() of any peer. The own rank's words do not go through a port either.
template <class MeshT>
WEFT_DEVICE void put_word(const MeshT& mesh, uint32_t peer, WindowOffset word, uint64_t value) {
  if constexpr (kHasPorts<MeshT>) {
    if (std::byte* window = near_window(mesh, peer))
      return store_release(reinterpret_cast<uint64_t*>(window + word), value);
  }
  mesh.to(peer).put_value(in_part(word, records_of(mesh, peer)), value);
}

}  // namespace weft
