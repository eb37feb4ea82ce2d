// SPDX-License-Identifier: Apache-2.0
//
// The channel to a peer that host threads reach through a network: every call is one or more 16-byte commands
// (wire.h) in the FIFO of the proxy thread that serves the peer. A call that cannot be carried out (a place
// outside the window, a FIFO that stays full past the deadline) is dropped and raises the link's fault box,
// which the host turns into an error of the launch.
#pragma once

#include "kernels/core/reach.cuh"
#include "kernels/core/wait.cuh"
#include "transports/proxy/wire.h"

namespace weft {

// The channels to all peers, the own rank included. Passed to kernels by value.
struct ProxyMesh;

class ProxyChannel {
 public:
  WEFT_DEVICE ProxyChannel(const ProxyMesh& mesh, uint32_t peer) : mesh_(&mesh), peer_(peer) {}

  template <class Group>
  WEFT_DEVICE void put(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes) {
    group.sync();  // every thread's part of the source is written
    if (group.rank() == 0) move_range(proxy::Op::kPut, dst, src, bytes, 0);
    group.sync();
  }
  template <class Group>
  WEFT_DEVICE void put_with_signal(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                   WindowOffset word, uint64_t value) {
    group.sync();
    if (group.rank() == 0) {
      move_range(proxy::Op::kPut, dst, src, bytes, proxy::kMore);
      tell(proxy::Op::kValue, word, value, bytes == 0);  // else the put has released
    }
    group.sync();
  }
  WEFT_DEVICE void put_value(WindowOffset word, uint64_t value) {
    tell(proxy::Op::kValue, word, value, true);
  }
  WEFT_DEVICE void signal_add(WindowOffset word, uint64_t n) { tell(proxy::Op::kAdd, word, n, true); }
  WEFT_DEVICE void flush();
  template <class Group>
  WEFT_DEVICE void get(Group group, WindowOffset dst, WindowOffset src, uint64_t bytes, WindowOffset word,
                       uint64_t value) {
    group.sync();  // nobody reads any more what was at the destination
    if (group.rank() == 0) {
      move_range(proxy::Op::kGet, dst, src, bytes, 0);
      tell(proxy::Op::kGot, word, value, bytes == 0);
    }
    group.sync();
  }
  // A put from and to temporary registrations (Link::register_temporary; the peer's as it was announced), or with 0 the
  // windows. By one thread, like announce(), which tells the peer of a registration of this rank before all later
  // commands.
  WEFT_DEVICE void put_registered(uint32_t dst_registration, WindowOffset dst, uint32_t src_registration,
                                  WindowOffset src, uint64_t bytes);
  WEFT_DEVICE void announce(uint32_t registration) {
    uint64_t position = 0;
    push({registration - 1, proxy::head_of(proxy::Op::kAnnounce, peer_)}, true, position);
  }

 private:
  // Of a put or a get. `more`: proxy::kMore where a signal follows at once.
  WEFT_DEVICE void move_range(proxy::Op op, WindowOffset dst, WindowOffset src, uint64_t bytes,
                              uint64_t more);
  // `releases`: the thread may know of what the peer is to see and no earlier command has published.
  WEFT_DEVICE void tell(proxy::Op op, WindowOffset word, uint64_t value, bool releases);
  WEFT_DEVICE bool await_room(const proxy::Fifo& fifo, uint64_t position);
  WEFT_DEVICE bool push(proxy::Command command, bool releases, uint64_t& position);

  const ProxyMesh* mesh_;
  uint32_t peer_;
};

struct ProxyMesh {
  const proxy::Fifo* fifos;  // [proxies * kFifosPerProxy]; number i is of proxy i % proxies
  const uint64_t* flushed;   // [ranks]: sources to the peer are reusable up to this position of its FIFO
  std::byte* own;            // this rank's window
  uint64_t before;           // the host part begins so many bytes before it: commands count places from there
  uint64_t bytes;            // from there
  PortPlaces parts;
  uint64_t timeout_ns;
  FaultBox* fault;
  uint32_t self, count, proxies, region;

