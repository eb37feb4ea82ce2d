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

#include "kernels/collective/program_conclude.cuh"

namespace weft {

namespace program {

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
                         Cursor& cursor, Turn turn, bool is_empty, uint64_t epoch, bool is_only_one) {
  // An empty piece sends nothing, so nothing but the order of steps is left of it.
  turn.sends = turn.sends && !is_empty;
  turn.receives = turn.receives && !is_empty;
  shared->verdict = look(a, mesh.rank(), cursor, is_only_one, [&](Lack& lack) {
    return has_all(a, mesh, shape, cursor, turn, epoch, is_only_one, lack);
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
                           Shared* shared, Cursor& cursor, bool is_only_one) {
  if (block.rank() == 0) {
    shared->verdict = look(a, mesh.rank(), cursor, is_only_one,
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
                          Block block, Shared* shared, Cursor& cursor, uint64_t epoch, bool is_only_one) {
  if (cursor.finishes) return finish(a, mesh, shape, block, shared, cursor, is_only_one);
  const uint32_t number = cursor.number, at = cursor.step;
  return program.with_step(
      number, at, [&](const ProgramBlock& own, const ProgramStep& step, const ProgramWait* waits) {
        const Turn turn = turn_of(a, shape, mesh.ranks(), cursor, own, step, waits);
        const bool is_empty = a.skip_empty && turn.units == 0;
        if (block.rank() == 0) prepare(a, mesh, shape, shared, cursor, turn, is_empty, epoch, is_only_one);
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
      const bool is_only_one = unfinished == 1 && !program::delays_links(a);
      const program::Verdict verdict =
          program::visit(steps, a, mesh, shape, block, shared, cursors[i], epoch, is_only_one);
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
