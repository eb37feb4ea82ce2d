// SPDX-License-Identifier: Apache-2.0
//
// program.cuh: run_program interprets a collective program. Every block of the launch owns some blocks of the
// program and goes around them; a program block takes its steps in order, once per slice of the chunks. Steps
// of a visit: 1 one thread asks whether the step's dependencies, its message and a free slot are there   2
// the whole block moves the piece   3 one thread tells the peers and the other blocks. A program block that
// referred to its own memory is done when the receivers have read it. Waits: only in 1, and for single lines
// of LL messages in 2; bounded by the wait rule, which names rank, peer, program block and step. Cost: three
// block barriers per message.
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

// A program in memory, which run_program interprets. What run_compiled runs has the same form, as constants.
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

// What one program block needs to know in a visit.
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

// What the chunk of a message says of itself, where chunks have sizes of their own.
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
    if (!mapped_window(mesh, static_cast<uint32_t>(turn.block->send_peer))) return false;
  const bool is_worth_it = a.direct.prefers_stores || !(turn.step->direct & kMayRefer);
  return (turn.step->direct & kMayStore) && is_worth_it && may_be_direct(a, shape, turn.units);
}
template <class MeshT>
WEFT_DEVICE const Grant* grant_of(const ProgramArgs& a, const MeshT& mesh, uint32_t channel, uint32_t peer) {
  return reinterpret_cast<const Grant*>(mesh.local() + a.rings.grants_at) + ring_index(mesh, channel, peer);
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
      const auto* arrived = reinterpret_cast<const uint64_t*>(mesh.local() + a.rings.arrived_at);
      const uint64_t seen = load_acquire(&arrived[ring_index(mesh, channel, peer)]);
      if (seen <= cursor.received) return lack = {peer, cursor.received + 1, seen}, false;
    } else if (!may_wait_in_data && turn.units > 0) {
      const Slot slot{mesh.local() + ring.slot_at,
                      message_tag(cursor.received, cursor.salt + mark_of(a, cursor, turn))};
      const bool has_arrived = shape.protocol == static_cast<int64_t>(Protocol::kLl)
                                   ? message::LlWire::arrived(slot, turn.units - 1)
                                   : message::Ll128Wire::arrived(slot, turn.units - 1);
      if (!has_arrived) return lack = {peer, cursor.received + 1, cursor.received}, false;
    }
  }
  if (turn.sends) {
    const auto peer = static_cast<uint32_t>(turn.block->send_peer);
    const RingPlace ring = ring_of(a, mesh, shape, channel, peer, true, cursor.sent);
    const auto* freed = reinterpret_cast<const uint64_t*>(mesh.local() + a.rings.freed_at);
    const uint64_t seen = load_acquire(&freed[ring.counter]);
    if (seen + kRingSlots <= cursor.sent) return lack = {peer, cursor.sent + 1 - kRingSlots, seen}, false;
    if (wants_grant(a, mesh, shape, turn)) {
      const uint64_t granted = load_acquire(&grant_of(a, mesh, channel, peer)->tag);
      if (granted != message_tag(cursor.first_sent + 1, cursor.salt))
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
  const uint64_t seen =
      load_acquire(reinterpret_cast<const uint64_t*>(mesh.local() + a.rings.freed_at) + ring.counter);
  return seen >= cursor.sent || (lack = {peer, cursor.sent, seen}, false);
}

template <class MeshT>
WEFT_DEVICE const MessageHeader* header_of(const ProgramArgs& a, const MeshT& mesh, const Turn& turn,
                                           const Cursor& cursor) {
  const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
  return reinterpret_cast<const MessageHeader*>(
      mesh.local() + header_at(a, mesh, turn.block->channel, peer, cursor.received));
}

// Where the message that came is, by its header; false where it is of another call or cannot be reached,
// which is raised.
template <class MeshT, class Shape>
WEFT_DEVICE bool route_in(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, const Cursor& cursor,
                          const Turn& turn, Route& route) {
  const uint32_t channel = turn.block->channel;
  const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
  const uint32_t salt = cursor.salt + mark_of(a, cursor, turn);
  route.in = {mesh.local() + ring_of(a, mesh, shape, channel, peer, false, cursor.received).slot_at,
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
      route.out = {mesh.local() + outbox_at(a, mesh, channel, peer, cursor.sent), cursor.sent};
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
    const Piece& kept = is_send ? turn.src : turn.dst;
    const BufferLayout& layout = a.buffers[is_send ? turn.step->src_buffer : turn.step->dst_buffer];
    if (layout.window)
      header = {Place::kWindow, static_cast<uint16_t>(layout.window), salt,
                layout.window_at + static_cast<uint64_t>(kept.at - layout.base), kept.bytes};
    else if (a.direct.readers[peer])
      header = {Place::kProcess, 0, salt, reinterpret_cast<uint64_t>(kept.at), kept.bytes};
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
WEFT_DEVICE Verdict look(const ProgramArgs& a, uint32_t self, Cursor& cursor, bool is_alone, Has has) {
  Lack lack{};
  for (uint32_t polls = 0;; ++polls) {
    if (has(lack)) {
      cursor.waiting_since_ns = 0;
      return kGo;
    }
    if (is_alone) pause(polls);
    if (is_alone && !is_check_due(polls)) continue;
    const uint64_t now = now_ns();
    if (cursor.waiting_since_ns == 0) cursor.waiting_since_ns = now;
    // A block that waits for another of its rank leaves it to that one to say which peer is missing.
    const uint64_t allowed_ns = lack.peer == self ? 2 * a.wait.timeout_ns : a.wait.timeout_ns;
    const bool is_late = now - cursor.waiting_since_ns > allowed_ns;
    if (is_late) give_up(a, cursor, lack, now - cursor.waiting_since_ns);
    if (is_late || load_relaxed(&a.wait.fault->raised) != 0) return kFault;
    if (!is_alone) return kNotYet;
  }
}

// A message that lies in another process is read into its destination or, to be combined, bit by bit into
// memory that stays in the caches. False: it cannot be read. Host only.
template <class Move>
WEFT_DEVICE bool carry_from_process(const ProgramArgs& a, const Cursor& cursor, const Turn& turn,
                                    const Route& route, Movement m, Move move_all) {
  const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
  auto read = [&](std::byte* to, uint64_t at, uint64_t bytes) {
    const uint64_t rest = route.in.bytes > at ? route.in.bytes - at : 0;
    const uint64_t there = bytes < rest ? bytes : rest;
    for (uint64_t i = there; i < bytes; ++i) to[i] = std::byte{0};  // past the sender's end
    if (there == 0 || read_process(a.direct.processes[peer], to, route.in_process + at, there)) return true;
    raise(a.wait.fault, Site::kPeerMemory, a.wait.self, peer, there, 0, 0, cursor.number << 16 | cursor.step);
    return false;
  };
  if (!m.src.at && m.dst.at) {
    if (!read(m.dst.at, 0, m.dst.bytes)) return false;
    m.src = m.dst;
    m.dst = {};
    if (m.out.at) move_all(m);
    return true;
  }
  auto advance = [](auto& memory, uint64_t bytes) {
    if (!memory.at) return;
    memory.at += bytes;
    memory.bytes = memory.bytes > bytes ? memory.bytes - bytes : 0;
  };
  for (uint64_t at = 0; at < turn.units * 16; at += a.direct.bounce_bytes) {
    const uint64_t left = turn.units * 16 - at;
    const uint64_t bytes = left < a.direct.bounce_bytes ? left : a.direct.bounce_bytes;
    if (!read(a.direct.bounce, at, bytes)) return false;
    m.in = {a.direct.bounce, cursor.received, bytes};
    m.units = bytes / 16;
    move_all(m);
    advance(m.src, bytes);
    advance(m.dst, bytes);
    advance(m.out, bytes);
  }
  return true;
}

// Adds the sources of a sum that several steps make together, by the whole block.
template <class Shape>
WEFT_DEVICE void add_fused(const ProgramArgs& a, const Shape& shape, Block block, const Cursor& cursor,
                           const Turn& turn) {
  const uint32_t bytes = element_bytes(static_cast<Element>(shape.element));
  message::FusedSum sum;
  sum.dst = turn.dst;
  sum.count = turn.step->fused + 1;
  sum.divisor = turn.divisor;
  for (uint32_t i = 0; i < sum.count; ++i)
    sum.sources[i] = piece_of(a, bytes, turn.step[i].src_buffer, turn.step[i].src_index + cursor.chunk,
                              turn.chunks, cursor.iteration);
  move_sums(block, shape, sum, turn.units);
}

// Moves the piece, by the whole block. Returns, in each thread, whether all of its part came.
template <class Shape>
WEFT_DEVICE bool carry_out(const ProgramArgs& a, const Shape& shape, Block block, const Cursor& cursor,
                           const Turn& turn, const Route& route) {
  if (turn.step->fused) return add_fused(a, shape, block, cursor, turn), true;
  Movement m;
  m.units = turn.units;
  m.divisor = turn.divisor;
  m.src = turn.src;
  m.dst = turn.dst;
  m.in = route.in;
  m.out = route.out;
  m.adds_dst = static_cast<StepOp>(turn.step->op) == StepOp::kReduce;
  m.streams = a.streams_output != 0 && turn.dst.at && !m.adds_dst && turn.step->needed == 0 &&
              turn.step->dst_buffer != static_cast<uint32_t>(BufferId::kScratch);
  if (route.is_there) {  // nothing to do but to forward
    m.src = turn.dst;
    m.dst = {};
  }
  if (!m.dst.at && !m.out.at) return true;
  Patience patience{a.wait};
  bool came = true;
  auto gives_up = [&](uint32_t polls) {
    pause(polls);
    if (!patience.ends(polls)) return false;
    came = false;
    if (patience.is_late())
      give_up(a, cursor, {static_cast<uint32_t>(turn.block->recv_peer), cursor.received + 1, cursor.received},
              patience.waited_ns);
    return true;
  };
  auto move_all = [&](const Movement& all) {
    if (shape.protocol == static_cast<int64_t>(Protocol::kSimple))
      move<message::SimpleWire>(block, shape, all, gives_up);
    else if (shape.protocol == static_cast<int64_t>(Protocol::kLl))
      move<message::LlWire>(block, shape, all, gives_up);
    else
      move_ll128(block, shape, all, gives_up);
  };
  if constexpr (kReadsProcesses) {
    if (route.in_process) return carry_from_process(a, cursor, turn, route, m, move_all);
  }
  move_all(m);
  return came;
}

// Whether what this visit has read of the sender's own memory was what it sent. A sender that gives up takes
// its messages back before its memory is its caller's again: see take_back(). One thread, after the block.
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

// Tells the receiver that another message is there: now or, over a link that was made slow, when it is due.
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

// Sends a message that the block has built in the outbox. Its slot there is free: what lay in it before has
// been read by the peer, and so by the network. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void put_message(const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                             const Cursor& cursor, const Turn& turn, uint32_t peer) {
  const uint32_t channel = turn.block->channel;
  const MessageHeader header{Place::kSlot, 0, cursor.salt + mark_of(a, cursor, turn), 0, 0};
  const uint64_t slot_at = ring_of(a, mesh, shape, channel, peer, true, cursor.sent).slot_at;
  auto to_peer = mesh.to(peer);
  to_peer.put(OneThread{}, slot_at, outbox_at(a, mesh, channel, peer, cursor.sent), turn.units * 16);
  uint64_t first_word = 0;
  copy_few<8>(&first_word, &header);
  to_peer.put_value(header_at(a, mesh, channel, mesh.rank(), cursor.sent), first_word);
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
      tell(a, mesh, peer, a.rings.arrived_at + ring_index(mesh, channel, mesh.rank()) * 8, cursor.sent,
           turn.units * 16);
  }
  if (moved && turn.receives) {
    const auto peer = static_cast<uint32_t>(turn.block->recv_peer);
    cursor.received += 1;
    const uint64_t connections = uint64_t{a.rings.channels} * mesh.ranks();
    const uint64_t counter =
        static_cast<uint64_t>(shape.protocol) * connections + ring_index(mesh, channel, mesh.rank());
    mesh.to(peer).put_value(a.rings.freed_at + counter * 8, cursor.received);
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

// Tells the sender where this rank's buffers are: if it makes the same call, it may store into them from now
// on.
template <class MeshT>
WEFT_DEVICE void grant(const ProgramArgs& a, const MeshT& mesh, const ProgramBlock& block, uint64_t tag) {
  std::byte* const window = mapped_window(mesh, static_cast<uint32_t>(block.recv_peer));
  if constexpr (!MappedMeshOnly<MeshT>)
    if (!window) return;  // a port peer stores nothing itself
  auto* there =
      reinterpret_cast<Grant*>(window + a.rings.grants_at) + ring_index(mesh, block.channel, mesh.rank());
  for (uint32_t i = 0; i < 3; ++i) {
    there->window[i] = a.buffers[i].window;
    there->window_at[i] = a.buffers[i].window_at;
  }
  store_release(&there->tag, tag);
}

// After giving up: nobody stores into this rank's buffers any more, nor takes what is in them for what it
// sent. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void take_back(const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                           const Cursor& cursor) {
  if (shape.protocol != static_cast<int64_t>(Protocol::kSimple)) return;
  const ProgramBlock& block = a.blocks[cursor.number];
  if (block.grants) grant(a, mesh, block, message_tag(0, ~cursor.salt));
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

// Reads a program block's message numbers. One thread.
template <class MeshT, class Shape>
WEFT_DEVICE void open(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Cursor& cursor,
                      uint32_t number, uint32_t salt) {
  const ProgramBlock& block = a.blocks[number];
  cursor = {};
  cursor.number = number;
  cursor.salt = salt;
  cursor.is_done = block.steps == 0 || a.iterations == 0;
  if (block.send_peer >= 0)
    cursor.sent =
        a.sent[ring_of(a, mesh, shape, block.channel, static_cast<uint32_t>(block.send_peer), true, 0)
                   .counter];
  cursor.first_sent = cursor.sent;
  if (block.recv_peer >= 0)
    cursor.received =
        a.received[ring_of(a, mesh, shape, block.channel, static_cast<uint32_t>(block.recv_peer), false, 0)
                       .counter];
  if (block.grants && !cursor.is_done && !a.skip_empty &&
      shape.protocol == static_cast<int64_t>(Protocol::kSimple))
    grant(a, mesh, block, message_tag(cursor.received + 1, salt));
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

// The step's part of a visit by one thread: whether it can run and, if so, how its bytes travel.
template <class MeshT, class Shape>
WEFT_DEVICE void prepare(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Shared* shared,
                         Cursor& cursor, Turn turn, bool is_empty, uint64_t epoch, bool is_alone) {
  // An empty piece sends nothing, so nothing but the order of steps is left of it.
  turn.sends = turn.sends && !is_empty;
  turn.receives = turn.receives && !is_empty;
  shared->verdict = look(a, mesh.rank(), cursor, is_alone, [&](Lack& lack) {
    return has_all(a, mesh, shape, cursor, turn, epoch, is_alone, lack);
  });
  shared->route = {};
  if (shared->verdict != kGo) return;
  if (turn.receives && !route_in(a, mesh, shape, cursor, turn, shared->route)) {
    shared->verdict = kFault;
    return;
  }
  if (turn.sends) route_out(a, mesh, shape, cursor, turn, shared->route);
  cursor.refers |= shared->route.refers;
}

// A visit to a program block whose steps are all taken.
template <class MeshT, class Shape>
WEFT_DEVICE Verdict finish(const ProgramArgs& a, const MeshT& mesh, const Shape& shape, Block block,
                           Shared* shared, Cursor& cursor, bool is_alone) {
  if (block.rank() == 0) {
    shared->verdict = look(a, mesh.rank(), cursor, is_alone,
                           [&](Lack& lack) { return all_is_read(a, mesh, shape, cursor, lack); });
    cursor.is_done = shared->verdict == kGo;
  }
  block.sync();
  const auto verdict = static_cast<Verdict>(shared->verdict);
  block.sync();
  return verdict;
}

// One visit to a program block; kGo when it moved on.
template <class Program, class MeshT, class Shape>
WEFT_DEVICE Verdict visit(const Program& program, const ProgramArgs& a, const MeshT& mesh, const Shape& shape,
                          Block block, Shared* shared, Cursor& cursor, uint64_t epoch, bool is_alone) {
  if (cursor.finishes) return finish(a, mesh, shape, block, shared, cursor, is_alone);
  const uint32_t number = cursor.number, at = cursor.step;
  return program.with_step(
      number, at, [&](const ProgramBlock& own, const ProgramStep& step, const ProgramWait* waits) {
        const Turn turn = turn_of(a, shape, mesh.ranks(), cursor, own, step, waits);
        const bool is_empty = a.skip_empty && turn.units == 0;
        if (block.rank() == 0) prepare(a, mesh, shape, shared, cursor, turn, is_empty, epoch, is_alone);
        block.sync();
        // kFault by now where another thread's part has not come.
        const uint32_t may_go = load_acquire_block(&shared->verdict);
        if (may_go == kGo && !is_empty && !carry_out(a, shape, block, cursor, turn, shared->route))
          store_release_block(&shared->verdict, kFault);
        block.sync();
        if (block.rank() == 0 && shared->verdict == kGo) {
          if (shared->route.borrows && !still_holds(a, mesh, cursor, turn))
            shared->verdict = kFault;
          else
            conclude(a, mesh, shape, cursor, turn, epoch, !is_empty);
        }
        block.sync();
        return static_cast<Verdict>(shared->verdict);
      });
}

}  // namespace program

// Shared memory of a launch block that owns up to `owned` program blocks.
WEFT_DEVICE constexpr uint32_t program_shared_bytes(uint32_t owned) {
  return static_cast<uint32_t>(sizeof(program::Shared) + owned * sizeof(program::Cursor));
}

template <class Program, class MeshT, class Shape>
WEFT_DEVICE void run_steps_as(const Program& steps, const ProgramArgs& a, const MeshT& mesh,
                              const Shape& shape) {
  const Block block;
  auto* shared = reinterpret_cast<program::Shared*>(block.shared());
  auto* cursors = reinterpret_cast<program::Cursor*>(shared + 1);
  const uint64_t epoch = a.state->epoch + 1;
  bool is_broken = is_void(a.wait, load_gave_up(a.wait));
  const uint32_t owned =
      a.num_blocks > block.index() && !is_broken ? (a.num_blocks - block.index() - 1) / block.count() + 1 : 0;
  if (block.rank() == 0) {
    const uint32_t salt = a.digest + (a.calls ? static_cast<uint32_t>(*a.calls) * kSaltOfCall : 0);
    for (uint32_t i = 0; i < owned; ++i)
      program::open(a, mesh, shape, cursors[i], block.index() + i * block.count(), salt);
  }
  block.sync();

  uint32_t unfinished = 0;
  for (uint32_t i = 0; i < owned; ++i) unfinished += cursors[i].is_done == 0;
  for (uint32_t idle = 0; (unfinished > 0 || program::holds_signals(a)) && !is_broken;) {
    bool moved = false;
    program::release_due(a, mesh);
    for (uint32_t i = 0; i < owned && !is_broken; ++i) {
      if (cursors[i].is_done) continue;
      const bool is_alone = unfinished == 1 && !program::delays_links(a);
      const program::Verdict verdict =
          program::visit(steps, a, mesh, shape, block, shared, cursors[i], epoch, is_alone);
      is_broken = verdict == program::kFault;
      moved = moved || verdict == program::kGo;
      unfinished -= cursors[i].is_done;
    }
    idle = moved ? 0 : idle + 1;
    if (!moved) pause(idle + 16);
  }
  block.sync();
  if (is_broken && block.rank() == 0) {
    if (a.wait.gave_up) store_relaxed(a.wait.gave_up, uint32_t{1});
    for (uint32_t i = 0; i < owned; ++i) program::take_back(a, mesh, shape, cursors[i]);
  }
  if (block.rank() == 0)
    for (uint32_t i = 0; i < owned; ++i) program::close(a, mesh, shape, cursors[i]);
  if (last_block(block, &a.state->arrived, &shared->last_block) && block.rank() == 0) {
    advance(a.state);
    if (a.calls) *a.calls += 1;
  }
}

// Runs a program, wherever its steps are.
template <class Program, class MeshT, class Shape>
WEFT_DEVICE void run_steps(const Program& steps, const ProgramArgs& a, const MeshT& mesh,
                           const Shape& shape) {
  if constexpr (MappedMeshOnly<MeshT>)
    run_steps_as(steps, a, mesh, shape);
  else
    run_steps_as(steps, a, mesh, program::OverPorts<Shape>{shape});
}

template <class MeshT, class Shape>
WEFT_KERNEL void run_program(const ProgramArgs& a, const MeshT& mesh, const Shape& shape) {
  run_steps(program::InMemory{a}, a, mesh, shape);
}

// Multiplies a buffer by an element.
template <class MeshT, class Shape>
WEFT_KERNEL void scale_buffer(const ScaleArgs& a, const MeshT&, const Shape& shape) {
  const Block block;
  const uint64_t threads = uint64_t{block.count()} * block.size();
  const uint64_t first = uint64_t{block.index()} * block.size() + block.rank();
  element::with_format(shape, [&](auto format) {
    using Format = decltype(format);
    // Byte by byte: the bits may be read as any type, and not every target has memcpy.
    typename Format::Stored factor;
    const auto* from = static_cast<const unsigned char*>(a.factor_at ? a.factor_at : &a.factor_bits);
    for (size_t i = 0; i < sizeof factor; ++i) reinterpret_cast<unsigned char*>(&factor)[i] = from[i];
    auto* data = reinterpret_cast<typename Format::Stored*>(a.data);
    for (uint64_t i = first; i < a.elems; i += threads)
      data[i] = element::multiplied<Format>(data[i], factor);
  });
}

}  // namespace weft
