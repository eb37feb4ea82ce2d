// SPDX-License-Identifier: Apache-2.0
//
// program.cuh: run_program interprets a collective program. Every block of the launch owns some blocks of the
// program and goes around them; a program block takes its steps in order, once per slice of the chunks. Steps
// of a visit: 1 one thread asks whether the step's dependencies, its message and a free slot are there   2
// the whole block moves the piece   3 one thread tells the peers and the other blocks. Waits: only in 1, and
// for single lines of LL messages in 2; bounded by the wait rule, which names rank, peer, program block and
// step. Cost: two block barriers per message.
#pragma once

#include "kernels/collective/message.cuh"
#include "kernels/core/carver.h"
#include "kernels/core/channel.cuh"

namespace weft {

namespace program {

// Where a program block is. In the launch block's shared memory; written by its thread 0.
struct Cursor {
  uint64_t sent;
  uint64_t received;
  uint64_t iteration;
  uint64_t waiting_since_ns;  // 0: it does not wait
  uint32_t number;            // of the program block
  uint32_t step;
  uint32_t chunk;  // of the step
  uint32_t is_done;
};

enum Verdict : uint32_t { kNotYet = 0, kGo, kFault };

struct Shared {
  uint32_t verdict;
  uint32_t last_block;
  uint64_t reserved;
};

// What one program block needs to know in a visit.
struct Turn {
  const ProgramBlock* block;
  const ProgramStep* step;
  bool sends;
  bool receives;
  uint32_t chunks;  // of this message
  uint64_t units;
  Piece src;
  Piece dst;
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

// Chunks [index, index + chunks) of a buffer, of each the slice of this iteration.
WEFT_DEVICE Piece piece_of(const ProgramArgs& a, uint32_t bytes_per_elem, uint32_t buffer, uint32_t index,
                           uint32_t chunks, uint64_t iteration) {
  const BufferLayout& layout = a.buffers[buffer];
  uint64_t first;
  uint64_t length;
  if (layout.table) {
    first = layout.table[2 * index];
    length = layout.table[2 * index + 1];
  } else {
    const uint64_t within = index % layout.per_part * a.chunk_elems;
    const uint64_t start = within < layout.part_elems ? within : layout.part_elems;
    first = index / layout.per_part * layout.part_elems + start;
    length = layout.part_elems - start;
    const uint64_t most = chunks > 1 ? chunks * a.chunk_elems : a.chunk_elems;
    if (length > most || chunks > 1) length = most;
  }
  const uint64_t at = iteration * a.slice_elems;
  const uint64_t rest = length > at ? length - at : 0;
  const uint64_t most = chunks > 1 ? rest : a.slice_elems;
  return {layout.base + (first + at) * bytes_per_elem, (rest < most ? rest : most) * bytes_per_elem};
}

template <class Shape>
WEFT_DEVICE Turn turn_of(const ProgramArgs& a, const Shape& shape, const Cursor& cursor) {
  Turn turn;
  turn.block = &a.blocks[cursor.number];
  turn.step = &a.steps[turn.block->first_step + cursor.step];
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
  const uint64_t slot = ring * a.rings.slots + number % a.rings.slots;
  return {protocol * connections + mine, a.rings.slots_at[protocol] + slot * a.rings.slot_bytes[protocol]};
}
template <class MeshT>
WEFT_DEVICE uint64_t ring_index(const MeshT& mesh, uint32_t channel, uint32_t sender) {
  return uint64_t{channel} * mesh.ranks() + sender;
}

WEFT_DEVICE uint64_t progress_value(uint64_t epoch, uint64_t iteration, uint32_t steps, uint32_t step) {
  return (epoch << 40) + iteration * steps + step + 1;
}

// What a program block waits for; kept for the report when time is up.
struct Lack {
  uint32_t peer;
  uint64_t expected;
  uint64_t seen;
};

// One look: whether everything the step needs is there. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE bool has_all(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, const Cursor& cursor,
                         const Turn& turn, uint64_t epoch, bool may_wait_in_data, Lack& lack) {
  if (cursor.chunk == 0) {
    for (uint32_t i = 0; i < turn.step->waits; ++i) {
      const ProgramWait& wait = a.waits[turn.step->first_wait + i];
      const uint64_t want = progress_value(epoch, cursor.iteration, a.blocks[wait.block].steps, wait.step);
      const uint64_t seen = load_acquire(&a.progress[wait.block]);
      if (seen < want) return lack = {mesh.rank(), want, seen}, false;
    }
  }
  const uint32_t channel = turn.block->channel;
  if (turn.receives) {
    const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
    const RingPlace ring = ring_of(a, mesh, shape, channel, peer, false, cursor.received);
    if (shape.protocol == static_cast<int64_t>(Protocol::kSimple)) {
      const auto* arrived = reinterpret_cast<const uint64_t*>(mesh.local() + a.rings.arrived_at);
      const uint64_t seen = load_acquire(&arrived[ring_index(mesh, channel, peer)]);
      if (seen <= cursor.received) return lack = {peer, cursor.received + 1, seen}, false;
    } else if (!may_wait_in_data && turn.units > 0) {
      const Slot slot{mesh.local() + ring.slot_at, cursor.received};
      if (!message::LlWire::arrived(slot, turn.units - 1))
        return lack = {peer, cursor.received + 1, cursor.received}, false;
    }
  }
  if (turn.sends) {
    const auto peer = static_cast<uint32_t>(turn.block->send_peer);
    const RingPlace ring = ring_of(a, mesh, shape, channel, peer, true, cursor.sent);
    const auto* freed = reinterpret_cast<const uint64_t*>(mesh.local() + a.rings.freed_at);
    const uint64_t seen = load_acquire(&freed[ring.counter]);
    if (seen + a.rings.slots <= cursor.sent)
      return lack = {peer, cursor.sent + 1 - a.rings.slots, seen}, false;
  }
  return true;
}

WEFT_DEVICE void give_up(const ProgramArgs& a, const Cursor& cursor, const Lack& lack, uint64_t waited_ns) {
  raise(a.wait.fault, Site::kCollective, a.wait.self, lack.peer, lack.expected, lack.seen, waited_ns,
        cursor.number << 16 | cursor.step);
}

// Looks once, or until it is there if nothing else is left to do. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE Verdict look(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Cursor& cursor,
                         const Turn& turn, uint64_t epoch, bool is_alone) {
  Lack lack{};
  for (uint32_t polls = 0;; ++polls) {
    if (has_all(a, mesh, shape, cursor, turn, epoch, is_alone, lack)) {
      cursor.waiting_since_ns = 0;
      return kGo;
    }
    if (is_alone) pause(polls);
    if (is_alone && (polls & 63) != 63) continue;
    const uint64_t now = now_ns();
    if (cursor.waiting_since_ns == 0) cursor.waiting_since_ns = now;
    // A block that waits for another of its rank leaves it to that one to say which peer is missing.
    const uint64_t allowed_ns = lack.peer == mesh.rank() ? 2 * a.wait.timeout_ns : a.wait.timeout_ns;
    const bool is_late = now - cursor.waiting_since_ns > allowed_ns;
    if (is_late) give_up(a, cursor, lack, now - cursor.waiting_since_ns);
    if (is_late || load_relaxed(&a.wait.fault->raised) != 0) return kFault;
    if (!is_alone) return kNotYet;
  }
}

// Moves the piece, by the whole block.
template <class MeshT, class Shape>
WEFT_DEVICE void carry_out(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Block block,
                           const Cursor& cursor, const Turn& turn) {
  Movement m;
  m.units = turn.units;
  m.src = turn.src;
  m.dst = turn.dst;
  m.adds_dst = static_cast<StepOp>(turn.step->op) == StepOp::kReduce;
  m.streams = a.streams_output != 0 && turn.dst.at && !m.adds_dst && turn.step->needed == 0 &&
              turn.step->dst_buffer != static_cast<uint32_t>(BufferId::kScratch);
  const uint32_t channel = turn.block->channel;
  if (turn.receives) {
    const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
    m.in = {mesh.local() + ring_of(a, mesh, shape, channel, peer, false, cursor.received).slot_at,
            cursor.received};
  }
  if (turn.sends) {
    const auto peer = static_cast<uint32_t>(turn.block->send_peer);
    m.out = {mesh.to(peer).mapped() + ring_of(a, mesh, shape, channel, peer, true, cursor.sent).slot_at,
             cursor.sent};
  }
  uint64_t since_ns = 0;
  auto gives_up = [&](uint32_t polls) {
    pause(polls);
    if ((polls & 63) != 63) return false;
    const uint64_t now = now_ns();
    if (since_ns == 0) since_ns = now;
    if (now - since_ns > a.wait.timeout_ns)
      give_up(a, cursor, {static_cast<uint32_t>(turn.block->recv_peer), cursor.received + 1, cursor.received},
              now - since_ns);
    return load_relaxed(&a.wait.fault->raised) != 0;
  };
  if (shape.protocol == static_cast<int64_t>(Protocol::kSimple))
    move<message::SimpleWire>(block, shape, m, gives_up);
  else
    move<message::LlWire>(block, shape, m, gives_up);
}

// Tells peers and other blocks, and moves the cursor on. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void conclude(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Cursor& cursor,
                          const Turn& turn, uint64_t epoch, bool moved) {
  const uint32_t channel = turn.block->channel;
  if (moved && turn.sends) {
    const auto peer = static_cast<uint32_t>(turn.block->send_peer);
    cursor.sent += 1;
    if (shape.protocol == static_cast<int64_t>(Protocol::kSimple))
      mesh.to(peer).signal(a.rings.arrived_at + ring_index(mesh, channel, mesh.rank()) * 8, cursor.sent);
  }
  if (moved && turn.receives) {
    const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
    cursor.received += 1;
    const uint64_t connections = uint64_t{a.rings.channels} * mesh.ranks();
    const uint64_t counter =
        static_cast<uint64_t>(shape.protocol) * connections + ring_index(mesh, channel, mesh.rank());
    mesh.to(peer).signal(a.rings.freed_at + counter * 8, cursor.received);
  }
  cursor.chunk += turn.chunks;
  if (cursor.chunk < turn.step->count) return;
  if (turn.step->needed)
    store_release(&a.progress[cursor.number],
                  progress_value(epoch, cursor.iteration, turn.block->steps, cursor.step));
  cursor.chunk = 0;
  cursor.step += 1;
  if (cursor.step < turn.block->steps) return;
  cursor.step = 0;
  cursor.iteration += 1;
  cursor.is_done = cursor.iteration == a.iterations;
}

