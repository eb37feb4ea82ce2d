// SPDX-License-Identifier: Apache-2.0
//
// program_temporary.cuh: messages to port peers that travel from the sender's buffer straight into the receiver's,
// where calls have registered both at their link for their time: which ends of a message are registered, and the
// grants.
#pragma once

#include "kernels/collective/program_turn.cuh"

namespace weft {

namespace program {

// Where in a registered buffer a message lies. 0: in none.
struct RegisteredPlace {
  uint32_t registration = 0;
  uint64_t at = 0;
};

// How long a sender waits for a grant. A receiver that has not begun the call, or makes another call, grants nothing.
// The message then goes to its slot, where the receiver sees which call it is of.
inline constexpr uint64_t kGrantPatience_ns = 5'000'000;

template <class MeshT>
WEFT_DEVICE bool goes_without_grant(const MeshT& mesh, const Cursor& cursor, const Turn& turn) {
  if constexpr (RegistrationMesh<MeshT>)
    return !mapped_window(mesh, static_cast<uint32_t>(turn.block->send_peer)) &&
           cursor.waiting_since_ns != 0 && now_ns() - cursor.waiting_since_ns > kGrantPatience_ns;
  return false;
}

// A network moves whole units.
WEFT_DEVICE RegisteredPlace registered_if_aligned(uint32_t registration, const Piece& piece,
                                                  const std::byte* base, uint64_t units) {
  const auto at = static_cast<uint64_t>(piece.at - base);
  return registration && at % 16 == 0 && piece.bytes >= units * 16 ? RegisteredPlace{registration, at}
                                                                   : RegisteredPlace{};
}

// The step's message in a registered buffer, if the step may refer to it.
template <class Shape>
WEFT_DEVICE RegisteredPlace registered_source(const ProgramArgs& a, const Shape& shape, const Turn& turn) {
  if (!(turn.step->direct & kMayRefer) || !may_be_direct(a, shape, turn.units)) return {};
  const bool is_send = static_cast<StepOp>(turn.step->op) == StepOp::kSend;
  const uint32_t buffer = is_send ? turn.step->src_buffer : turn.step->dst_buffer;
  return registered_if_aligned(a.registrations[buffer], is_send ? turn.src : turn.dst, a.buffers[buffer].base,
                               turn.units);
}

// The message's destination at the peer, if the peer's grant has come.
template <class MeshT, class Shape>
WEFT_DEVICE RegisteredPlace registered_target(const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                                              const Cursor& cursor, const Turn& turn) {
  if (!wants_grant(a, mesh, shape, turn)) return {};
  const uint32_t buffer = turn.step->remote_buffer;
  const Grant* grant = grant_of(a, mesh, turn.block->channel, static_cast<uint32_t>(turn.block->send_peer));
  if (load_acquire(&grant->tag) != message_tag(cursor.first_sent + 1, cursor.salt)) return {};
  std::byte* const base = mesh.local();  // of any memory: the place in the buffer is the same over there
  const Piece piece = piece_in(a, a.buffers[buffer], base, element_bytes(static_cast<Element>(shape.element)),
                               turn.step->remote_index + cursor.chunk, turn.chunks, cursor.iteration);
  return registered_if_aligned(grant->registration[buffer], piece, base, turn.units);
}

// Announces the registrations to a port peer, then grants their use in the run that `tag` names.
template <class MeshT>
WEFT_DEVICE void grant_registrations(const ProgramArgs& a, const MeshT& mesh, const ProgramBlock& block,
                                     uint64_t tag) {
  const auto peer = static_cast<uint32_t>(block.recv_peer);
  const uint64_t at =
      in_part(a.rings.grants_at + ring_index(mesh, block.channel, mesh.rank()) * sizeof(Grant),
              records_of(mesh, peer));
  Grant grant{};
  auto to_peer = mesh.to(peer);
  for (uint32_t i = 0; i < 3; ++i) {
    if ((block.grants >> i & 1) == 0 || !a.registrations[i]) continue;
    grant.registration[i] = a.registrations[i];
    to_peer.announce(a.registrations[i]);
  }
  uint64_t words[sizeof(Grant) / 8];
  copy_few<sizeof(Grant)>(words, &grant);
  constexpr uint32_t kFirst = offsetof(Grant, window) / 8, kEnd = offsetof(Grant, reserved) / 8;
  for (uint32_t i = kFirst; i < kEnd; ++i) to_peer.put_value(at + i * 8, words[i]);
  to_peer.put_value(at, tag);
}

}  // namespace program

}  // namespace weft
