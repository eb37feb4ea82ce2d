// SPDX-License-Identifier: Apache-2.0
//
// Accesses of lanes: what they read, learn and publish.
#include <cstring>

#include "weak/machine.h"

namespace weft::weak {
namespace {

uint32_t index_of(Scope scope) {
  return static_cast<uint32_t>(scope);
}
// A lane that loads one word so often, and nothing else between, lets others run, and sees the newest write then.
constexpr uint32_t kLooksThatWait = 3;
constexpr size_t kMostPolled = 32;  // words that a loop looks at
// What was in memory when the hook of the last plain store ran.
thread_local std::vector<std::byte> plain_before;
const std::byte* word_at(const void* at) {
  return reinterpret_cast<const std::byte*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3});
}

}  // namespace

Access Machine::access_of(Fiber& fiber, bool is_strong, Scope scope, uint32_t whole, const Origin& origin,
                          bool is_store) {
  const uint32_t time = ++times_[fiber.agent];
  fiber.view.of[kGeneric].advance(fiber.agent, time);
  return {.agent = fiber.agent,
          .time = time,
          .is_strong = is_strong,
          .scope = scope,
          .whole = whole,
          .place = fiber.place,
          .view = &fiber.view,
          .also = (is_strong || is_store) && settings_.profile.branches_order ? &fiber.seen : nullptr,
          .origin = origin};
}

void Machine::load(const void* at, uint32_t bytes, void* out, Order order, Origin origin) {
  // GCC calls the hook of an assignment's store before that of its load: that store has not run yet. Nobody may run between.
  const bool is_of_store = origin.code && fiber_ && fiber_->plain && fiber_->plain_bytes >= bytes &&
                           std::memcmp(fiber_->plain, plain_before.data(), fiber_->plain_bytes) == 0;
  if (fiber_ && !is_of_store) take_plain_store();
  Region* region = fiber_ ? memory_.region_of(at) : nullptr;
  if (!region) {
    std::memcpy(out, at, bytes);
    return;
  }
  if (!is_of_store) step();
  region = memory_.region_of(at);
  Fiber& fiber = *fiber_;
  Access access = access_of(fiber, order.is_strong, order.scope, order.whole, origin);
  const std::byte* const word = word_at(at);
  access.is_fresh = std::find(fiber.fresh.begin(), fiber.fresh.end(), word) != fiber.fresh.end();
  std::vector<const Write*> from;
  memory_.read(access, *region, static_cast<const std::byte*>(at), bytes, static_cast<std::byte*>(out),
               &from);
  note(at, bytes, out, false, origin);
  if (order.is_strong)
    for (const Write* write : from) learn(fiber, write, order, origin);
  if (!order.is_strong) return;
  fiber.looks_together = false;
  note_polled(fiber, word);
  fiber.agains = fiber.again == word ? fiber.agains + 1 : 0;
  fiber.again = word;
  if (fiber.agains < kLooksThatWait) return;
  fiber.fresh.push_back(word);
  fiber.priority = memory_.draw(1u << 10);
  leave_fiber();
}

void Machine::note_polled(Fiber& fiber, const std::byte* word) {
  if (fiber.polled.size() == kMostPolled) fiber.polled.erase(fiber.polled.begin());  // long before this loop
  fiber.polled.push_back(word);
}

// What a strong load learns of a write.
void Machine::learn(Fiber& fiber, const Write* write, const Order& order, const Origin& origin) {
  if (!write->is_strong || !write->knew) return;
  const Scope needed = scope_between(fiber.place, write->place);
  const auto& released = write->released[index_of(needed)];
  const char* why = nullptr;
  if (order.scope < needed)
    why = "the load's scope does not reach the writer";
  else if (write->scope < needed)
    why = "the store's scope does not reach the reader";
  else if (!released)
    why = "the store publishes nothing: it is relaxed, or its scope or its fence's does not reach the reader";
  else if (!order.acquires)
    why = "the load is relaxed, and no fence followed it";
  if (why && write->agent != fiber.agent) {
    if (misses_.size() >= 512) misses_.erase(misses_.begin(), misses_.begin() + 256);
    misses_.push_back({write, fiber.place, origin, why});
  }
  if (!released || order.scope < needed || write->scope < needed) return;
  fiber.seen.join(released->of[kGeneric]);
  if (order.acquires)
    fiber.view.join(*released);
  else
    for (uint32_t scope = index_of(needed); scope < 3; ++scope) fiber.pending[scope].join(*released);
}

