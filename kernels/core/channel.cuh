// SPDX-License-Identifier: Apache-2.0
//
// channel.cuh: what device code may ask of the way to one peer. Every transport's channel.cuh ends with
//   static_assert(Channel<FooChannel>, "FooChannel must model Channel");
//
//   put(group, dst, src, bytes)              start copying bytes of the own window, from offset src, into the
//                                            peer's at dst; all three are multiples of 16
//   put_with_signal(group, dst, src, bytes, word, value)   the same, then put_value(word, value)
//   put_value(word, value)                   release: the peer's 64-bit word holds value once everything put
//                                            before on this channel is visible there
//   signal_add(word, n)                      the same, but adds n to the word: counters of several writers
//   flush()                                  sources put before may be reused; says nothing about the peer
//   get(group, dst, src, bytes, word, value) start copying bytes of the peer's window, from offset src, into the own
//                                            at dst; all three are multiples of 16. The own 64-bit word holds value
//                                            once they are there. The peer takes no part
// put_value and signal_add are called by one thread, after the group that put has synchronised; words are
// 8-byte aligned. Two calls on one channel from different threads are in no order unless the threads are.
//
// Sources are places in the window, never bare pointers: a network must have been told of the memory first.
// A mapped channel has one more, mapped(): the peer's window. Kernels that need it ask for MappedReach and
// are built for meshes that have nothing else (src/jit/kernel_list.h). Waiting is the same for every
// transport, since it polls local memory: wait.cuh.
#pragma once

#include "kernels/target/target.h"

namespace weft {

using WindowOffset = uint64_t;  // a byte position in a window

// The group of a thread that speaks for others, which have synchronised already.
struct OneThread {
  WEFT_DEVICE void sync() const {}
  WEFT_DEVICE uint32_t rank() const { return 0; }
  WEFT_DEVICE uint32_t size() const { return 1; }
};

template <class C>
concept Channel = requires(C channel, Warp warp, WindowOffset offset, uint64_t n) {
  channel.put(warp, offset, offset, n);
  channel.put_with_signal(warp, offset, offset, n, offset, n);
  channel.put_value(offset, n);
  channel.signal_add(offset, n);
  channel.flush();
  channel.get(warp, offset, offset, n, offset, n);
};

template <class C>
concept MappedReach = Channel<C> && requires(C channel) { static_cast<std::byte*>(channel.mapped()); };

template <class M>
concept Mesh = requires(M mesh, uint32_t peer) {
  requires Channel<decltype(mesh.to(peer))>;
  static_cast<uint32_t>(mesh.rank());
  static_cast<uint32_t>(mesh.ranks());
  static_cast<std::byte*>(mesh.local());
};

template <class M>
concept MappedMeshOnly =
    Mesh<M> && requires(M mesh, uint32_t peer) { requires MappedReach<decltype(mesh.to(peer))>; };

// A mesh whose channels put from and to temporary registrations (Link::register_temporary), for kernels on the host.
template <class M>
concept RegistrationMesh = kReadsProcesses && Mesh<M> && requires(M mesh, uint32_t registration, uint64_t n) {
  mesh.to(registration).put_registered(registration, n, registration, n, n);
  mesh.to(registration).announce(registration);
};

// The peer's window where this rank maps it; null where it goes through a port.
template <class MeshT>
WEFT_DEVICE std::byte* mapped_window(const MeshT& mesh, uint32_t peer) {
  if constexpr (MappedMeshOnly<MeshT>)
    return mesh.to(peer).mapped();
  else
    return mesh.mapped_window(peer);
}

}  // namespace weft
