// SPDX-License-Identifier: Apache-2.0
//
// ring.cuh: messages between neighbours, for pipeline parallelism, through slots in the receiver's window.
// Send:     1 wait until the slot's last message has been read   2 every warp pushes pieces into the slot, or into one
//           of the outbox where the neighbour is behind a port   3 the last block to finish tells the size and signals,
//           and has the outbox's slot put there
// Receive:  1 wait for the signal   2 every warp copies pieces out   3 the last block gives the slot back
// Waits:    step 1 of either, for the one neighbour. Messages between two ranks keep their order.
// Cost:     the message's bytes once over the link, once more at the receiver, and through a port at the sender; a size
//           and two signals.
#pragma once

#include "kernels/core/channel.cuh"
#include "kernels/core/copy.cuh"
#include "kernels/core/reach.cuh"
#include "kernels/moe/rendezvous.cuh"
#include "kernels/moe/ring_args.h"

namespace weft {
namespace ring {

WEFT_DEVICE uint64_t slot_of(const RingArgs& a, uint64_t slots, uint64_t number) {
  return slots + (a.side * a.in_flight + (number - 1) % a.in_flight) * a.slot_bytes;
}
WEFT_DEVICE uint64_t size_at(const RingArgs& a, uint64_t number) {
  return a.at.sizes + (a.side * a.in_flight + (number - 1) % a.in_flight) * sizeof(uint64_t);
}

// Waits, in the first thread, for a signal in this rank's window. Returns the same in every thread of the
// block.
template <class MeshT>
WEFT_DEVICE bool await(const RingArgs& a, Block block, const MeshT& mesh, uint64_t signals_at, uint64_t want,
                       Site site, uint32_t* shared_flag) {
  if (block.rank() == 0) {
    const uint64_t* signal = word_from(mesh, a.peer, signals_at) + a.side;
    uint64_t seen = 0;
    uint64_t waited_ns = 0;
    const Span traced(a.wait.trace, site, a.peer);
    const bool came =
        !is_void(a.wait, load_gave_up(a.wait)) && poll_signal(signal, want, a.wait, seen, waited_ns);
    if (!came) raise(a.wait.fault, site, a.wait.self, a.peer, want, seen, waited_ns);
    *shared_flag = came ? 1 : 0;
  }
  block.sync();
  const bool came = *shared_flag != 0;
  block.sync();
  return came;
}

// Copies the message; pieces are dealt over all warps of the launch.
template <class Shape>
WEFT_DEVICE void move_message(const RingArgs& a, Block block, Warp warp, const Shape& shape, std::byte* dst,
                              const std::byte* src) {
  const Pieces pieces{a.bytes, kRingPieceBytes};
  const Share share = share_of(block, warp, {0, block.warps()});
  if (shape.vec_aligned == 0) {
    for (uint64_t item = share.index; item < pieces.per_row(); item += share.total)
      copy_any(warp, dst + pieces.offset(item), src + pieces.offset(item), pieces.bytes(item));
    return;
  }
  RowPipe<kPipeStages> pipe(
      warp, block.shared() + kPipeBarrierBytes + warp.index() * pipe_bytes(kRingPieceBytes), kRingPieceBytes);
  // A neighbour whose buffer is not aligned has stored what is copied here, or loaded from where it goes, without bulk copies.
  pipe.fence_acquired();
  Tasks tasks(warp, share, a.state);
  pipe.run(
      [&] {
        const uint64_t item = tasks.take();
        if (item >= pieces.per_row()) return RowItem<uint64_t>{};
        return RowItem<uint64_t>{{src + pieces.offset(item), pieces.bytes(item)}, item};
      },
      [&](uint64_t item, RowPiece stage) {
        pipe.store(warp.rank() == 0 ? dst + pieces.offset(item) : nullptr, stage);
      });
  pipe.drain();
}

}  // namespace ring

template <class MeshT, class Shape>
WEFT_KERNEL void ring_send(const RingArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  auto* flag = reinterpret_cast<uint32_t*>(block.shared());
  const uint64_t number = a.state->epoch + 1;
  const uint64_t must_be_read = number > a.in_flight ? number - a.in_flight : 0;
  if (!ring::await(a, block, mesh, a.at.released, must_be_read, Site::kRingSend, flag)) return;
  const uint64_t slot = ring::slot_of(a, a.at.slots, number),
                 outgoing = ring::slot_of(a, a.at.outbox, number);
  const Outgoing<MeshT> message(mesh, a.peer, near_window(mesh, a.peer), slot, outgoing,
                                port_places(mesh).payload);
  ring::move_message(a, block, warp, shape, message.at(), a.data);
  if (!last_block(block, &a.state->arrived, flag) || block.rank() != 0) return;
  const uint64_t arrived = a.at.arrived + a.side * sizeof(uint64_t);
  put_word(mesh, a.peer, ring::size_at(a, number), a.bytes);
  message.send(OneThread{}, round_up(a.bytes, 16), arrived, number);
  advance(a.state);
}

// A message of another size than this rank expects is dropped, and a fault says so.
template <class MeshT, class Shape>
WEFT_KERNEL void ring_receive(const RingArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  const Warp warp;
  auto* flag = reinterpret_cast<uint32_t*>(block.shared());
  const uint64_t number = a.state->epoch + 1;
  if (!ring::await(a, block, mesh, a.at.arrived, number, Site::kRingReceive, flag)) return;
  const uint64_t sent_bytes = load_relaxed(word_from(mesh, a.peer, ring::size_at(a, number)));
  if (sent_bytes == a.bytes) {
    ring::move_message(a, block, warp, shape, a.data,
                       mesh.local() + payload_of(mesh, a.peer) + ring::slot_of(a, a.at.slots, number));
  } else if (block.index() == 0 && block.rank() == 0) {
    raise(a.wait.fault, Site::kRingBytes, a.wait.self, a.peer, a.bytes, sent_bytes, 0);
  }
  if (!last_block(block, &a.state->arrived, flag) || block.rank() != 0) return;
  put_word(mesh, a.peer, a.at.released + a.side * sizeof(uint64_t), number);
  advance(a.state);
}

}  // namespace weft