// A write of this lane, with what it publishes.
Write* Machine::written(Fiber& fiber, const Order& order, const Origin& origin) {
  Write* const write = memory_.make_write();
  *write = {.agent = fiber.agent,
            .time = times_[fiber.agent],
            .step = step_,
            .proxy = kGeneric,
            .is_strong = order.is_strong,
            .scope = order.scope,
            .place = fiber.place,
            .origin = origin,
            .knew = nullptr,
            .released = {}};
  if (!order.is_strong) return write;
  write->knew = std::make_shared<const View>(fiber.view);
  for (uint32_t scope = 0; scope < 3; ++scope)
    write->released[scope] =
        order.releases && scope <= index_of(order.scope) ? write->knew : fiber.fenced[scope];
  return write;
}

void Machine::store(void* at, uint32_t bytes, const void* in, Order order, Origin origin) {
  if (fiber_) take_plain_store();
  Region* region = fiber_ ? memory_.region_of(at) : nullptr;
  if (!region) {
    std::memcpy(at, in, bytes);
    return;
  }
  step();
  region = memory_.region_of(at);
  const Access access = access_of(*fiber_, order.is_strong, order.scope, order.whole, origin, true);
  auto* const to = static_cast<std::byte*>(at);
  memory_.write(access, *region, to, bytes, static_cast<const std::byte*>(in),
                written(*fiber_, order, origin));
  note(at, bytes, in, true, origin);
  wake_readers(to, bytes);
}

uint64_t Machine::update(void* at, uint32_t bytes, Order order, Origin origin,
                         const std::function<uint64_t(uint64_t)>& next) {
  step();
  Region* const region = memory_.region_of(at);
  if (!region) {
    fail("an atomic operation on memory that is not shared: " + text_of(origin));
    return 0;
  }
  Fiber& fiber = *fiber_;
  Access access = access_of(fiber, true, order.scope, bytes, origin);
  access.is_fresh = true;
  std::byte old_bytes[8] = {};
  auto* const to = static_cast<std::byte*>(at);
  const Write* old = nullptr;
  memory_.newest(*region, to, bytes, &old);
  memory_.read(access, *region, to, bytes, old_bytes, nullptr);
  note(at, bytes, old_bytes, false, origin);
  if (old) learn(fiber, old, order, origin);
  uint64_t was = 0;
  std::memcpy(&was, old_bytes, 8);
  const uint64_t value = next(was);
  Write* const write = written(fiber, order, origin);
  // A chain of atomic operations hands on what its first write published.
  for (uint32_t scope = 0; old && scope < 3; ++scope) {
    if (!old->released[scope]) continue;
    auto both = std::make_shared<View>(*old->released[scope]);
    if (write->released[scope]) both->join(*write->released[scope]);
    write->released[scope] = std::move(both);
  }
  memory_.write(access, *region, to, bytes, reinterpret_cast<const std::byte*>(&value), write);
  note(at, bytes, &value, true, origin);
  wake_readers(to, bytes);
  return was;
}

void Machine::take_line(void* at, void* part, bool is_store, Origin origin) {
  struct Part {
    void* at;
    void* bytes;
  } mine{at, part};
  constexpr uint32_t kParts = 8, kPartBytes = 16;
  const uint64_t* const parts = exchange(reinterpret_cast<uintptr_t>(&mine));
  const uint32_t first = fiber_->place.lane / kParts * kParts;
  if (fiber_->place.lane == first) {
    std::byte line[kParts * kPartBytes];
    const auto part_of = [&](uint32_t i) { return *reinterpret_cast<const Part*>(parts[first + i]); };
    for (uint32_t i = 0; i < kParts; ++i) {
      if (part_of(i).at != static_cast<std::byte*>(at) + i * kPartBytes ||
          reinterpret_cast<uintptr_t>(at) % sizeof(line))
        fail("lanes take parts of a line that are not side by side: " + text_of(origin));
      std::memcpy(line + i * kPartBytes, part_of(i).bytes, kPartBytes);
    }
    const Order order{.is_strong = true,
                      .whole = settings_.profile.lines_are_atomic ? uint32_t{sizeof(line)} : 4};
    if (is_store)
      store(at, sizeof(line), line, order, origin);
    else
      load(at, sizeof(line), line, order, origin);
    for (uint32_t i = 0; i < kParts && !is_store; ++i)
      std::memcpy(part_of(i).bytes, line + i * kPartBytes, kPartBytes);
  }
  exchange(0);  // all have their parts
  fiber_->looks_together = !is_store;
  if (!is_store && fiber_->place.lane != first)
    note_polled(*fiber_, static_cast<const std::byte*>(at) - (fiber_->place.lane - first) * kPartBytes);
}

