// SPDX-License-Identifier: Apache-2.0
//
// low_latency_handshake.cuh: the handshake is the last thing that a rank sends to a peer. It publishes
// everything written before, and carries the arguments that ranks must agree on; a difference is a fault.
#pragma once

#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

WEFT_DEVICE void write_handshake(const LowLatencyCall& call, LowLatencyHandshake* handshake,
                                 uint64_t dispatch_epoch) {
  for (uint32_t i = 0; i < LowLatencyHandshake::kWords; ++i)
    store_relaxed(&handshake->words[i], call.handshake.words[i]);
  store_relaxed(&handshake->dispatch_epoch, dispatch_epoch);
}

// One thread: publishes all earlier writes to the peer, together with this rank's arguments.
template <class MeshT>
WEFT_DEVICE void send_handshake(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t peer,
                                uint64_t dispatch_epoch) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const uint64_t to =
      call.region + at.handshake + (epoch.parity * mesh.ranks() + mesh.rank()) * sizeof(LowLatencyHandshake);
  const Outgoing<MeshT> handshake = outgoing_control(
      call, mesh, peer, to, outbox_offset(call, mesh.ranks(), epoch) + peer * sizeof(LowLatencyHandshake));
  write_handshake(call, reinterpret_cast<LowLatencyHandshake*>(handshake.at()), dispatch_epoch);
  handshake.send(OneThread{}, sizeof(LowLatencyHandshake),
                 control_offset(call, at.arrived, mesh.ranks(), epoch, mesh.rank()), epoch.number);
}

// One thread: waits for a source's handshake. False: leave that source out.
template <class MeshT>
WEFT_DEVICE bool await_handshake(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t source,
                                 Site site) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const auto* signal = reinterpret_cast<const uint64_t*>(
      control_from(call, mesh, source, control_offset(call, at.arrived, mesh.ranks(), epoch, source)));
  uint64_t seen = 0;
  return await(call, mesh, signal, epoch.number, source, site, 1, seen);
}

// One thread, after that: whether the source makes the same call; a fault if it does not.
template <class MeshT>
WEFT_DEVICE bool agrees(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t source,
                        uint64_t dispatch_epoch) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const auto* vecs =
      reinterpret_cast<const Vec16*>(control_from(call, mesh, source, call.region + at.handshake)) +
      (epoch.parity * mesh.ranks() + source) * (sizeof(LowLatencyHandshake) / sizeof(Vec16));
  const Vec16 held[2] = {load_vec_fresh(vecs), load_vec_fresh(vecs + 1)};  // both at once: memory is far
  static_assert(LowLatencyHandshake::kWords == 6 && sizeof(LowLatencyHandshake) == 2 * sizeof(Vec16));
  WEFT_UNROLL
  for (uint32_t i = 0; i < LowLatencyHandshake::kWords; ++i) {
    const uint32_t theirs = held[i / 4].words[i % 4];
    if (theirs == call.handshake.words[i]) continue;
    raise(call.wait.fault, Site::kLowLatencyAgree, call.wait.self, source, call.handshake.words[i], theirs,
          i);
    return false;
  }
  const uint64_t their_epoch = held[1].words[2] | uint64_t{held[1].words[3]} << 32;
  if (their_epoch == dispatch_epoch) return true;
  raise(call.wait.fault, Site::kCombineHandle, call.wait.self, source, dispatch_epoch, their_epoch, 0);
  return false;
}

}  // namespace low_latency
}  // namespace weft
