// SPDX-License-Identifier: Apache-2.0
//
// program_route.cuh: what a step has to wait for (has_all), and how its message then travels: through the
// slot, from memory that the sender refers to, or into memory that the receiver has granted.
#pragma once

#include "kernels/collective/program_temporary.cuh"

namespace weft {

namespace program {

// What a program block waits for; kept for the report when time is up.
struct Lack {
  uint32_t peer;
  uint64_t expected;
  uint64_t seen;
};

// How many messages of a ring the peer has read.
template <class MeshT>
WEFT_DEVICE const uint64_t* freed_by(const ProgramArgs& a, const MeshT& mesh, uint32_t peer,
                                     uint64_t counter) {
  return word_from(mesh, peer, a.rings.freed_at) + counter;
}

// One look: whether everything the step needs is there. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE bool has_all(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, const Cursor& cursor,
                         const Turn& turn, uint64_t epoch, bool may_wait_in_data, Lack& lack) {
  if (cursor.chunk == 0) {
    for (uint32_t i = 0; i < turn.step->waits; ++i) {
      const ProgramWait& wait = turn.waits[i];
      const uint64_t want = progress_value(epoch, cursor.iteration, wait.steps, wait.step);
      const uint64_t seen = load_acquire(&a.progress[wait.block]);
      if (seen < want) return lack = {mesh.rank(), want, seen}, false;
    }
  }
  const uint32_t channel = turn.block->channel;
  if (turn.receives) {
    const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
    const RingPlace ring = ring_of(a, mesh, shape, channel, peer, false, cursor.received);
    if (shape.protocol == static_cast<int64_t>(Protocol::kSimple)) {
      const uint64_t* arrived = word_from(mesh, peer, a.rings.arrived_at);
      const uint64_t seen = load_acquire(&arrived[ring_index(mesh, channel, peer)]);
      if (seen <= cursor.received) return lack = {peer, cursor.received + 1, seen}, false;
    } else if (!may_wait_in_data && turn.units > 0) {
      const Slot slot{mesh.local() + ring.slot_at + payload_of(mesh, peer),
                      message_tag(cursor.received, cursor.salt + mark_of(a, cursor, turn))};
      const bool has_arrived = shape.protocol == static_cast<int64_t>(Protocol::kLl)
                                   ? message::LlSlots::arrived(slot, turn.units - 1)
                                   : message::Ll128Slots::arrived(slot, turn.units - 1);
      if (!has_arrived) return lack = {peer, cursor.received + 1, cursor.received}, false;
    }
  }
  if (turn.sends) {
    const auto peer = static_cast<uint32_t>(turn.block->send_peer);
    const RingPlace ring = ring_of(a, mesh, shape, channel, peer, true, cursor.sent);
    const uint64_t seen = load_acquire(freed_by(a, mesh, peer, ring.counter));
    if (seen + kRingSlots <= cursor.sent) return lack = {peer, cursor.sent + 1 - kRingSlots, seen}, false;
    if (wants_grant(a, mesh, shape, turn)) {
      const uint64_t granted = load_acquire(&grant_of(a, mesh, channel, peer)->tag);
      if (granted != message_tag(cursor.first_sent + 1, cursor.salt) &&
          !goes_without_grant(mesh, cursor, turn))
        return lack = {peer, cursor.first_sent + 1, static_cast<uint32_t>(granted)}, false;
    }
  }
  return true;
}

// Whether the receivers have read all that the block referred to. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE bool all_is_read(const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                             const Cursor& cursor, Lack& lack) {
  const ProgramBlock& block = a.blocks[cursor.number];
  const auto peer = static_cast<uint32_t>(block.send_peer);
  const RingPlace ring = ring_of(a, mesh, shape, block.channel, peer, true, cursor.sent);
  const uint64_t seen = load_acquire(freed_by(a, mesh, peer, ring.counter));
  return seen >= cursor.sent || (lack = {peer, cursor.sent, seen}, false);
}

template <class MeshT>
WEFT_DEVICE const MessageHeader* header_of(const ProgramArgs& a, const MeshT& mesh, const Turn& turn,
                                           const Cursor& cursor) {
  const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
  return reinterpret_cast<const MessageHeader*>(
      mesh.local() + header_at(a, mesh, turn.block->channel, peer, cursor.received) + records_of(mesh, peer));
}

// Where the message that came is, by its header; false where it is of another call or cannot be reached,
// which is raised.
template <class MeshT, class Shape>
WEFT_DEVICE bool route_in(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, const Cursor& cursor,
                          const Turn& turn, Route& route) {
  const uint32_t channel = turn.block->channel;
  const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
  const uint32_t salt = cursor.salt + mark_of(a, cursor, turn);
  route.in = {mesh.local() + ring_of(a, mesh, shape, channel, peer, false, cursor.received).slot_at +
                  payload_of(mesh, peer),
              message_tag(cursor.received, salt)};
  if (shape.protocol != static_cast<int64_t>(Protocol::kSimple)) return true;
  const MessageHeader* header = header_of(a, mesh, turn, cursor);
  if (header->salt != salt) {
    const bool is_taken_back = header->salt == ~cursor.salt;
    raise(a.wait.fault, is_taken_back ? Site::kTakenBack : Site::kCollectiveCall, a.wait.self, peer, salt,
          header->salt, 0, cursor.number << 16 | cursor.step);
    return false;
  }
  if (header->place == Place::kSlot) return true;
  route.in = {nullptr, cursor.received, header->bytes};
  if (header->place == Place::kDestination)
    route.is_there = 1;
  else
    route.borrows = 1;
  if (header->place == Place::kWindow) {
    std::byte* const* bases = a.direct.windows[header->window - 1];
    if (!bases) {
      raise(a.wait.fault, Site::kPeerWindow, a.wait.self, peer, header->window - 1, 0, 0,
            cursor.number << 16 | cursor.step);
      return false;
    }
    route.in.at = bases[peer] + header->address;
  }
  if (header->place == Place::kProcess) {
    if (a.direct.processes[peer] == a.direct.processes[mesh.rank()])  // ranks are threads
      route.in.at = reinterpret_cast<std::byte*>(header->address);
    else
      route.in_process = header->address;
  }
  return true;
}