void Machine::fence(Scope scope, Origin origin) {
  step();
  if (is_changed(origin, Change::kDropped)) return;
  if (scope == Scope::kSystem && is_changed(origin, Change::kGpuScope)) scope = Scope::kGpu;
  Fiber& fiber = *fiber_;
  note(nullptr, 0, nullptr, false, origin);
  fiber.view.join(fiber.pending[index_of(scope)]);
  access_of(fiber, true, scope, 4, origin);  // a step of its own
  const auto published = std::make_shared<const View>(fiber.view);
  for (uint32_t s = 0; s <= index_of(scope); ++s) fiber.fenced[s] = published;
}
// One order of all such fences, each of which knows what those before it knew.
void Machine::fence_sequential(Origin origin) {
  fence(Scope::kSystem, origin);
  fiber_->view.join(sequential_);
  sequential_.join(fiber_->view);
  const auto published = std::make_shared<const View>(fiber_->view);
  fiber_->fenced.fill(published);
}
void Machine::fence_async(bool shared_only, Origin origin) {
  step();
  if (is_changed(origin, Change::kDropped)) return;
  note(nullptr, 0, nullptr, false, origin);
  View& view = fiber_->view;
  view.of[kAsyncShared].join(view.of[kGeneric]);
  if (shared_only) return;
  view.of[kAsyncGlobal].join(view.of[kGeneric]);
  if (settings_.profile.branches_order) view.of[kAsyncGlobal].join(fiber_->seen);
}

// The hook runs before the instruction that stores: what it stored is read when the lane comes here again. No other runs
// between.
void Machine::plain_store_follows(void* at, uint64_t bytes, const void* code) {
  take_plain_store();
  if (!memory_.region_of(at)) return;
  step();
  Region* const region = memory_.region_of(at);
  for (uint64_t i = 0; i < bytes + 3; i += 4)  // words that nobody has touched are as they were
    if (auto offset =
            static_cast<uint64_t>(static_cast<std::byte*>(at) - region->base) + std::min(i, bytes - 1);
        offset < region->bytes)
      memory_.cell_of(*region, offset);
  fiber_->plain = static_cast<std::byte*>(at);
  fiber_->plain_bytes = bytes;
  plain_before.assign(fiber_->plain, fiber_->plain + bytes);
  fiber_->plain_code = code;
}
void Machine::take_plain_store() {
  Fiber& fiber = *fiber_;
  if (!fiber.plain) return;
  std::byte* const at = fiber.plain;
  fiber.plain = nullptr;
  const Origin origin{"plain store", {}, fiber.plain_code};
  Region* const region = memory_.region_of(at);
  const Access access = access_of(fiber, false, Scope::kSystem, 4, origin, true);
  memory_.write(access, *region, at, fiber.plain_bytes, at, written(fiber, {}, origin));
  note(at, static_cast<uint32_t>(fiber.plain_bytes), at, true, origin);
  wake_readers(at, fiber.plain_bytes);
}

// A loop that waits sees the newest writes in the end: at once where it saw older ones, else when there is a newer one.
void Machine::pause() {
  take_plain_store();
  ++step_;
  Fiber& fiber = *fiber_;
  fiber.agains = 0;
  fiber.fresh.clear();
  bool has_newer = fiber.polled.empty();
  for (const std::byte* word : fiber.polled) {
    fiber.fresh.push_back(word);
    Region* const region = memory_.region_of(word);
    if (!region) continue;
    const Cell& cell = memory_.cell_of(*region, static_cast<uint64_t>(word - region->base));
    uint64_t read = 0;
    bool has_read = false;  // else its neighbour has, which takes their line
    for (const Read& other : cell.reads) {
      if (other.agent != fiber.agent) continue;
      has_read = true;
      read = std::max(read, other.index);
    }
    has_newer = has_newer || (has_read && read + 1 != cell.end());
  }
  if (!has_newer)
    for (const std::byte* word : fiber.polled) sleepers_[word].push_back(&fiber);
  fiber.polled.clear();
  // Where a warp looks together a lane that has something to say must not wait for others that sleep.
  const bool is_awaited = fiber.looks_together && fiber.block->warps[fiber.place.warp].arrived != 0;
  if (has_newer || is_awaited) return leave_fiber();
  fiber.is_polling = true;
  block("a write of a word that it polls:", {"", {}, nullptr});
  fiber.is_polling = fiber.looks_together = false;
}
void Machine::wake_readers(const std::byte* at, uint64_t bytes) {
  if (sleepers_.empty()) return;
  for (const std::byte* word = word_at(at); word < at + bytes; word += 4) {
    const auto found = sleepers_.find(word);
    if (found == sleepers_.end()) continue;
    wake_all(found->second);
    sleepers_.erase(found);
  }
}

}  // namespace weft::weak
