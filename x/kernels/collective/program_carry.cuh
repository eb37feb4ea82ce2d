// SPDX-License-Identifier: Apache-2.0
//
// program_carry.cuh: the data of a step: copies and reductions from and to where its routes say.
#pragma once

#include "kernels/collective/program_route.cuh"

namespace weft {

namespace program {

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
      move<message::SimpleSlots>(block, shape, all, gives_up);
    else if (shape.protocol == static_cast<int64_t>(Protocol::kLl))
      move<message::LlSlots>(block, shape, all, gives_up);
    else
      move_ll128(block, shape, all, gives_up);
  };
  if constexpr (kReadsProcesses) {
    if (route.in_process) return carry_from_process(a, cursor, turn, route, m, move_all);
  }
  move_all(m);
  return came;
}

}  // namespace program

}  // namespace weft
