// SPDX-License-Identifier: Apache-2.0
//
// Fibers, their scheduler, and groups.
#include "weak/machine.h"

#include <sys/mman.h>

#include <cstring>

namespace weft::weak {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr uint64_t kMostSteps = 5'000'000;
thread_local Machine* the_machine = nullptr;

// Stacks outlive machines: a seed takes less time than their system calls.
std::vector<void*>& spare_stacks() {
  static thread_local std::vector<void*> spare;
  return spare;
}
void* take_stack() {
  auto& spare = spare_stacks();
  if (spare.empty())
    return mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void* const stack = spare.back();
  spare.pop_back();
  return stack;
}

}  // namespace

Machine& machine() {
  return *the_machine;
}
bool is_in_a_lane() {
  return the_machine && the_machine->runs_a_lane();
}

Machine::Machine(const Settings& settings)
    : settings_(settings),
      memory_({.seed = settings.seed, .finds_races = settings.finds_races}, &Machine::race) {
  the_machine = this;
  // By the seed: how often another may run, or priorities with up to three changes.
  constexpr uint32_t kStays[] = {1, 2, 8, 64, 0, 0};
  stays_ = kStays[memory_.draw(6)];
  if (stays_ == 0)
    for (uint64_t i = memory_.draw(4); i > 0; --i)
      change_points_.insert(static_cast<uint32_t>(memory_.draw(uint64_t{1} << (6 + memory_.draw(10)))));
}
Machine::~Machine() {
  for (auto& fiber : fibers_)
    if (fiber->stack) spare_stacks().push_back(fiber->stack);
  the_machine = nullptr;
}

void Machine::launch(uint32_t stream, Launch launch) {
  streams_[stream].launches.push_back(std::move(launch));
}

uint32_t Machine::new_agent() {
  times_.push_back(0);
  return static_cast<uint32_t>(times_.size() - 1);
}
// Lanes of later launches of a stream go on as those of the first: fewer agents.
uint32_t Machine::agent_of(Stream& stream, uint32_t index) {
  while (stream.agents.size() <= index) stream.agents.push_back(new_agent());
  return stream.agents[index];
}

void Machine::start(Stream& stream) {
  const Launch& launch = stream.launches[stream.started++];
  const uint32_t number = [&] {
    for (auto& [key, value] : streams_)
      if (&value == &stream) return key;
    return 0u;
  }();
  // What launches before this one did is visible to everybody: a relaxed store of this one publishes it.
  const auto begun = std::make_shared<const View>(stream.view);
  uint32_t index = 0;
  for (uint32_t b = 0; b < launch.blocks; ++b) {
    auto& block = *blocks_.emplace_back(std::make_unique<BlockState>());
    block.bytes.assign(launch.shared_bytes + 128, std::byte{0xa5});
    block.shared = block.bytes.data() + (128 - reinterpret_cast<uintptr_t>(block.bytes.data()) % 128) % 128;
    block.alive = block.all.size = launch.warps * launch.lanes;
    block.warps.resize(launch.warps);
    const uint32_t number_of_block = launch.first_block + b;
    memory_.share("shared memory of rank " + std::to_string(launch.rank) + " block " +
                      std::to_string(number_of_block) + " (" + launch.name + ")",
                  block.shared, launch.shared_bytes);
    for (uint32_t w = 0; w < launch.warps; ++w) {
      Rendezvous& warp = block.warps[w];
      warp.size = launch.lanes;
      for (auto& values : warp.values) values.resize(launch.lanes);
      for (uint32_t lane = 0; lane < launch.lanes; ++lane) {
        auto fiber = std::make_unique<Fiber>();
        fiber->agent = agent_of(stream, index++);
        fiber->place = {launch.rank, number_of_block, w, lane};
        fiber->stream = number;
        fiber->launch = &launch;
        fiber->block = &block;
        fiber->priority = memory_.draw(1u << 20) + (1u << 20);
        fiber->view = stream.view;
        fiber->view.advance(fiber->agent, times_[fiber->agent]);
        fiber->fenced = {begun, begun, begun};
        prepare(*fiber);
        warp.lanes.push_back(fiber.get());
        runnable_.push_back(fiber.get());
        ++stream.alive;
        fibers_.push_back(std::move(fiber));
      }
    }
  }
  stream.ending = stream.view;
}

