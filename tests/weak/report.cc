// SPDX-License-Identifier: Apache-2.0
//
// What a failed run says: the word, what its load could have seen, what was missing, and what led there.
#include <cstring>

#include "weak/machine.h"

namespace weft::weak {
namespace {

constexpr size_t kMostEvents = 1 << 16;
constexpr size_t kPrintedEvents = 40;

std::string hex(uint64_t value) {
  char text[32];
  snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}
// The part of a path below the checkout.
std::string short_path(const char* file) {
  const std::string path = file;
  for (const char* top : {"kernels/", "src/", "tests/"})
    if (const size_t at = path.rfind(top); at != std::string::npos) return path.substr(at);
  return path;
}

}  // namespace

const char* name_of(Change change) {
  switch (change) {
    case Change::kRelaxed:
      return "made relaxed";
    case Change::kGpuScope:
      return "of gpu scope";
    case Change::kBlockScope:
      return "of block scope";
    case Change::kDropped:
      return "dropped";
    case Change::kSourcesOnly:
      return "waits for sources only";
    case Change::kOneMore:
      return "waits for one group less";
  }
  return "?";
}
std::string text_of(const Mutant& mutant) {
  return short_path(mutant.file.c_str()) + ":" + std::to_string(mutant.line) + " " + mutant.call + ": " +
         name_of(mutant.change);
}

std::string Machine::text_of(const Place& place) const {
  if (place.rank == kHost) return "host thread " + std::to_string(place.block);
  return "rank " + std::to_string(place.rank) + " block " + std::to_string(place.block) + " warp " +
         std::to_string(place.warp) + " lane " + std::to_string(place.lane);
}
// An instruction of a plain access stands in braces: tools/weak-order makes its line of that.
std::string Machine::text_of(const Origin& origin) const {
  std::string text = origin.call;
  if (origin.spot.line() != 0)
    text += " at " + short_path(origin.spot.file_name()) + ":" + std::to_string(origin.spot.line());
  if (origin.code) text += " at {" + hex(reinterpret_cast<uintptr_t>(origin.code)) + "}";
  return text;
}
std::string Machine::text_of(const Write* write) const {
  if (!write) return "what was there before the run";
  return std::string(write->proxy == kGeneric ? "" : "bulk copy of ") + text_of(write->place) + ", step " +
         std::to_string(write->step) + ", " + text_of(write->origin);
}
std::string Machine::word_of(const void* at) {
  Region* const region = memory_.region_of(at);
  if (!region) return hex(reinterpret_cast<uintptr_t>(at));
  return region->name + " + " + hex(static_cast<uint64_t>(static_cast<const std::byte*>(at) - region->base));
}

std::string Machine::newest_of(const void* at) {
  Region* const region = memory_.region_of(at);
  if (!region) return "";
  const Message& newest =
      memory_.cell_of(*region, static_cast<uint64_t>(static_cast<const std::byte*>(at) - region->base))
          .history.back();
  return ": " + hex(newest.bytes) + " of " + text_of(newest.write);
}

// What would have put another agent's access before this one.
std::string Machine::why_unordered(uint32_t agent, uint32_t time, Proxy proxy, const Access& access) const {
  if (access.view->of[kGeneric].of(agent) >= time)
    return "a proxy fence: threads know it, the engine of bulk copies need not (fence_async, "
           "fence_async_shared)";
  if (proxy != kGeneric && access.view->of[kGeneric].of(agent) == 1)
    return "wait_written: the copy's source was waited for, not what it wrote";
  if (proxy != kGeneric) {
    bool is_known = false;
    for (const auto& fiber : fibers_) is_known = is_known || fiber->view.of[kGeneric].of(agent) >= time;
    if (!is_known) return "a wait for the bulk copy: no lane has waited for it";
  }
  std::string text;
  uint32_t found = 0;
  for (const Miss& miss : misses_) {
    if (miss.write->knew->of[kGeneric].of(agent) < time || found == 4) continue;
    if (miss.reader.rank != access.place.rank || miss.reader.block != access.place.block) continue;
    ++found;
    text += "\n    " + text_of(miss.origin) + " in " + text_of(miss.reader) + " read\n      " +
            text_of(miss.write) + "\n      and orders nothing: " + miss.why;
  }
  if (found) return "one of these, as a release and an acquire that reach each other:" + text;
  return "a release after it that this lane acquires, or a sync of its group: there is none";
}

void Machine::race(const Race& race) {
  machine().on_race(race);
}
void Machine::on_race(const Race& race) {
  if (failed_) return;
  const Access& access = *race.access;
  const bool reads_before = !race.write;
  std::string text = std::string("race: ") + (race.is_write ? "a write" : "a load") +
                     " is in no order with an earlier " + (reads_before ? "load" : "write") + " of " +
                     word_of(race.at);
  text += "\n  now: " + std::string(access.proxy == kGeneric ? "" : "bulk copy of ") + text_of(access.place) +
          ", step " + std::to_string(step_) + ", " + text_of(access.origin);
  if (race.write) {
    text += "\n  earlier: " + text_of(race.write);
    text += "\n  would order them: " +
            why_unordered(race.write->agent, race.write->time, race.write->proxy, access);
  } else {
    const Read& read = *race.read;
    text += "\n  earlier: " + std::string(read.proxy == kGeneric ? "" : "bulk copy of ") +
            text_of(read.place) + ", " + text_of(read.origin);
    text += "\n  would order them: " + why_unordered(read.agent, read.time, read.proxy, access);
  }
  Region* const region = memory_.region_of(race.at);
  const Cell& cell = memory_.cell_of(*region, static_cast<uint64_t>(race.at - region->base));
  const uint64_t floor = memory_.floor_of(access, cell);
  text += "\n  writes that it could see:";
  for (uint64_t i = floor; i < cell.end(); ++i)
    text += "\n    " + hex(cell.at(i).bytes) + " of " + text_of(cell.at(i).write);
  fail(text + events_of(race.at, access.place, race.write ? race.write->place : race.read->place));
}

void Machine::note(const void* at, uint32_t bytes, const void* value, bool is_write, const Origin& origin) {
  if (!settings_.keeps_events) return;
  uint64_t bits = 0;
  if (value) std::memcpy(&bits, value, std::min<uint32_t>(bytes, 8));
  if (events_.size() >= kMostEvents) events_.pop_front();
  events_.push_back(
      {step_, fiber_->place, origin, at, bytes, bits, is_write, is_write || !at ? 0 : memory_.newer()});
}

// The last steps of the word, and of the two lanes whatever orders memory.
std::string Machine::events_of(const void* at, const Place& one, const Place& other) {
  if (events_.empty()) return "";
  std::vector<const Event*> chosen;
  for (auto event = events_.rbegin(); event != events_.rend() && chosen.size() < kPrintedEvents; ++event) {
    const auto* first = static_cast<const std::byte*>(event->at);
    const bool is_near = first && first <= at && at < first + std::max(event->bytes, 1u);
    const bool is_ordering = !event->origin.code && event->origin.spot.line() != 0;
    if (is_near || (is_ordering && (event->place == one || event->place == other))) chosen.push_back(&*event);
  }
  std::string text = "\n  what led there:";
  for (auto event = chosen.rbegin(); event != chosen.rend(); ++event) {
    const Event& e = **event;
    text += "\n    " + std::to_string(e.step) + " " + text_of(e.place) + " " + text_of(e.origin);
    if (!e.at) continue;
    text += ": " + word_of(e.at);
    if (e.bytes) text += std::string(e.is_write ? " := " : " = ") + hex(e.value);
    if (e.newer) text += ", though " + std::to_string(e.newer) + " newer";
  }
  return text;
}

bool Machine::read_at_end(const void* at, uint64_t bytes, void* out) {
  View all;
  for (auto& [number, stream] : streams_) all.join(stream.view);
  const uint32_t agent = new_agent();
  const Access access{.agent = agent,
                      .time = 1,
                      .place = {kHost, 0, 0, 0},
                      .view = &all,
                      .origin = {"host, after the run", {}, nullptr}};
  Region* const region = memory_.region_of(at);
  if (!region) {
    std::memcpy(out, at, bytes);
    return true;
  }
  memory_.read(access, *region, static_cast<const std::byte*>(at), bytes, static_cast<std::byte*>(out),
               nullptr);
  return !failed_;
}

void Machine::fail(const std::string& what) {
  if (!failed_) {
    failed_ = true;
    report_ = what;
    if (fiber_) report_ += "\n  in kernel " + std::string(fiber_->launch->name);
  }
  while (fiber_) leave_fiber();  // never comes back
}

}  // namespace weft::weak