// Reads a program block's message numbers. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void open(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Cursor& cursor,
                      uint32_t number) {
  const ProgramBlock& block = a.blocks[number];
  cursor = {};
  cursor.number = number;
  cursor.is_done = block.steps == 0 || a.iterations == 0;
  if (block.send_peer >= 0)
    cursor.sent =
        a.sent[ring_of(a, mesh, shape, block.channel, static_cast<uint32_t>(block.send_peer), true, 0)
                   .counter];
  if (block.recv_peer >= 0)
    cursor.received =
        a.received[ring_of(a, mesh, shape, block.channel, static_cast<uint32_t>(block.recv_peer), false, 0)
                       .counter];
}
template <class MeshT, class Shape>
WEFT_DEVICE void close(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, const Cursor& cursor) {
  const ProgramBlock& block = a.blocks[cursor.number];
  if (block.send_peer >= 0)
    a.sent[ring_of(a, mesh, shape, block.channel, static_cast<uint32_t>(block.send_peer), true, 0).counter] =
        cursor.sent;
  if (block.recv_peer >= 0)
    a.received[ring_of(a, mesh, shape, block.channel, static_cast<uint32_t>(block.recv_peer), false, 0)
                   .counter] = cursor.received;
}

// One visit to a program block; kGo when it moved on.
template <class MeshT, class Shape>
WEFT_DEVICE Verdict visit(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Block block,
                          Shared* shared, Cursor& cursor, uint64_t epoch, bool is_alone) {
  const Turn turn = turn_of(a, shape, cursor);
  const bool is_empty = a.skip_empty && turn.units == 0;
  if (block.rank() == 0) {
    // An empty piece sends nothing, so nothing but the order of steps is left of it.
    Turn order = turn;
    order.sends = turn.sends && !is_empty;
    order.receives = turn.receives && !is_empty;
    shared->verdict = look(a, mesh, shape, cursor, order, epoch, is_alone);
  }
  block.sync();
  const auto verdict = static_cast<Verdict>(shared->verdict);
  if (verdict == kGo && !is_empty) carry_out(a, mesh, shape, block, cursor, turn);
  block.sync();
  if (verdict == kGo && block.rank() == 0) conclude(a, mesh, shape, cursor, turn, epoch, !is_empty);
  block.sync();
  return verdict;
}

}  // namespace program