  WEFT_DEVICE ProxyChannel to(uint32_t peer) const { return ProxyChannel(*this, peer); }
  WEFT_DEVICE uint32_t rank() const { return self; }
  WEFT_DEVICE uint32_t ranks() const { return count; }
  WEFT_DEVICE std::byte* local() const { return own; }
  WEFT_DEVICE PortPlaces places() const { return parts; }
  WEFT_DEVICE std::byte* mapped_window(uint32_t) const { return nullptr; }
};
static_assert(sizeof(ProxyMesh) == 88);

// Waits until the proxy has read what stood in the slot of `position`.
WEFT_DEVICE bool ProxyChannel::await_room(const proxy::Fifo& fifo, uint64_t position) {
  if (position < fifo.capacity + load_relaxed(fifo.tail_seen)) return true;
  const auto comes_free = [&] {
    const uint64_t tail = load_acquire(fifo.tail);
    if (tail > load_relaxed(fifo.tail_seen)) store_relaxed(fifo.tail_seen, tail);
    return position < fifo.capacity + tail;
  };
  const WaitRule rule{mesh_->timeout_ns, mesh_->fault, mesh_->self, 0};
  uint64_t waited_ns = 0;
  if (poll(rule, waited_ns, comes_free)) return true;
  raise(mesh_->fault, Site::kPortFull, mesh_->self, peer_, position + 1 - fifo.capacity,
        load_relaxed(fifo.tail), waited_ns);
  return false;
}

// Takes the next position and writes the command there. Threads of the host may be taken off their core while
// they wait: they do so before they take a position, for which everybody would have to wait otherwise.
WEFT_DEVICE bool ProxyChannel::push(proxy::Command command, bool releases, uint64_t& position) {
  const proxy::Fifo& fifo = mesh_->fifos[proxy::fifo_of(peer_, mesh_->proxies)];
  if constexpr (Warp::kMaxSize == 1)
    if (!await_room(fifo, load_relaxed(fifo.head))) return false;
  position = add_local(fifo.head, uint64_t{1});
  if (!await_room(fifo, position)) return false;
  uint64_t* slot = &proxy::slot_of(fifo, position)->a;
  const uint64_t b = command.b | proxy::commit_of(fifo, position);
  releases ? store_pair_release(slot, command.a, b) : store_pair(slot, command.a, b);
  return true;
}

WEFT_DEVICE void ProxyChannel::move_range(proxy::Op op, WindowOffset dst, WindowOffset src, uint64_t bytes,
                                          uint64_t more) {
  const uint64_t room = mesh_->bytes;
  dst += mesh_->before;
  src += mesh_->before;
  const bool is_inside = bytes <= room && dst <= room - bytes && src <= room - bytes;
  if (!is_inside || (dst | src | bytes) % proxy::kUnit != 0)
    return raise(mesh_->fault, Site::kPortRange, mesh_->self, peer_, room, dst, 0);
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t left = bytes - done;
    const uint64_t part = left < proxy::kCommandBytesMax ? left : proxy::kCommandBytesMax;
    uint64_t position = 0;
    proxy::Command command = proxy::range_command(op, peer_, mesh_->region, dst + done, src + done, part);
    command.b |= more;
    if (!push(command, done == 0, position)) return;
    done += part;
  }
}

// The bounds of a temporary registration are known to its owner's host.
WEFT_DEVICE void ProxyChannel::put_registered(uint32_t dst_registration, WindowOffset dst,
                                              uint32_t src_registration, WindowOffset src, uint64_t bytes) {
  if (!dst_registration) dst += mesh_->before;
  if (!src_registration) src += mesh_->before;
  const uint64_t dst_room = dst_registration ? proxy::kWindowBytesMax : mesh_->bytes;
  const uint64_t src_room = src_registration ? proxy::kWindowBytesMax : mesh_->bytes;
  const bool is_inside =
      bytes <= dst_room && bytes <= src_room && dst <= dst_room - bytes && src <= src_room - bytes;
  if (!is_inside || (dst | src | bytes) % proxy::kUnit != 0 || bytes > proxy::kCommandBytesMax)
    return raise(mesh_->fault, Site::kPortRange, mesh_->self, peer_, dst_room, dst, 0);
  proxy::Command command = proxy::range_command(proxy::Op::kPut, peer_, 0, dst, src, bytes);
  command.b |=
      src_registration ? proxy::src_temporary_bits(src_registration - 1) : uint64_t{mesh_->region} << 41;
  command.b |=
      dst_registration ? proxy::dst_temporary_bits(dst_registration - 1) : uint64_t{mesh_->region} << 37;
  uint64_t position = 0;
  push(command, true, position);
}

WEFT_DEVICE void ProxyChannel::tell(proxy::Op op, WindowOffset word, uint64_t value, bool releases) {
  word += mesh_->before;
  if (word % 8 != 0 || mesh_->bytes < 8 || word > mesh_->bytes - 8)
    return raise(mesh_->fault, Site::kPortRange, mesh_->self, peer_, mesh_->bytes, word, 0);
  uint64_t position = 0;
  push(proxy::word_command(op, peer_, mesh_->region, word, value), releases, position);
}

WEFT_DEVICE void ProxyChannel::flush() {
  uint64_t position = 0;
  if (!push({0, proxy::head_of(proxy::Op::kFlush, peer_)}, false, position)) return;
  const WaitRule rule{mesh_->timeout_ns, mesh_->fault, mesh_->self, 0};
  uint64_t seen = 0, waited_ns = 0;
  if (poll_host_signal(mesh_->flushed + peer_, position + 1, rule, seen, waited_ns)) return;
  raise(mesh_->fault, Site::kPortFlush, mesh_->self, peer_, position + 1, seen, waited_ns);
}

static_assert(Channel<ProxyChannel>, "ProxyChannel must model Channel");
static_assert(Mesh<ProxyMesh>, "ProxyMesh must model Mesh");

}  // namespace weft
