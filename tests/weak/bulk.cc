// SPDX-License-Identifier: Apache-2.0
//
// Bulk copies: agents that read and write pieces at any time from their start to their wait.
#include <cstring>

#include "weak/machine.h"

namespace weft::weak {
namespace {

constexpr uint32_t kMostPieces = 12;  // of a copy: more make a run long, and show nothing else

}  // namespace

void Machine::barrier_init(uint64_t* barrier, Origin origin) {
  step();
  const Access access = access_of(*fiber_, true, Scope::kBlock, 4, origin);
  Barrier& made = barriers_[barrier] = {};
  made.agent = access.agent;
  made.time = access.time;
}

void Machine::start_copy(Copy made) {
  if (reinterpret_cast<uintptr_t>(made.from) % 16 || reinterpret_cast<uintptr_t>(made.to) % 16 ||
      made.bytes % 16 || made.bytes == 0)
    return fail("a bulk copy of places or bytes that are not multiples of 16: " + text_of(made.origin));
  made.agent = new_agent();
  made.priority = memory_.draw(2u << 20);
  Copy& copy = copies_.emplace_back(std::move(made));
  const uint32_t vectors = copy.bytes / 16;
  const uint32_t each = (vectors + kMostPieces - 1) / kMostPieces;
  for (uint32_t first = 0; first < vectors; first += each) {
    const uint32_t count = std::min(each, vectors - first);
    pieces_.push_back({&copy, uint64_t{first} * 16, count * 16, {}});
    ++copy.unread;
    ++copy.unwritten;
  }
}

void Machine::bulk_load(std::byte* to, const std::byte* from, uint32_t bytes, uint64_t* barrier,
                        Origin origin) {
  step();
  Fiber& fiber = *fiber_;
  access_of(fiber, false, Scope::kBlock, 4, origin);
  const auto found = barriers_.find(barrier);
  if (found == barriers_.end())
    return fail("a bulk load on a barrier that is not initialised: " + text_of(origin));
  Barrier& state = found->second;
  if (fiber.view.of[kAsyncShared].of(state.agent) < state.time)
    return fail(
        "a bulk load on a barrier whose initialisation the copy engine need not see: a fence_async_shared() "
        "is "
        "missing: " +
        text_of(origin));
  if (state.arrivals == 0) return fail("too many arrivals at a barrier: " + text_of(origin));
  note(to, 0, nullptr, true, origin);
  --state.arrivals;
  state.bytes += bytes;
  state.joining.join(fiber.view);
  start_copy({0, fiber.view, &fiber, from, to, kAsyncGlobal, kAsyncShared, barrier, 0, 0, bytes, origin, 0});
  fiber.loads.push_back(&copies_.back());
}
void Machine::bulk_store(std::byte* to, const std::byte* from, uint32_t bytes, Origin origin) {
  step();
  Fiber& fiber = *fiber_;
  access_of(fiber, false, Scope::kBlock, 4, origin);
  note(to, 0, nullptr, true, origin);
  start_copy({0, fiber.view, &fiber, from, to, kAsyncShared, kAsyncGlobal, nullptr, 0, 0, bytes, origin, 0});
  if (settings_.profile.branches_order) copies_.back().view.of[kAsyncGlobal].join(fiber.seen);
  fiber.groups.back().push_back(&copies_.back());
}
void Machine::bulk_commit() {
  fiber_->groups.emplace_back();
}

// A piece is read at one step, and written at a later one.
void Machine::step_copy(size_t index) {
  Piece& piece = pieces_[index];
  Copy& copy = *piece.copy;
  const bool reads = piece.held.empty();
  Access access{.agent = copy.agent,
                .time = reads ? 1u : 2u,
                .proxy = reads ? copy.reads_by : copy.writes_by,
                .place = copy.issuer->place,
                .view = &copy.view,
                .origin = copy.origin};
  const std::byte* const from = copy.from + piece.offset;
  std::byte* const to = copy.to + piece.offset;
  Region* const region = memory_.region_of(reads ? from : to);
  if (!region) return fail("a bulk copy of memory that is not shared: " + text_of(copy.origin));
  if (reads) {
    piece.held.resize(piece.bytes);
    memory_.read(access, *region, from, piece.bytes, piece.held.data(), nullptr);
    --copy.unread;
    if (copy.unread == 0) wake_all(copy_waiters_);
    return;
  }
  Write* const write = memory_.make_write();
  write->agent = copy.agent;
  write->time = 2;
  write->step = step_;
  write->proxy = copy.writes_by;
  write->is_strong = false;
  write->scope = Scope::kBlock;
  write->place = copy.issuer->place;
  write->origin = copy.origin;
  memory_.write(access, *region, to, piece.bytes, piece.held.data(), write);
  wake_readers(to, piece.bytes);
  pieces_[index] = std::move(pieces_.back());
  pieces_.pop_back();
  if (--copy.unwritten != 0) return;
  wake_all(copy_waiters_);
  if (!copy.barrier) return;
  Barrier& barrier = barriers_[copy.barrier];
  barrier.bytes -= copy.bytes;
  barrier.joining.advance(copy.agent, 2);
  complete_if_due(barrier);
}
void Machine::complete_if_due(Barrier& barrier) {
  if (barrier.arrivals != 0 || barrier.bytes != 0) return;
  ++barrier.phases;
  barrier.arrivals = 1;
  barrier.completed.join(barrier.joining);
  wake_all(barrier.waiting);
}

void Machine::wait_loaded(uint64_t* barrier, uint32_t parity, Origin origin) {
  step();
  const auto found = barriers_.find(barrier);
  if (found == barriers_.end())
    return fail("a wait for a barrier that is not initialised: " + text_of(origin));
  Barrier& state = found->second;
  if (fiber_->view.of[kGeneric].of(state.agent) < state.time)
    return fail("a wait for a barrier whose initialisation this lane need not see: " + text_of(origin));
  while ((state.phases & 1) == parity) {
    state.waiting.push_back(fiber_);
    block("a bulk load", origin);
  }
  if (is_changed(origin, Change::kDropped)) return;
  fiber_->view.join(state.completed);
  note(nullptr, 0, nullptr, false, origin);
}

// Waits for all groups of this lane but the newest `pending`: until their sources are read, or until all is written.
void Machine::wait_groups(uint32_t pending, bool sources_only, Origin origin) {
  step();
  if (!sources_only && is_changed(origin, Change::kSourcesOnly)) sources_only = true;
  if (is_changed(origin, Change::kOneMore)) ++pending;
  Fiber& fiber = *fiber_;
  const size_t committed = fiber.groups.size() - 1;
  for (size_t g = 0; g + pending < committed; ++g)
    for (Copy* copy : fiber.groups[g]) {
      while (sources_only ? copy->unread != 0 : copy->unwritten != 0) {
        copy_waiters_.push_back(fiber_);
        block("its bulk stores", origin);
      }
      fiber.view.advance(copy->agent, sources_only ? 1 : 2);
    }
  note(nullptr, 0, nullptr, false, origin);
}

}  // namespace weft::weak