void Machine::prepare(Fiber& fiber) {
  fiber.stack = take_stack();
  getcontext(&fiber.context);
  fiber.context.uc_stack = {fiber.stack, 0, kStackBytes};
  fiber.context.uc_link = nullptr;
  const auto bits = reinterpret_cast<uintptr_t>(&fiber);
  makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Machine::enter), 2, static_cast<uint32_t>(bits),
              static_cast<uint32_t>(bits >> 32));
}
void Machine::enter(uint32_t low, uint32_t high) {
  auto* fiber = reinterpret_cast<Fiber*>(uintptr_t{low} | uintptr_t{high} << 32);
  Machine& self = machine();
  fiber->launch->body();
  self.take_plain_store();
  self.finish(*fiber);
  self.leave_fiber();
}

void Machine::finish(Fiber& fiber) {
  for (auto& group : fiber.groups)
    for (Copy* copy : group)
      if (fiber.view.of[kGeneric].of(copy->agent) == 0)
        return fail("a lane of " + text_of(fiber.place) +
                    " ends, and a bulk copy may still read its shared memory: " + text_of(copy->origin));
  for (Copy* copy : fiber.loads)
    if (fiber.view.of[kGeneric].of(copy->agent) == 0)
      return fail("a lane of " + text_of(fiber.place) +
                  " ends, and nobody has waited for a bulk load: " + text_of(copy->origin));
  fiber.is_done = true;
  leave_group(fiber.block->all);
  leave_group(fiber.block->warps[fiber.place.warp]);
  if (--fiber.block->alive == 0) memory_.forget(fiber.block->shared);
  Stream& stream = streams_[fiber.stream];
  fiber.view.join(fiber.pending[static_cast<uint32_t>(Scope::kSystem)]);
  stream.ending.join(fiber.view);
  for (auto& group : fiber.groups)
    for (Copy* copy : group) stream.ending.advance(copy->agent, 2);  // a launch ends when its copies have
  if (--stream.alive != 0) return;
  stream.ending.level();
  stream.view = stream.ending;
}

bool Machine::run() {
  for (auto& [number, stream] : streams_) stream.priority = memory_.draw(2u << 20);
  while (!failed_ && act())
    if (step_ > kMostSteps) fail("too many steps: " + std::to_string(step_));
  if (failed_) return false;
  std::string waiting;
  uint32_t lanes = 0;
  for (auto& fiber : fibers_) {
    if (fiber->is_done) continue;
    if (++lanes > 64) continue;
    waiting +=
        "\n  " + text_of(fiber->place) + " waits for " + fiber->waits_for + " " + text_of(fiber->waits_at);
    if (fiber->is_polling)
      for (const std::byte* word : std::set<const std::byte*>(fiber->fresh.begin(), fiber->fresh.end()))
        waiting += "\n    " + word_of(word) + newest_of(word);
  }
  if (lanes) fail("deadlock: " + std::to_string(lanes) + " lanes wait for what nobody will do" + waiting);
  return !failed_;
}

bool Machine::act() {
  std::vector<Stream*> startable;
  for (auto& [number, stream] : streams_)
    if (stream.alive == 0 && stream.started < stream.launches.size()) startable.push_back(&stream);
  const uint64_t actions = runnable_.size() + pieces_.size() + startable.size();
  if (actions == 0) return false;
  uint64_t chosen = memory_.draw(actions);
  if (stays_ == 0) {
    uint64_t most = 0;
    const auto priority_of = [&](uint64_t i) {
      if (i < runnable_.size()) return runnable_[i]->priority;
      i -= runnable_.size();
      return i < pieces_.size() ? pieces_[i].copy->priority : startable[i - pieces_.size()]->priority;
    };
    for (uint64_t i = 0; i < actions; ++i)
      if (priority_of(i) > most) most = priority_of(chosen = i);
  }
  if (chosen < runnable_.size()) {
    Fiber* const fiber = runnable_[chosen];
    runnable_[chosen] = runnable_.back();
    runnable_.pop_back();
    run_fiber(*fiber);
    if (!fiber->is_done && !fiber->is_blocked) runnable_.push_back(fiber);
  } else if (chosen - runnable_.size() < pieces_.size()) {
    ++step_;
    step_copy(chosen - runnable_.size());
  } else {
    start(*startable[chosen - runnable_.size() - pieces_.size()]);
  }
  return true;
}

