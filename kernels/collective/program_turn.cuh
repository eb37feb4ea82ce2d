// SPDX-License-Identifier: Apache-2.0
//
// program_turn.cuh: where a block is in its program (Cursor), what its next step moves from where to where
// (Turn), and where rings, headers and grants are in the windows.
#pragma once

#include "kernels/collective/message.cuh"
#include "kernels/core/carver.h"
#include "kernels/core/reach.cuh"

namespace weft {

namespace program {

// Where a program block is. In the launch block's shared memory; written by its thread 0.
struct Cursor {
  uint64_t sent;
  uint64_t received;
  uint64_t first_sent;  // of this run
  uint64_t iteration;
  uint64_t waiting_since_ns;  // 0: it does not wait
  uint32_t number;            // of the program block
  uint32_t step;
  uint32_t chunk;  // of the step
  uint32_t is_done;
  uint32_t refers;    // it has referred to its own memory
  uint32_t finishes;  // all steps are taken; what it referred to is being read
  uint32_t salt;      // of the call's messages
};

enum Verdict : uint32_t { kNotYet = 0, kGo, kFault };

// How the bytes of a visit travel. Decided by one thread, as peers' headers and grants say.
struct Route {
  Slot in;              // null: nothing comes, or it lies at the destination already
  Slot out;             // null: nothing to write, the receiver reads it
  uint64_t in_process;  // address in the sender's process; 0: not that way
  uint32_t is_there;    // the sender has stored the message at its destination
  uint32_t refers;
  uint32_t borrows;  // `in`, or `in_process`, is the sender's own memory
};

struct Shared {
  uint32_t verdict;
  uint32_t last_block;
  Route route;
};

// A program in memory, which run_program interprets. run_compiled runs the same form, made of constants.
struct InMemory {
  const ProgramArgs& a;
  // Calls f(block, step, the step's waits); steps that are fused with it follow it in memory.
  template <class F>
  WEFT_DEVICE auto with_step(uint32_t number, uint32_t at, F f) const {
    const ProgramBlock& block = a.blocks[number];
    const ProgramStep& step = a.steps[block.first_step + at];
    return f(block, step, a.waits + step.first_wait);
  }
};

// The state of one program block in a visit.
struct Turn {
  const ProgramBlock* block;
  const ProgramStep* step;
  const ProgramWait* waits;
  bool sends;
  bool receives;
  uint32_t chunks;  // of this message
  uint64_t units;
  Piece src;
  Piece dst;
  uint32_t divisor;  // of an average that ends here, else 0
};

WEFT_DEVICE bool op_sends(StepOp op) {
  return op == StepOp::kSend || op == StepOp::kRecvCopySend || op == StepOp::kRecvReduceSend ||
         op == StepOp::kRecvReduceCopySend;
}
WEFT_DEVICE bool op_receives(StepOp op) {
  return op >= StepOp::kRecv && op <= StepOp::kRecvReduceCopySend;
}
WEFT_DEVICE bool op_reads_src(StepOp op) {
  return op != StepOp::kRecv && op != StepOp::kRecvCopySend;
}
WEFT_DEVICE bool op_writes_dst(StepOp op) {
  return op != StepOp::kSend && op != StepOp::kRecvReduceSend;
}

// Chunks [index, index + chunks) of a buffer at `base`, of each the slice of this iteration.
WEFT_DEVICE Piece piece_in(const ProgramArgs& a, const BufferLayout& layout, std::byte* base,
                           uint32_t bytes_per_elem, uint32_t index, uint32_t chunks, uint64_t iteration) {
  uint64_t first;
  uint64_t length;
  if (layout.table) {
    first = layout.table[index].first;
    length = layout.table[index].length;
  } else {
    const uint32_t part = index / layout.per_part;
    const uint64_t within = (index - part * layout.per_part) * a.chunk_elems;
    const uint64_t start = within < layout.part_elems ? within : layout.part_elems;
    first = part * layout.part_elems + start;
    length = layout.part_elems - start;
    const uint64_t most = chunks > 1 ? chunks * a.chunk_elems : a.chunk_elems;
    if (length > most || chunks > 1) length = most;
  }
  const uint64_t at = iteration * a.slice_elems;
  const uint64_t rest = length > at ? length - at : 0;
  const uint64_t most = chunks > 1 ? rest : a.slice_elems;
  return {base + (first + at) * bytes_per_elem, (rest < most ? rest : most) * bytes_per_elem};
}
WEFT_DEVICE Piece piece_of(const ProgramArgs& a, uint32_t bytes_per_elem, uint32_t buffer, uint32_t index,
                           uint32_t chunks, uint64_t iteration) {
  const BufferLayout& layout = a.buffers[buffer];
  return piece_in(a, layout, layout.base, bytes_per_elem, index, chunks, iteration);
}

template <class Shape>
WEFT_DEVICE Turn turn_of(const ProgramArgs& a, const Shape& shape, uint32_t ranks, const Cursor& cursor,
                         const ProgramBlock& block, const ProgramStep& step, const ProgramWait* waits) {
  Turn turn;
  turn.block = &block;
  turn.step = &step;
  turn.waits = waits;
  turn.divisor = turn.step[step.fused].ends_sum ? ranks : 0;
  const auto op = static_cast<StepOp>(turn.step->op);
  turn.sends = op_sends(op);
  turn.receives = op_receives(op);
  const uint32_t left = turn.step->count - cursor.chunk;
  turn.chunks = left < a.group ? left : a.group;
  const uint32_t bytes = element_bytes(static_cast<Element>(shape.element));
  turn.src = {};
  turn.dst = {};
  if (op_reads_src(op))
    turn.src = piece_of(a, bytes, turn.step->src_buffer, turn.step->src_index + cursor.chunk, turn.chunks,
                        cursor.iteration);
  if (op_writes_dst(op))
    turn.dst = piece_of(a, bytes, turn.step->dst_buffer, turn.step->dst_index + cursor.chunk, turn.chunks,
                        cursor.iteration);
  // Both ends of a connection must agree on a message's size: from the nominal chunk, or from equal sizes.
  uint64_t message_bytes;
  if (a.skip_empty) {
    message_bytes = turn.src.at ? turn.src.bytes : turn.dst.bytes;
  } else {
    const uint64_t rest = a.chunk_elems - cursor.iteration * a.slice_elems;
    message_bytes = (turn.chunks > 1        ? turn.chunks * a.chunk_elems
                     : rest < a.slice_elems ? rest
                                            : a.slice_elems) *
                    bytes;
  }
  turn.units = (message_bytes + 15) / 16;
  return turn;
}

// Over ports all messages are Simple.
template <class Shape>
struct OverPorts : Shape {
  static constexpr int64_t protocol = static_cast<int64_t>(Protocol::kSimple);
};

// Places of one connection's end.
struct RingPlace {
  uint64_t counter;  // index into sent, received and the freed counters
  uint64_t slot_at;  // window offset of the message's slot
};
template <class MeshT, class Shape>
WEFT_DEVICE RingPlace ring_of(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, uint32_t channel,
                              uint32_t peer, bool is_sender, uint64_t number) {
  const auto protocol = static_cast<uint64_t>(shape.protocol);
  const uint64_t connections = uint64_t{a.rings.channels} * mesh.ranks();
  const uint64_t mine = uint64_t{channel} * mesh.ranks() + peer;
  const uint64_t ring = uint64_t{channel} * mesh.ranks() + (is_sender ? mesh.rank() : peer);
  const uint64_t slot = ring * kRingSlots + number % kRingSlots;
  return {protocol * connections + mine, a.rings.slots_at[protocol] + slot * a.rings.slot_bytes[protocol]};
}
template <class MeshT>
WEFT_DEVICE uint64_t header_at(const ProgramArgs& a, const MeshT& mesh, uint32_t channel, uint32_t sender,
                               uint64_t number) {
  const uint64_t ring = uint64_t{channel} * mesh.ranks() + sender;
  return a.rings.headers_at + (ring * kRingSlots + number % kRingSlots) * sizeof(MessageHeader);
}
template <class MeshT>
WEFT_DEVICE uint64_t outbox_at(const ProgramArgs& a, const MeshT& mesh, uint32_t channel, uint32_t peer,
                               uint64_t number) {
  const uint64_t ring = uint64_t{channel} * mesh.ranks() + peer;
  return a.rings.outbox_at + (ring * kRingSlots + number % kRingSlots) * a.rings.slot_bytes[0];
}
template <class MeshT>
WEFT_DEVICE uint64_t ring_index(const MeshT& mesh, uint32_t channel, uint32_t sender) {
  return uint64_t{channel} * mesh.ranks() + sender;
}

WEFT_DEVICE uint64_t progress_value(uint64_t epoch, uint64_t iteration, uint32_t steps, uint32_t step) {
  return (epoch << 40) + iteration * steps + step + 1;
}

// The mark of a message's chunk, where chunks have sizes of their own.
WEFT_DEVICE uint32_t mark_of(const ProgramArgs& a, const Cursor& cursor, const Turn& turn) {
  if (!a.skip_empty) return 0;
  const bool is_src = turn.src.at != nullptr;
  const BufferLayout& layout = a.buffers[is_src ? turn.step->src_buffer : turn.step->dst_buffer];
  const uint32_t index = (is_src ? turn.step->src_index : turn.step->dst_index) + cursor.chunk;
  return layout.table ? layout.table[index].mark : 0;
}

// Whether a message of the step may bypass its slot at all: both ends see it alike.
template <class Shape>
WEFT_DEVICE bool may_be_direct(const ProgramArgs& a, const Shape& shape, uint64_t units) {
  return shape.protocol == static_cast<int64_t>(Protocol::kSimple) && !a.skip_empty &&
         units * 16 >= a.direct.least_bytes;
}
// Whether the sender waits for a grant, to store the message itself.
template <class MeshT, class Shape>
WEFT_DEVICE bool wants_grant(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, const Turn& turn) {
  if constexpr (!MappedMeshOnly<MeshT>)
    if (!mapped_window(mesh, static_cast<uint32_t>(turn.block->send_peer)))
      return RegistrationMesh<MeshT> && a.uses_registrations && (turn.step->direct & kMayStore) &&
             may_be_direct(a, shape, turn.units);
  const bool is_worth_it = a.direct.prefers_stores || !(turn.step->direct & kMayRefer);
  return (turn.step->direct & kMayStore) && is_worth_it && may_be_direct(a, shape, turn.units);
}
template <class MeshT>
WEFT_DEVICE const Grant* grant_of(const ProgramArgs& a, const MeshT& mesh, uint32_t channel, uint32_t peer) {
  return reinterpret_cast<const Grant*>(mesh.local() + a.rings.grants_at + records_of(mesh, peer)) +
         ring_index(mesh, channel, peer);
}

}  // namespace program

}  // namespace weft
