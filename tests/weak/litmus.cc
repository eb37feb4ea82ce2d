// SPDX-License-Identifier: Apache-2.0
#include "weak/litmus.h"

#include <cstdio>
#include <cstring>
#include <map>

#include "kernels/target/target.h"
#include "weak/shapes.h"

namespace weft::weak {
namespace {

using litmus::Act;
using litmus::kNotRead;
using litmus::Lanes;
using litmus::Shape;
using litmus::Step;

struct alignas(128) Slot {
  Vec16 vec;
};
constexpr Vec16 row_of(uint32_t value) {
  return {{value, value, value, value}};
}

// One run of a shape: its memory, and what its threads read.
struct Test {
  Machine& machine;
  Slot slots[litmus::kSlots] = {};
  uint64_t read[litmus::kRegisters];

  Test(Machine& of, const Shape& shape) : machine(of) {
    constexpr const char* kNames[] = {"x", "y", "z", "row", "other", "ones"};
    slots[litmus::kOnes].vec = row_of(1);
    for (uint64_t& value : read) value = kNotRead;
    for (uint32_t s = 0; s < litmus::kSlots; ++s) machine.memory().share(kNames[s], &slots[s], sizeof(Slot));
    for (uint32_t t = 0; t < shape.size(); ++t) {
      const litmus::Thread& thread = shape.threads[t];
      machine.launch(t, {.name = "litmus",
                         .rank = thread.at.rank,
                         .first_block = thread.at.block,
                         .lanes = thread.at.lanes,
                         .shared_bytes = 256,
                         .body = [this, &thread] { run(thread); }});
    }
  }
  void run(const litmus::Thread& thread);
  void take(const Step& step, uint64_t* registers);
  void take_bulk(const Step& step, uint64_t* registers);

  uint64_t* word(const Step& step) { return reinterpret_cast<uint64_t*>(&slots[step.slot]); }
  std::byte* row(const Step& step) { return reinterpret_cast<std::byte*>(&slots[step.slot]); }
  std::byte* stage() const { return machine.shared() + 128; }
  uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(machine.shared()); }
};
static_assert(litmus::kHostRank == kHost);

Order order_of(const Step& step) {
  return {.is_strong = step.kind != litmus::Kind::kWeak,
          .scope = static_cast<Scope>(step.reach),
          .acquires = step.kind == litmus::Kind::kAcquire,
          .releases = step.kind == litmus::Kind::kRelease};
}

void Test::run(const litmus::Thread& thread) {
  uint64_t registers[litmus::kRegisters];
  for (uint64_t& value : registers) value = kNotRead;
  const bool is_first = machine.place().lane == 0;
  for (uint32_t s = 0; s < thread.size(); ++s) {
    const Step& step = thread.steps[s];
    if (step.lanes != Lanes::kAll && (step.lanes == Lanes::kFirst) != is_first) continue;
    if (step.act == Act::kStopUnless && registers[step.reg] != step.value) return;
    take(step, registers);
    if (registers[step.reg] != kNotRead) read[step.reg] = registers[step.reg];
    if (step.act == Act::kLoadLine) std::memcpy(read, registers, 2 * sizeof(uint64_t));
  }
}

void Test::take(const Step& step, uint64_t* registers) {
  const Order order = order_of(step);
  uint64_t& value = registers[step.reg];
  auto* const vec = reinterpret_cast<Vec16*>(row(step));
  switch (step.act) {
    case Act::kStore:
      if (order.is_strong)
        stored(word(step), uint64_t{step.value}, order, "store", Spot::current());
      else
        *static_cast<volatile uint64_t*>(word(step)) = step.value;
      return;
    case Act::kLoad:
      value = order.is_strong ? loaded(word(step), order, "load", Spot::current())
                              : *static_cast<volatile uint64_t*>(word(step));
      return;
    case Act::kAdd:
      value =
          updated(word(step), order, "add", Spot::current(), [&](uint64_t was) { return was + step.value; });
      return;
    case Act::kFence:
      return machine.fence(order.scope, {"fence", Spot::current(), nullptr});
    case Act::kFenceSequential:
      return machine.fence_sequential({"fence.sc", Spot::current(), nullptr});
    case Act::kStoreRow:
      return store_vec(vec, row_of(step.value));
    case Act::kLoadRow:
      value = load_vec(vec).words[0];
      return;
    case Act::kStoreLine:
      return store_line(vec, row_of(step.value));
    case Act::kLoadLine: {
      const Vec16 line = load_line(vec);
      registers[0] = line.words[0];
      registers[1] = line.words[3];
      return;
    }
    case Act::kSyncWarp:
      return machine.sync_warp({});
    case Act::kVote:
      value = machine.exchange(value)[0];
      return;
    default:
      take_bulk(step, registers);
  }
}

void Test::take_bulk(const Step& step, uint64_t* registers) {
  switch (step.act) {
    case Act::kStoreStage:
      return store_vec(reinterpret_cast<Vec16*>(stage()), row_of(step.value));
    case Act::kLoadStage:
      registers[step.reg] = load_vec(reinterpret_cast<Vec16*>(stage())).words[0];
      return;
    case Act::kBulkStore:
      bulk::store(row(step), stage(), 16);
      return bulk::commit();
    case Act::kBulkLoad:
      return bulk::load(stage(), row(step), 16, barrier());
    case Act::kInitBarrier:
      return bulk::barrier_init(barrier());
    case Act::kWaitLoaded:
      return bulk::wait_loaded(barrier(), step.value);
    case Act::kWaitRead:
    case Act::kWaitWritten:
      return machine.wait_groups(step.value, step.act == Act::kWaitRead, {"wait", Spot::current(), nullptr});
    case Act::kFenceAsync:
      return bulk::fence_async();
    case Act::kFenceAsyncShared:
      return bulk::fence_async_shared();
    default:
      return;
  }
}

std::string outcome_of(const Test& test) {
  uint32_t used = litmus::kOutcomeRegisters;
  while (used > 1 && test.read[used - 1] == kNotRead) --used;
  std::string outcome;
  for (uint32_t i = 0; i < used; ++i) outcome += (i ? " " : "") + std::to_string(test.read[i]);
  return outcome;
}
std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t from = 0; from < list.size();) {
    const size_t end = std::min(list.find('|', from), list.size());
    parts.push_back(list.substr(from, end - from));
    from = end + 1;
  }
  return parts;
}