void Machine::run_fiber(Fiber& fiber) {
  fiber_ = &fiber;
  swapcontext(&scheduler_, &fiber.context);
  fiber_ = nullptr;
  if (fiber.is_done && fiber.stack) {
    spare_stacks().push_back(fiber.stack);
    fiber.stack = nullptr;
  }
}
void Machine::leave_fiber() {
  Fiber& fiber = *fiber_;
  swapcontext(&fiber.context, &scheduler_);
}

void Machine::step() {
  take_plain_store();
  ++step_;
  if (stays_ == 0) {
    const bool changes = change_points_.count(step_) != 0;
    if (changes) fiber_->priority = memory_.draw(1u << 10);
    if (!changes && !woke_ && step_ % 64 != 0) return;
    woke_ = false;
    leave_fiber();
  } else if (memory_.draw(stays_) == 0) {
    leave_fiber();
  }
}

void Machine::block(const char* what, const Origin& origin) {
  fiber_->is_blocked = true;
  fiber_->waits_for = what;
  fiber_->waits_at = origin;
  leave_fiber();
}
void Machine::wake(Fiber& fiber) {
  if (!fiber.is_blocked) return;
  fiber.is_blocked = false;
  woke_ = true;
  runnable_.push_back(&fiber);
}
void Machine::wake_all(std::vector<Fiber*>& fibers) {
  for (Fiber* fiber : fibers) wake(*fiber);
  fibers.clear();
}

// Groups.

const Place& Machine::place() const {
  return fiber_->place;
}
const Launch& Machine::launched() const {
  return *fiber_->launch;
}
std::byte* Machine::shared() const {
  return fiber_->block->shared;
}

void Machine::gather(Rendezvous& group) {
  group.arrived = 0;
  ++group.generation;
  group.joined = std::move(group.joining);
  group.joining = {};
  group.joined_seen = std::move(group.joining_seen);
  group.joining_seen = {};
  wake_all(group.waiting);
}
void Machine::meet(Rendezvous& group, Meeting meeting, const char* what, const Origin& origin) {
  if (meeting == Meeting::kOrders) group.joining.join(fiber_->view);
  const bool hands_on = meeting != Meeting::kNothing && settings_.profile.branches_order;
  if (hands_on) group.joining_seen.join(fiber_->seen);
  const uint32_t generation = group.generation;
  if (++group.arrived >= group.size) {
    gather(group);
  } else {
    for (Fiber* lane : group.lanes)
      if (lane->is_polling && lane->looks_together) wake(*lane);
    group.waiting.push_back(fiber_);
    while (group.generation == generation) block(what, origin);
  }
  if (meeting == Meeting::kOrders) fiber_->view.join(group.joined);
  if (hands_on) fiber_->seen.join(group.joined_seen);
}
// The others no longer wait for a lane that has ended.
void Machine::leave_group(Rendezvous& group) {
  if (--group.size != 0 && group.arrived >= group.size) gather(group);
}
void Machine::sync_block(Origin origin) {
  step();
  note(nullptr, 0, nullptr, false, origin);
  meet(fiber_->block->all, is_changed(origin, Change::kDropped) ? Meeting::kNothing : Meeting::kOrders,
       "the lanes of its block", origin);
}
void Machine::sync_warp(Origin origin) {
  step();
  note(nullptr, 0, nullptr, false, origin);
  meet(fiber_->block->warps[fiber_->place.warp],
       is_changed(origin, Change::kDropped) ? Meeting::kNothing : Meeting::kOrders, "the lanes of its warp",
       origin);
}
const uint64_t* Machine::exchange(uint64_t value) {
  step();
  Rendezvous& group = fiber_->block->warps[fiber_->place.warp];
  auto& values = group.values[group.generation & 1];
  values[fiber_->place.lane] = value;
  meet(group, Meeting::kVotes, "the lanes of its warp", {"shuffle or vote", {}, nullptr});
  return values.data();
}

// Whether any site is weakened so, and this is it. Sites are listed as runs come by them.
bool Machine::is_changed(const Origin& origin, Change change) {
  if (!settings_.mutant && !settings_.mutants) return false;
  const Mutant here{origin.spot.file_name(), origin.spot.line(), origin.spot.column(), origin.call, change};
  if (settings_.mutants) settings_.mutants->insert(here);
  return settings_.mutant && *settings_.mutant == here;
}

}  // namespace weft::weak
