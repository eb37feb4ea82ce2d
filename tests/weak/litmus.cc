// SPDX-License-Identifier: Apache-2.0
#include "weak/litmus.h"

#include <cstdio>
#include <cstring>
#include <map>

#include "kernels/target/target.h"

namespace weft::weak {
namespace {

struct alignas(128) Word {
  uint64_t value;
};
struct alignas(128) Row {
  Vec16 vec;
};

// One run of a shape: words that are zero, and what its threads read.
struct Test {
  Machine& machine;
  Word x, y, z;
  Row row, other;
  uint64_t read[4] = {9, 9, 9, 9};
  uint32_t threads = 0;

  explicit Test(Machine& of) : machine(of) {
    std::memset(&x, 0, sizeof(x) * 3);
    std::memset(&row, 0, sizeof(row) * 2);
    machine.memory().share("x", &x, sizeof(x));
    machine.memory().share("y", &y, sizeof(y));
    machine.memory().share("z", &z, sizeof(z));
    machine.memory().share("row", &row, sizeof(row));
    machine.memory().share("other", &other, sizeof(other));
  }
  void thread(uint32_t rank, uint32_t block, std::function<void()> body, uint32_t lanes = 1) {
    machine.launch(threads++, {"litmus", rank, block, 1, 1, lanes, 256, std::move(body)});
  }
};

// Accesses that the target does not have by themselves.
void weak_store(uint64_t* at, uint64_t value) {
  *static_cast<volatile uint64_t*>(at) = value;
}
uint64_t weak_load(const uint64_t* at) {
  return *static_cast<const volatile uint64_t*>(at);
}
void strong_store(Word& at, uint64_t value, Order order, Spot spot = Spot::current()) {
  stored(&at.value, value, order, "store", spot);
}
uint64_t strong_load(const Word& at, Order order, Spot spot = Spot::current()) {
  return loaded(&at.value, order, "load", spot);
}
void fence(Scope scope, Spot spot = Spot::current()) {
  machine().fence(scope, {"fence", spot, nullptr});
}
void fence_sequential(Spot spot = Spot::current()) {
  machine().fence_sequential({"fence.sc", spot, nullptr});
}
uint64_t first_of(const Vec16& vec) {
  return vec.words[0];
}
constexpr Vec16 kOnes{{1, 1, 1, 1}};

enum class Races { kIgnored, kMustReport, kMustNot };

struct Shape {
  const char* name;
  std::function<void(Test&)> make;
  std::vector<std::string> sees, never;  // what is read, one number for each that is used
  Races races = Races::kIgnored;
  bool on_h200 = true, on_ptx = true;
};

// Message passing: x is the data, y the flag. Threads at (rank, block).
struct At {
  uint32_t rank, block;
};
std::function<void(Test&)> passing(At writer, At reader, Order store, Order load, bool weak_data = false) {
  return [=](Test& t) {
    t.thread(writer.rank, writer.block, [=, &t] {
      weak_data ? weak_store(&t.x.value, 1) : strong_store(t.x, 1, kRelaxed);
      strong_store(t.y, 1, store);
    });
    t.thread(reader.rank, reader.block, [=, &t] {
      t.read[0] = strong_load(t.y, load);
      t.read[1] = weak_data ? weak_load(&t.x.value) : strong_load(t.x, kRelaxed);
    });
  };
}
constexpr At kHere{0, 0}, kNeighbour{0, 1}, kPeer{1, 0}, kHostThread{kHost, 0};
constexpr Order kReleaseGpu = of_gpu(kRelease), kAcquireGpu = of_gpu(kAcquire),
                kReleaseBlock = of_block(kRelease), kAcquireBlock = of_block(kAcquire);

std::function<void(Test&)> buffering(std::function<void()> between) {
  return [=](Test& t) {
    t.thread(0, 0, [=, &t] {
      strong_store(t.x, 1, kRelease);
      between();
      t.read[0] = strong_load(t.y, kAcquire);
    });
    t.thread(1, 0, [=, &t] {
      strong_store(t.y, 1, kRelease);
      between();
      t.read[1] = strong_load(t.x, kAcquire);
    });
  };
}
// Independent reads of independent writes.
std::function<void(Test&)> independent(std::function<void()> between) {
  return [=](Test& t) {
    t.thread(0, 0, [=, &t] { strong_store(t.x, 1, kRelease); });
    t.thread(1, 0, [=, &t] { strong_store(t.y, 1, kRelease); });
    t.thread(2, 0, [=, &t] {
      t.read[0] = strong_load(t.x, kAcquire);
      between();
      t.read[1] = strong_load(t.y, kAcquire);
    });
    t.thread(3, 0, [=, &t] {
      t.read[2] = strong_load(t.y, kAcquire);
      between();
      t.read[3] = strong_load(t.x, kAcquire);
    });
  };
}
void nothing() {}

// A stage in shared memory is written, and a bulk copy stores it to `row`; a flag follows.
std::function<void(Test&)> bulk_store_of(bool fence_first, bool waits_written) {
  return [=](Test& t) {
    t.thread(0, 0, [=, &t] {
      auto* stage = reinterpret_cast<Vec16*>(machine().shared());
      store_vec(stage, kOnes);
      if (fence_first) bulk::fence_async_shared();
      bulk::store(reinterpret_cast<std::byte*>(&t.row.vec), reinterpret_cast<std::byte*>(stage), 16);
      bulk::commit();
      if (waits_written)
        bulk::wait_written<0>();
      else
        bulk::wait_read<0>();
      store_release(&t.y.value, uint64_t{1});
    });
    t.thread(1, 0, [=, &t] {
      t.read[0] = load_acquire(&t.y.value);
      t.read[1] = first_of(load_vec(&t.row.vec));
    });
  };
}
// A peer's row is acquired, and then loaded by a bulk copy.
std::function<void(Test&)> bulk_load_of(bool fence_between, bool waits) {
  return [=](Test& t) {
    t.thread(1, 0, [=, &t] {
      store_vec(&t.row.vec, kOnes);
      store_release(&t.y.value, uint64_t{1});
    });
    t.thread(0, 0, [=, &t] {
      auto* barrier = reinterpret_cast<uint64_t*>(machine().shared());
      auto* stage = reinterpret_cast<Vec16*>(machine().shared() + 128);
      store_vec(stage, {});
      bulk::barrier_init(barrier);
      bulk::fence_async_shared();
      t.read[0] = load_acquire(&t.y.value);
      if (fence_between) bulk::fence_async();
      bulk::load(reinterpret_cast<std::byte*>(stage), reinterpret_cast<std::byte*>(&t.row.vec), 16, barrier);
      if (waits) bulk::wait_loaded(barrier, 0);
      t.read[1] = first_of(load_vec(stage));
      if (!waits) bulk::wait_loaded(barrier, 0);
    });
  };
}
// DeepEP #621: lanes have read a stage, and one lets a bulk copy load over it.
std::function<void(Test&)> stage_used_again(bool fence_of_readers) {
  return [=](Test& t) {
    t.thread(
        0, 0,
        [=, &t] {
          auto* barrier = reinterpret_cast<uint64_t*>(machine().shared());
          auto* stage = machine().shared() + 128;
          const auto* row = reinterpret_cast<const std::byte*>(&t.row.vec);
          const bool is_first = machine().place().lane == 0;
          if (is_first) {
            bulk::barrier_init(barrier);
            bulk::fence_async_shared();
            bulk::load(stage, row, 16, barrier);
          }
          machine().sync_warp({});
          bulk::wait_loaded(barrier, 0);
          load_vec(reinterpret_cast<Vec16*>(stage));
          if (fence_of_readers) bulk::fence_async_shared();
          machine().sync_warp({});
          if (is_first) bulk::load(stage, row, 16, barrier);
          bulk::wait_loaded(barrier, 1);
        },
        2);
  };
}
// DeepEP #657: a load into the stage that a store may still read.
std::function<void(Test&)> stage_loaded_over(bool waits_for_newest) {
  return [=](Test& t) {
    t.thread(0, 0, [=, &t] {
      auto* barrier = reinterpret_cast<uint64_t*>(machine().shared());
      auto* stage = machine().shared() + 128;
      auto* row = reinterpret_cast<std::byte*>(&t.row.vec);
      bulk::barrier_init(barrier);
      bulk::fence_async_shared();
      bulk::load(stage, row, 16, barrier);
      bulk::wait_loaded(barrier, 0);
      bulk::store(reinterpret_cast<std::byte*>(&t.other.vec), stage, 16);
      bulk::commit();
      if (waits_for_newest)
        bulk::wait_read<0>();
      else
        bulk::wait_read<1>();
      bulk::load(stage, row, 16, barrier);
      bulk::wait_loaded(barrier, 1);
      bulk::wait_read<0>();
    });
  };
}
// A slot is read, a credit says so, and the slot is written again.
std::function<void(Test&)> credit(Order store) {
  return [=](Test& t) {
    t.thread(1, 0, [=, &t] {
      load_vec(&t.row.vec);
      strong_store(t.y, 1, store);
    });
    t.thread(0, 0, [=, &t] {
      if (load_acquire(&t.y.value) == 1) store_vec(&t.row.vec, kOnes);
    });
  };
}
// One lane acquires; another loads after a vote, or after a sync.
std::function<void(Test&)> acquired_for_a_warp(bool syncs) {
  return [=](Test& t) {
    t.thread(1, 0, [=, &t] {
      store_vec(&t.row.vec, kOnes);
      store_release(&t.y.value, uint64_t{1});
    });
    t.thread(
        0, 0,
        [=, &t] {
          const bool is_first = machine().place().lane == 0;
          const uint64_t seen = machine().exchange(is_first ? load_acquire(&t.y.value) : 0)[0];
          if (syncs) machine().sync_warp({});
          if (seen == 1 && !is_first) load_vec(&t.row.vec);
        },
        2);
  };
}

// A message behind fences of its writer's `scope`.
std::function<void(Test&)> passing_by_fences(Scope scope) {
  return [=](Test& t) {
    t.thread(0, 0, [=, &t] {
      weak_store(&t.x.value, 1);
      fence(scope);
      strong_store(t.y, 1, kRelaxed);
    });
    t.thread(1, 0, [&t] {
      t.read[0] = strong_load(t.y, kRelaxed);
      fence(Scope::kSystem);
      t.read[1] = weak_load(&t.x.value);
    });
  };
}

// Two words of a line that another thread stores.
void look_at_line(Test& t) {
  t.thread(0, 0, [&t] { store_line(&t.row.vec, kOnes); });
  t.thread(1, 0, [&t] {
    const Vec16 v = load_line(&t.row.vec);
    t.read[0] = v.words[0];
    t.read[1] = v.words[3];
  });
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"MP weak",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           weak_store(&t.x.value, 1);
           weak_store(&t.y.value, 1);
         });
         t.thread(0, 1, [&t] {
           t.read[0] = weak_load(&t.y.value);
           t.read[1] = weak_load(&t.x.value);
         });
       },
       {"1 0", "1 1", "0 0", "0 1"},
       {}},
      {"MP relaxed", passing(kHere, kPeer, kRelaxed, kRelaxed), {"1 0", "1 1"}, {}},
      {"MP release.sys acquire.sys",
       passing(kHere, kPeer, kRelease, kAcquire, true),
       {"1 1", "0 0"},
       {"1 0"}},
      {"MP release.sys acquire.sys, no race",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           weak_store(&t.x.value, 1);
           store_release(&t.y.value, uint64_t{1});
         });
         t.thread(1, 0, [&t] {
           if (load_acquire(&t.y.value) == 1) t.read[0] = weak_load(&t.x.value);
         });
       },
       {"1", "9"},
       {"0"},
       Races::kMustNot},
      {"MP relaxed, race",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           weak_store(&t.x.value, 1);
           store_relaxed(&t.y.value, uint64_t{1});
         });
         t.thread(1, 0, [&t] {
           if (load_acquire(&t.y.value) == 1) t.read[0] = weak_load(&t.x.value);
         });
       },
       {},
       {},
       Races::kMustReport},
      {"MP release.sys, relaxed load",
       passing(kHere, kPeer, kRelease, kRelaxed),
       {"1 0"},
       {},
       Races::kIgnored,
       false},
      {"MP release.sys, relaxed load, branch",
       passing(kHere, kPeer, kRelease, kRelaxed),
       {"1 1"},
       {"1 0"},
       Races::kIgnored,
       true,
       false},
      {"MP release.sys, relaxed load, weak data",
       passing(kHere, kPeer, kRelease, kRelaxed, true),
       {"1 0"},
       {}},
      {"MP release.gpu acquire.gpu, blocks of a GPU",
       passing(kHere, kNeighbour, kReleaseGpu, kAcquireGpu),
       {"1 1"},
       {"1 0"}},
      {"MP release.gpu acquire.gpu, two GPUs",
       passing(kHere, kPeer, kReleaseGpu, kAcquireGpu),
       {"1 0", "1 1"},
       {}},
      {"MP release.sys acquire.gpu, two GPUs",
       passing(kHere, kPeer, kRelease, kAcquireGpu, true),
       {"1 0", "1 1"},
       {}},
      {"MP release.gpu acquire.sys, two GPUs",
       passing(kHere, kPeer, kReleaseGpu, kAcquire),
       {"1 0", "1 1"},
       {}},
      {"MP release.cta acquire.cta, one block",
       passing(kHere, kHere, kReleaseBlock, kAcquireBlock),
       {"1 1"},
       {"1 0"}},
      {"MP release.cta acquire.cta, two blocks",
       passing(kHere, kNeighbour, kReleaseBlock, kAcquireBlock),
       {"1 0"},
       {}},
      {"MP fences", passing_by_fences(Scope::kSystem), {"1 1", "0 0"}, {"1 0"}},
      {"MP fence.gpu, two GPUs", passing_by_fences(Scope::kGpu), {"1 0"}, {}},
      {"MP by a third thread, cta then sys",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           weak_store(&t.x.value, 1);
           strong_store(t.z, 1, kReleaseBlock);
         });
         t.thread(0, 0, [&t] {
           if (strong_load(t.z, kAcquireBlock) == 1) strong_store(t.y, 1, kRelease);
         });
         t.thread(1, 0, [&t] {
           t.read[0] = strong_load(t.y, kAcquire);
           t.read[1] = weak_load(&t.x.value);
         });
       },
       {"1 1", "0 0"},
       {"1 0"}},
      {"MP by a chain of atomics",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           weak_store(&t.x.value, 1);
           add_release(&t.y.value, uint64_t{1});
         });
         t.thread(0, 1, [&t] {
           if (load_relaxed(&t.y.value) == 1) add_local(&t.y.value, uint64_t{1});
         });
         t.thread(0, 2, [&t] {
           t.read[0] = load_acquire(&t.y.value);
           t.read[1] = weak_load(&t.x.value);
         });
       },
       {"2 1", "0 0"},
       {"1 0", "2 0"}},
      {"atomics lose nothing",
       [](Test& t) {
         t.thread(0, 0, [&t] { t.read[0] = add_local(&t.x.value, uint64_t{1}); });
         t.thread(0, 1, [&t] { t.read[1] = add_local(&t.x.value, uint64_t{1}); });
       },
       {"0 1", "1 0"},
       {"0 0", "1 1"}},
      {"SB", buffering(nothing), {"0 0", "1 1"}, {}},
      {"SB, fence.acq_rel", buffering([] { fence(Scope::kSystem); }), {"0 0"}, {}},
      {"SB, fence.sc", buffering([] { fence_sequential(); }), {"1 1", "0 1"}, {"0 0"}},
      {"IRIW acquire", independent(nothing), {"1 0 1 0"}, {}},
      {"IRIW, fence.sc", independent([] { fence_sequential(); }), {"1 1 1 1"}, {"1 0 1 0"}},
      {"LB: a known gap, never here",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           t.read[0] = strong_load(t.x, kRelaxed);
           strong_store(t.y, 1, kRelaxed);
         });
         t.thread(1, 0, [&t] {
           t.read[1] = strong_load(t.y, kRelaxed);
           strong_store(t.x, 1, kRelaxed);
         });
       },
       {"0 0", "0 1"},
       {"1 1"}},
      {"coherence of reads",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           strong_store(t.x, 1, kRelaxed);
           strong_store(t.x, 2, kRelaxed);
         });
         t.thread(1, 0, [&t] {
           t.read[0] = strong_load(t.x, kRelaxed);
           t.read[1] = strong_load(t.x, kRelaxed);
         });
       },
       {"1 2", "0 2", "0 1"},
       {"2 1", "2 0", "1 0"}},
      {"coherence of reads in two threads",
       [](Test& t) {
         t.thread(0, 0, [&t] { strong_store(t.x, 1, kRelaxed); });
         t.thread(1, 0, [&t] {
           t.read[0] = strong_load(t.x, kRelaxed);
           strong_store(t.y, 1, kRelease);
         });
         t.thread(2, 0, [&t] {
           t.read[1] = strong_load(t.y, kAcquire);
           t.read[2] = strong_load(t.x, kRelaxed);
         });
       },
       {"1 1 1", "0 1 0"},
       {"1 1 0"}},
      {"own writes are read",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           weak_store(&t.x.value, 1);
           t.read[0] = weak_load(&t.x.value);
         });
       },
       {"1"},
       {"0"}},
      {"a line is whole", look_at_line, {"0 0", "1 1"}, {"1 0", "0 1"}, Races::kIgnored, true, false},
      {"a line is torn", look_at_line, {"1 0", "0 1"}, {}, Races::kIgnored, false, true},
      {"host to GPU", passing(kHostThread, kHere, kRelease, kAcquire, true), {"1 1"}, {"1 0"}},
      {"host to GPU, acquire.gpu", passing(kHostThread, kHere, kRelease, kAcquireGpu, true), {"1 0"}, {}},
      {"NIC with relaxed ordering", passing(kHostThread, kHere, kRelaxed, kAcquire, true), {"1 0"}, {}},
      {"bulk store, no proxy fence", bulk_store_of(false, true), {"1 2779096485"}, {}},
      {"bulk store, source waited for alone", bulk_store_of(true, false), {"1 0"}, {}},
      {"bulk store", bulk_store_of(true, true), {"1 1", "0 0"}, {"1 0", "1 2779096485"}},
      {"bulk load, no proxy fence", bulk_load_of(false, true), {"1 0"}, {}},
      {"bulk load, not waited for", bulk_load_of(true, false), {"1 0", "1 1"}, {}},
      {"bulk load", bulk_load_of(true, true), {"1 1", "0 0", "0 1"}, {"1 0"}},
      {"stage used again", stage_used_again(true), {}, {}, Races::kMustNot},
      {"stage used again, no fence of its readers", stage_used_again(false), {}, {}, Races::kMustReport},
      {"stage loaded over", stage_loaded_over(true), {}, {}, Races::kMustNot},
      {"stage loaded over, newest store not waited for",
       stage_loaded_over(false),
       {},
       {},
       Races::kMustReport},
      {"credit released", credit(kRelease), {}, {}, Races::kMustNot},
      {"credit relaxed", credit(kRelaxed), {}, {}, Races::kMustReport},
      {"acquired for a warp, sync", acquired_for_a_warp(true), {}, {}, Races::kMustNot},
      {"acquired for a warp, vote", acquired_for_a_warp(false), {}, {}, Races::kMustReport},
      {"barrier without a proxy fence",
       [](Test& t) {
         t.thread(0, 0, [&t] {
           auto* barrier = reinterpret_cast<uint64_t*>(machine().shared());
           bulk::barrier_init(barrier);
           bulk::load(machine().shared() + 128, reinterpret_cast<std::byte*>(&t.row.vec), 16, barrier);
           bulk::wait_loaded(barrier, 0);
         });
       },
       {},
       {},
       Races::kMustReport},
  };
  return all;
}