struct Seen {
  std::map<std::string, uint64_t> outcomes;
  uint64_t reports = 0;
  std::string first_report;
};

Seen runs_of(const Shape& shape, const Profile& profile, uint64_t seeds) {
  Seen seen;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    Machine machine(
        {.seed = seed, .profile = profile, .finds_races = shape.races != litmus::Races::kIgnored});
    const Test test(machine, shape);
    if (machine.run()) {
      ++seen.outcomes[outcome_of(test)];
    } else if (seen.reports++ == 0) {
      seen.first_report = "seed " + std::to_string(seed) + ": " + machine.report();
    }
  }
  return seen;
}

// What is wrong with a shape's runs; empty: nothing.
std::string verdict(const Shape& shape, const Seen& seen) {
  const bool must_report = shape.races == litmus::Races::kMustReport;
  std::string wrong = must_report ? "" : seen.first_report;
  for (const auto& outcome : split(shape.sees))
    if (!seen.outcomes.count(outcome)) wrong += " not seen: " + outcome + ";";
  for (const auto& outcome : split(shape.never))
    if (seen.outcomes.count(outcome)) wrong += " seen: " + outcome + ";";
  if (must_report && seen.reports == 0) wrong += " no report;";
  return wrong;
}

}  // namespace

uint32_t run_litmus(const std::string& part, uint64_t seeds) {
  uint32_t failures = 0;
  for (const Shape& shape : litmus::kShapes)
    for (const bool is_h200 : {true, false}) {
      if (std::string(shape.name).find(part) == std::string::npos) continue;
      if (is_h200 ? !shape.on_h200 : !shape.on_ptx) continue;
      const Seen seen = runs_of(shape, is_h200 ? kH200 : kPtx, seeds);
      const std::string wrong = verdict(shape, seen);
      failures += wrong.empty() ? 0 : 1;
      std::printf("%-5s %-4s %-50s", wrong.empty() ? "ok" : "WRONG", is_h200 ? "h200" : "ptx", shape.name);
      for (const auto& [outcome, count] : seen.outcomes)
        std::printf(" [%s] %llu", outcome.c_str(), static_cast<unsigned long long>(count));
      if (seen.reports) std::printf(" reported %llu", static_cast<unsigned long long>(seen.reports));
      std::printf("%s%s\n", wrong.empty() ? "" : "\n      ", wrong.c_str());
    }
  return failures;
}

void print_allowed(uint64_t seeds) {
  std::printf("{");
  for (const Shape& shape : litmus::kShapes) {
    const Seen seen = runs_of(shape, shape.on_h200 ? kH200 : kPtx, seeds);
    std::printf("%s\n \"%s\": {\"races\": %s, \"on_gpu\": %s, \"allowed\": [",
                &shape == litmus::kShapes ? "" : ",", shape.name,
                shape.races == litmus::Races::kMustReport ? "true" : "false",
                shape.on_gpu ? "true" : "false");
    const char* comma = "";
    for (const auto& [outcome, count] : seen.outcomes) {
      std::printf("%s\"%s\"", comma, outcome.c_str());
      comma = ", ";
    }
    std::printf("], \"gaps\": [");
    comma = "";
    for (const auto& outcome : split(shape.gap)) {
      std::printf("%s\"%s\"", comma, outcome.c_str());
      comma = ", ";
    }
    std::printf("]}");
  }
  std::printf("\n}\n");
}

}  // namespace weft::weak
