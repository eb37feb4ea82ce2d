// SPDX-License-Identifier: Apache-2.0
//
// program_conclude.cuh: what a block sends besides data: signals and headers of a finished step, grants for
// messages to come, and, when it gives up, what it takes back.
#pragma once

#include "kernels/collective/program_carry.cuh"

namespace weft {

namespace program {

// Whether the data that this visit read from the sender's own memory was still the message. A sender that
// gives up takes its messages back before its caller owns the memory again: see take_back(). One thread,
// after the block.
template <class MeshT>
WEFT_DEVICE bool still_holds(const ProgramArgs& a, const MeshT& mesh, const Cursor& cursor,
                             const Turn& turn) {
  if constexpr (Warp::kMaxSize == 1) fence_system();  // what was read, first; on GPUs the barrier saw to it
  const uint32_t salt = cursor.salt + mark_of(a, cursor, turn);
  const uint32_t seen = load_acquire(&header_of(a, mesh, turn, cursor)->salt);
  if (seen == salt) return true;
  raise(a.wait.fault, Site::kTakenBack, a.wait.self, static_cast<uint32_t>(turn.block->recv_peer), salt, seen,
        0, cursor.number << 16 | cursor.step);
  return false;
}

WEFT_DEVICE bool delays_links(const ProgramArgs& a) {
  if constexpr (kDelaysLinks) return a.delays != nullptr;
  return false;
}
// Whether a signal is on its way over a link that was made slow.
WEFT_DEVICE bool holds_signals(const ProgramArgs& a) {
  if constexpr (kDelaysLinks) return a.delays && a.delays->count > 0;
  return false;
}

// Tells the receiver that another message is there: now or, over a link that was made slow, when it is due. `at` counts in
// the part of the window that the peer has for it.
template <class MeshT>
WEFT_DEVICE void tell(const ProgramArgs& a, const MeshT& mesh, uint32_t peer, uint64_t at, uint64_t value,
                      uint64_t bytes) {
  if constexpr (kDelaysLinks) {
    if (a.delays) {
      LinkDelay& link = a.delays->links[peer];
      const uint64_t now = now_ns();
      const uint64_t start = link.free_at_ns > now ? link.free_at_ns : now;
      link.free_at_ns = start + static_cast<uint64_t>(static_cast<double>(bytes) * link.ns_per_byte);
      a.delays->held[a.delays->count++] = {link.free_at_ns + link.latency_ns, at, value, peer, 0};
      return;
    }
  }
  mesh.to(peer).put_value(at, value);
}

// Sends what is due. Signals to one peer are due in the order in which they were sent.
template <class MeshT>
WEFT_DEVICE void release_due(const ProgramArgs& a, const MeshT& mesh) {
  if constexpr (kDelaysLinks) {
    if (!holds_signals(a)) return;
    const uint64_t now = now_ns();
    uint64_t left = 0;
    for (uint64_t i = 0; i < a.delays->count; ++i) {
      const HeldSignal signal = a.delays->held[i];
      if (signal.due_ns <= now)
        mesh.to(signal.peer).put_value(signal.offset, signal.value);
      else
        a.delays->held[left++] = signal;
    }
    a.delays->count = left;
  }
}

// Sends a message that the block has built in the outbox, or that lies in a registered buffer. Its slot there is free:
// what lay in it before has been read by the peer, and so by the network. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void put_message(const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                             const Cursor& cursor, const Turn& turn, uint32_t peer) {
  const uint32_t channel = turn.block->channel;
  MessageHeader header{Place::kSlot, 0, cursor.salt + mark_of(a, cursor, turn), 0, 0};
  const PortPlaces places = port_places(mesh);
  const uint64_t slot_at =
      in_part(ring_of(a, mesh, shape, channel, peer, true, cursor.sent).slot_at, places.payload);
  const uint64_t built_at = in_part(outbox_at(a, mesh, channel, peer, cursor.sent), places.payload);
  auto to_peer = mesh.to(peer);
  RegisteredPlace from{}, to{};
  if constexpr (RegistrationMesh<MeshT>) {
    if (a.uses_registrations) {
      from = registered_source(a, shape, turn);
      to = registered_target(a, mesh, shape, cursor, turn);
      if (to.registration) header.place = Place::kDestination;
      if (from.registration || to.registration)
        to_peer.put_registered(to.registration, to.registration ? to.at : slot_at, from.registration,
                               from.registration ? from.at : built_at, turn.units * 16);
    }
  }
  if (!from.registration && !to.registration) to_peer.put(OneThread{}, slot_at, built_at, turn.units * 16);
  uint64_t first_word = 0;
  copy_few<8>(&first_word, &header);
  to_peer.put_value(in_part(header_at(a, mesh, channel, mesh.rank(), cursor.sent), places.records),
                    first_word);
}

// Tells peers and other blocks, and moves the cursor on. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void conclude(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Cursor& cursor,
                          const Turn& turn, uint64_t epoch, bool moved) {
  const uint32_t channel = turn.block->channel;
  if (moved && turn.sends) {
    const auto peer = static_cast<uint32_t>(turn.block->send_peer);
    if constexpr (!MappedMeshOnly<MeshT>)
      if (!mapped_window(mesh, peer)) put_message(a, mesh, shape, cursor, turn, peer);
    cursor.sent += 1;
    if (shape.protocol == static_cast<int64_t>(Protocol::kSimple))
      tell(a, mesh, peer,
           in_part(a.rings.arrived_at + ring_index(mesh, channel, mesh.rank()) * 8, records_of(mesh, peer)),
           cursor.sent, turn.units * 16);
  }
  if (moved && turn.receives) {
    const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
    cursor.received += 1;
    const uint64_t connections = uint64_t{a.rings.channels} * mesh.ranks();
    const uint64_t counter =
        static_cast<uint64_t>(shape.protocol) * connections + ring_index(mesh, channel, mesh.rank());
    mesh.to(peer).put_value(in_part(a.rings.freed_at + counter * 8, records_of(mesh, peer)), cursor.received);
  }
  cursor.chunk += turn.chunks;
  if (cursor.chunk < turn.step->count) return;
  cursor.step += turn.step->fused;  // the last of them is the one that others wait for
  if (turn.step[turn.step->fused].needed)
    store_release(&a.progress[cursor.number],
                  progress_value(epoch, cursor.iteration, turn.block->steps, cursor.step));
  cursor.chunk = 0;
  cursor.step += 1;
  if (cursor.step < turn.block->steps) return;
  cursor.step = 0;
  cursor.iteration += 1;
  if (cursor.iteration < a.iterations) return;
  cursor.finishes = cursor.refers;
  cursor.is_done = !cursor.refers;
}