// The peer's destination of the message, or null where the peer's buffer is in no window that is left here.
template <class MeshT, class Shape>
WEFT_DEVICE Piece granted_piece(const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                                const Cursor& cursor, const Turn& turn) {
  const auto peer = static_cast<uint32_t>(turn.block->send_peer);
  const Grant* grant = grant_of(a, mesh, turn.block->channel, peer);
  const uint32_t buffer = turn.step->remote_buffer;
  if (grant->window[buffer] == 0) return {};
  std::byte* const* bases = a.direct.windows[grant->window[buffer] - 1];
  if (!bases) return {};
  std::byte* base = bases[peer] + grant->window_at[buffer];
  return piece_in(a, a.buffers[buffer], base, element_bytes(static_cast<Element>(shape.element)),
                  turn.step->remote_index + cursor.chunk, turn.chunks, cursor.iteration);
}

// Decides how the message goes, and writes its header: stored at its destination, referred to where it is, or
// through the slot.
template <class MeshT, class Shape>
WEFT_DEVICE void route_out(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, const Cursor& cursor,
                           const Turn& turn, Route& route) {
  const uint32_t channel = turn.block->channel;
  const auto peer = static_cast<uint32_t>(turn.block->send_peer);
  const uint32_t salt = cursor.salt + mark_of(a, cursor, turn);
  std::byte* const there = mapped_window(mesh, peer);
  if constexpr (!MappedMeshOnly<MeshT>) {
    if (!there) {
      route.out = {mesh.local() + outbox_at(a, mesh, channel, peer, cursor.sent) + payload_of(mesh, peer),
                   cursor.sent};
      if constexpr (RegistrationMesh<MeshT>) {
        if (registered_source(a, shape, turn).registration) {
          route.out = {};
          route.refers = 1;
        }
      }
      return;
    }
  }
  route.out = {there + ring_of(a, mesh, shape, channel, peer, true, cursor.sent).slot_at,
               message_tag(cursor.sent, salt)};
  if (shape.protocol != static_cast<int64_t>(Protocol::kSimple)) return;
  MessageHeader header{Place::kSlot, 0, salt, 0, 0};
  if (wants_grant(a, mesh, shape, turn)) {
    if (const Piece target = granted_piece(a, mesh, shape, cursor, turn); target.at) {
      header.place = Place::kDestination;
      route.out = {target.at, cursor.sent, target.bytes};
    }
  }
  const bool is_small = turn.units * 16 < a.direct.least_bytes;
  if (header.place == Place::kSlot && (turn.step->direct & kMayRefer) && !is_small) {
    const bool is_send = static_cast<StepOp>(turn.step->op) == StepOp::kSend;
    const Piece& piece = is_send ? turn.src : turn.dst;
    const BufferLayout& layout = a.buffers[is_send ? turn.step->src_buffer : turn.step->dst_buffer];
    if (layout.window)
      header = {Place::kWindow, static_cast<uint16_t>(layout.window), salt,
                layout.window_at + static_cast<uint64_t>(piece.at - layout.base), piece.bytes};
    else if (a.direct.readers[peer])
      header = {Place::kProcess, 0, salt, reinterpret_cast<uint64_t>(piece.at), piece.bytes};
    if (header.place != Place::kSlot) {
      route.out = {};
      route.refers = 1;
    }
  }
  *reinterpret_cast<MessageHeader*>(there + header_at(a, mesh, channel, mesh.rank(), cursor.sent)) = header;
}

WEFT_DEVICE void give_up(const ProgramArgs& a, const Cursor& cursor, const Lack& lack, uint64_t waited_ns) {
  raise(a.wait.fault, Site::kCollective, a.wait.self, lack.peer, lack.expected, lack.seen, waited_ns,
        cursor.number << 16 | cursor.step);
}

// Looks once, or until it is there if nothing else is left to do. One thread. has(lack): one look.
template <class Has>
WEFT_DEVICE Verdict look(const ProgramArgs& a, uint32_t self, Cursor& cursor, bool is_only_one, Has has) {
  Lack lack{};
  for (uint32_t polls = 0;; ++polls) {
    if (has(lack)) {
      cursor.waiting_since_ns = 0;
      return kGo;
    }
    if (is_only_one) pause(polls);
    if (is_only_one && !is_check_due(polls)) continue;
    const uint64_t now = now_ns();
    if (cursor.waiting_since_ns == 0) cursor.waiting_since_ns = now;
    // A block that waits for another block of its rank reports nothing: the other block names the missing peer.
    const uint64_t allowed_ns = lack.peer == self ? 2 * a.wait.timeout_ns : a.wait.timeout_ns;
    const bool is_late = now - cursor.waiting_since_ns > allowed_ns;
    if (is_late) give_up(a, cursor, lack, now - cursor.waiting_since_ns);
    if (is_late || load_relaxed(&a.wait.fault->raised) != 0) return kFault;
    if (!is_only_one) return kNotYet;
  }
}

}  // namespace program

}  // namespace weft
