// SPDX-License-Identifier: Apache-2.0
//
// reach.cuh: how a peer is reached. This rank stores into the windows of peers that it maps, itself included; other
// peers get data through their ports, from an outbox in this rank's window. It is the same in every lane of a warp.
// Kernels for ranks that all map each other know that there are no ports, and pay nothing.
//   const Outgoing<MeshT> out(mesh, peer, near_window(mesh, peer), to, from, port_places(mesh).payload);
//   build(out.at());                      // once, whatever the peer
//   out.send(group, bytes, word, value);  // then one branch: stored already, or put
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

// What only kernels with ports have. In others it is zero, and what asks for it is not compiled.
template <class MeshT, class T>
WEFT_DEVICE T if_ports(T value) {
  if constexpr (kHasPorts<MeshT>)
    return value;
  else
    return T{};
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

// What this rank has for one peer. It is built once, at at(): where the peer reads it, or, for a port peer, in the outbox.
// How it leaves is decided here alone.
template <class MeshT>
class Outgoing {
 public:
  // It goes to `to` of the layout in the peer's window. `window`: near_window(), or where else this rank finds the peer's;
  // null for a port peer. For that it is built at `from` of this rank's own, both in the part that `places` names.
  WEFT_DEVICE Outgoing(const MeshT& mesh, uint32_t peer, std::byte* window, WindowOffset to,
                       WindowOffset from, int64_t places)
      : mesh_(mesh), peer_(peer), window_(window), to_(to), from_(from), places_(places) {}

  WEFT_DEVICE bool is_near() const { return !kHasPorts<MeshT> || window_ != nullptr; }
  WEFT_DEVICE std::byte* at() const { return is_near() ? window_ + to_ : mesh_.local() + places_ + from_; }

  // The group that built it. What is near is there already.
  template <class Group>
  WEFT_DEVICE void put(Group group, uint64_t bytes) const {
    if (!is_near()) mesh_.to(peer_).put(group, in_part(to_, places_), in_part(from_, places_), bytes);
  }
  // The same; then the peer's word has `value`. The group has synchronised.
  template <class Group>
  WEFT_DEVICE void send(Group group, uint64_t bytes, WindowOffset word, uint64_t value) const {
    if (!is_near())
      mesh_.to(peer_).put_with_signal(group, in_part(to_, places_), in_part(from_, places_), bytes,
                                      in_part(word, port_places(mesh_).records), value);
    else if (group.rank() == 0)
      store_release(reinterpret_cast<uint64_t*>(window_ + word), value);
  }

 private:
  const MeshT& mesh_;
  const uint32_t peer_;
  std::byte* const window_;
  const WindowOffset to_, from_;
  const int64_t places_;
};

}  // namespace weft