// Shared memory of a launch block that owns up to `owned` program blocks.
WEFT_DEVICE constexpr uint32_t program_shared_bytes(uint32_t owned) {
  return static_cast<uint32_t>(sizeof(program::Shared) + owned * sizeof(program::Cursor));
}

template <class MeshT, class Shape>
WEFT_KERNEL void run_program(const ProgramArgs& a, const MeshT& mesh, const Shape& shape) {
  const Block block;
  auto* shared = reinterpret_cast<program::Shared*>(block.shared());
  auto* cursors = reinterpret_cast<program::Cursor*>(shared + 1);
  const uint64_t epoch = a.state->epoch + 1;
  const uint32_t owned =
      a.num_blocks > block.index() ? (a.num_blocks - block.index() - 1) / block.count() + 1 : 0;
  if (block.rank() == 0)
    for (uint32_t i = 0; i < owned; ++i)
      program::open(a, mesh, shape, cursors[i], block.index() + i * block.count());
  block.sync();

  uint32_t unfinished = 0;
  for (uint32_t i = 0; i < owned; ++i) unfinished += cursors[i].is_done == 0;
  bool is_broken = false;
  for (uint32_t idle = 0; unfinished > 0 && !is_broken;) {
    bool moved = false;
    for (uint32_t i = 0; i < owned && !is_broken; ++i) {
      if (cursors[i].is_done) continue;
      const program::Verdict verdict =
          program::visit(a, mesh, shape, block, shared, cursors[i], epoch, unfinished == 1);
      is_broken = verdict == program::kFault;
      moved = moved || verdict == program::kGo;
      unfinished -= cursors[i].is_done;
    }
    idle = moved ? 0 : idle + 1;
    if (!moved) pause(idle + 16);
  }
  block.sync();
  if (block.rank() == 0)
    for (uint32_t i = 0; i < owned; ++i) program::close(a, mesh, shape, cursors[i]);
  finish_launch(block, a.state, &shared->last_block);
}

// Divides a buffer by a number: what is left to do for an average.
template <class MeshT, class Shape>
WEFT_KERNEL void scale_buffer(const ScaleArgs& a, const MeshT&, const Shape& shape) {
  const Block block;
  const uint64_t threads = uint64_t{block.count()} * block.size();
  const uint64_t first = uint64_t{block.index()} * block.size() + block.rank();
  element::with_format(static_cast<Element>(shape.element), [&](auto format) {
    using Format = decltype(format);
    auto* data = reinterpret_cast<typename Format::Stored*>(a.data);
    const auto divisor = static_cast<typename Format::Value>(a.divisor);
    for (uint64_t i = first; i < a.elems; i += threads)
      data[i] = Format::store(static_cast<typename Format::Value>(Format::load(data[i]) / divisor));
  });
}

}  // namespace weft
