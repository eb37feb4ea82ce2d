// SPDX-License-Identifier: Apache-2.0
//
// hybrid.cuh: a mesh of mapped peers and ports. Each access looks up the peer's kind, which is the same in
// every lane of a warp that asks for the same peer. Kernels on ranks that have one kind of peer only are
// compiled with that kind's mesh instead and pay nothing.
#pragma once

#include "kernels/core/channel.cuh"

namespace weft {

template <class Mapped, class Port>
class HybridChannel {
 public:
  WEFT_DEVICE HybridChannel(Mapped mapped, Port port) : mapped_(mapped), port_(port) {}

  template <class Group>
  WEFT_DEVICE void put(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    is_mapped() ? mapped_.put(group, dst, src, bytes) : port_.put(group, dst, src, bytes);
  }
  template <class Group>
  WEFT_DEVICE void put_with_signal(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                   WindowOffset word, uint64_t value) {
    is_mapped() ? mapped_.put_with_signal(group, dst, src, bytes, word, value)
                : port_.put_with_signal(group, dst, src, bytes, word, value);
  }
  WEFT_DEVICE void put_value(WindowOffset word, uint64_t value) {
    is_mapped() ? mapped_.put_value(word, value) : port_.put_value(word, value);
  }
  WEFT_DEVICE void signal_add(WindowOffset word, uint64_t n) {
    is_mapped() ? mapped_.signal_add(word, n) : port_.signal_add(word, n);
  }
  WEFT_DEVICE void flush() { is_mapped() ? mapped_.flush() : port_.flush(); }
  template <class Group>
  WEFT_DEVICE void get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                       uint64_t value) {
    is_mapped() ? mapped_.get(group, dst, src, bytes, word, value)
                : port_.get(group, dst, src, bytes, word, value);
  }
  // To port peers alone.
  WEFT_DEVICE void put_registered(uint32_t dst_registration, WindowOffset dst, uint32_t src_registration,
                                  WindowOffset src, uint64_t bytes)
    requires requires(Port port) { port.put_registered(dst_registration, dst, src_registration, src, bytes); }
  {
    port_.put_registered(dst_registration, dst, src_registration, src, bytes);
  }
  WEFT_DEVICE void announce(uint32_t registration)
    requires requires(Port port) { port.announce(registration); }
  {
    port_.announce(registration);
  }
  WEFT_DEVICE bool is_mapped() const { return mapped_.mapped() != nullptr; }

 private:
  Mapped mapped_;
  Port port_;
};

// Passed to kernels by value: the two parts, one after the other (hybrid_mesh() in transports/transport.h).
template <class MappedPart, class PortPart>
struct HybridMesh {
  MappedPart mapped;
  PortPart port;

  WEFT_DEVICE auto to(uint32_t peer) const { return HybridChannel(mapped.to(peer), port.to(peer)); }
  WEFT_DEVICE uint32_t rank() const { return mapped.rank(); }
  WEFT_DEVICE uint32_t ranks() const { return mapped.ranks(); }
  WEFT_DEVICE std::byte* local() const { return mapped.local(); }
  WEFT_DEVICE std::byte* mapped_window(uint32_t peer) const { return mapped.to(peer).mapped(); }
  WEFT_DEVICE auto places() const
    requires requires(const PortPart& part) { part.places(); }
  {
    return port.places();
  }
  WEFT_DEVICE void attend() const
    requires requires(const PortPart& part) { part.attend(); }
  {
    port.attend();
  }
};

}  // namespace weft
