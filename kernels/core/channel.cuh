// SPDX-License-Identifier: Apache-2.0
//
// channel.cuh: what device code may ask of the way to one peer. Every transport's channel.cuh ends with
//   static_assert(Channel<FooChannel>, "FooChannel must model Channel");
//
//   put(group, dst_offset, src, bytes)                    start moving bytes into the peer's window; 16-byte
//   aligned put_with_signal(group, dst_offset, src, bytes, signal_offset, value)   the same; the signal is
//   seen after the bytes signal(signal_offset, value)                          release: everything put before
//   on this channel is visible first atomic_add(offset, value)                             64-bit add in the
//   peer's window, ordered like signal flush()                                               sources may be
//   reused; says nothing about the peer mapped()                                              the peer's
//   window, or null where it can't be loaded and stored
// signal and atomic_add are called by one thread, after the group that put has synchronised.
// Waiting is the same for every transport, since it polls local memory: wait.cuh.
#pragma once

#include "kernels/target/target.h"

namespace weft {

using WindowOffset = uint64_t;  // a byte position in a window

template <class C>
concept Channel = requires(C channel, Warp warp, WindowOffset offset, const std::byte* src, uint64_t n) {
  channel.put(warp, offset, src, n);
  channel.put_with_signal(warp, offset, src, n, offset, n);
  channel.signal(offset, n);
  channel.atomic_add(offset, n);
  channel.flush();
  static_cast<std::byte*>(channel.mapped());
};

template <class M>
concept Mesh = requires(M mesh, uint32_t peer) {
  requires Channel<decltype(mesh.to(peer))>;
  static_cast<uint32_t>(mesh.rank());
  static_cast<uint32_t>(mesh.ranks());
  static_cast<std::byte*>(mesh.local());
};

}  // namespace weft