// Tells the sender where this rank's buffers are. A sender that makes the same call may store into them from
// now on.
template <class MeshT>
WEFT_DEVICE void grant(const ProgramArgs& a, const MeshT& mesh, const ProgramBlock& block, uint64_t tag) {
  std::byte* const window = mapped_window(mesh, static_cast<uint32_t>(block.recv_peer));
  if constexpr (!MappedMeshOnly<MeshT>)
    if (!window) {  // a port peer stores nothing itself
      if constexpr (RegistrationMesh<MeshT>)
        if (a.uses_registrations) grant_registrations(a, mesh, block, tag);
      return;
    }
  auto* there =
      reinterpret_cast<Grant*>(window + a.rings.grants_at) + ring_index(mesh, block.channel, mesh.rank());
  for (uint32_t i = 0; i < 3; ++i) {
    there->window[i] = a.buffers[i].window;
    there->window_at[i] = a.buffers[i].window_at;
  }
  store_release(&there->tag, tag);
}

// After giving up: peers no longer store into this rank's buffers, and no longer take their contents for
// its messages. The host ends the registrations. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void take_back(const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                           const Cursor& cursor) {
  if (shape.protocol != static_cast<int64_t>(Protocol::kSimple)) return;
  const ProgramBlock& block = a.blocks[cursor.number];
  if (block.grants && mapped_window(mesh, static_cast<uint32_t>(block.recv_peer)))
    grant(a, mesh, block, message_tag(0, ~cursor.salt));
  if (block.send_peer < 0) return;
  std::byte* const there = mapped_window(mesh, static_cast<uint32_t>(block.send_peer));
  if constexpr (!MappedMeshOnly<MeshT>)
    if (!there) return;  // a port peer has copies of its own
  for (uint64_t back = 1; back <= kRingSlots && back <= cursor.sent; ++back) {
    auto* header = reinterpret_cast<MessageHeader*>(
        there + header_at(a, mesh, block.channel, mesh.rank(), cursor.sent - back));
    store_release(&header->salt, ~cursor.salt);
  }
}

}  // namespace program

}  // namespace weft