// Runs one shape under one profile. Returns what is wrong; empty: nothing.
std::string verdict(const Shape& shape, const Profile& profile, uint64_t seeds,
                    std::map<std::string, uint64_t>& seen, uint64_t& reports) {
  std::string wrong;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    Machine machine({.seed = seed, .profile = profile, .finds_races = shape.races != Races::kIgnored});
    Test test(machine);
    shape.make(test);
    if (!machine.run()) {
      ++reports;
      if (shape.races != Races::kMustReport && wrong.empty())
        wrong = "seed " + std::to_string(seed) + ": " + machine.report();
      continue;
    }
    uint32_t used = 4;
    while (used > 1 && test.read[used - 1] == 9) --used;
    std::string outcome;
    for (uint32_t i = 0; i < used; ++i) outcome += (i ? " " : "") + std::to_string(test.read[i]);
    ++seen[outcome];
  }
  for (const auto& outcome : shape.sees)
    if (!seen.count(outcome)) wrong += " not seen: " + outcome + ";";
  for (const auto& outcome : shape.never)
    if (seen.count(outcome)) wrong += " seen: " + outcome + ";";
  if (shape.races == Races::kMustReport && reports == 0) wrong += " no report;";
  return wrong;
}

}  // namespace

uint32_t run_litmus(const std::string& part, uint64_t seeds) {
  uint32_t failures = 0;
  for (const Shape& shape : shapes())
    for (const bool is_h200 : {true, false}) {
      if (std::string(shape.name).find(part) == std::string::npos) continue;
      if (is_h200 ? !shape.on_h200 : !shape.on_ptx) continue;
      std::map<std::string, uint64_t> seen;
      uint64_t reports = 0;
      const std::string wrong = verdict(shape, is_h200 ? kH200 : kPtx, seeds, seen, reports);
      failures += wrong.empty() ? 0 : 1;
      std::printf("%-5s %-4s %-50s", wrong.empty() ? "ok" : "WRONG", is_h200 ? "h200" : "ptx", shape.name);
      for (const auto& [outcome, count] : seen)
        std::printf(" [%s] %llu", outcome.c_str(), static_cast<unsigned long long>(count));
      if (reports) std::printf(" reported %llu", static_cast<unsigned long long>(reports));
      std::printf("%s%s\n", wrong.empty() ? "" : "\n      ", wrong.c_str());
    }
  return failures;
}

}  // namespace weft::weak
