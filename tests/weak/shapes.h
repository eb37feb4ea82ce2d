// SPDX-License-Identifier: Apache-2.0
//
// Litmus tests: small programs with outcomes that PTX's model allows or forbids. Their one list, for the weak machine
// (litmus.cc), which runs it step by step, and for GPUs (tests/gpu/litmus.cu), whose compiler makes a kernel of each.
// An outcome is what the registers 0 to 3 hold at the end, with a space between; 9: nothing was read; those at its end are
// left out.
#pragma once

#include <cstdint>

namespace weft::litmus {

// 16 aligned bytes each, zero at the start, of kOnes four words that are 1. Shared memory has kPoison.
enum Slot : uint8_t { kX, kY, kZ, kRow, kOther, kOnes, kSlots };
inline constexpr uint32_t kNotRead = 9, kPoison = 0xa5a5a5a5, kRegisters = 8, kOutcomeRegisters = 4;

enum class Act : uint8_t {
  kEnd,
  kStore,            // 8 bytes of `slot` := value
  kLoad,             // register := 8 bytes of `slot`
  kAdd,              // register := what was in 8 bytes of `slot`, which grow by value
  kFence,            // acq_rel
  kFenceSequential,  // of the system
  kStopUnless,       // the thread ends unless its register has the value
  kStoreRow,         // four weak words := value
  kLoadRow,          // register := the first of four weak words
  kStoreLine,        // as kernels store and load lines; registers 0 and 1 := the first and the last word
  kLoadLine,
  kStoreStage,  // the same for 16 bytes of shared memory
  kLoadStage,
  kBulkStore,  // slot := stage, a group of its own
  kBulkLoad,   // stage := slot, on the thread's barrier
  kInitBarrier,
  kWaitLoaded,  // phase `value` of the barrier
  kWaitRead,    // until at most `value` groups may still read
  kWaitWritten,
  kFenceAsync,
  kFenceAsyncShared,
  kSyncWarp,
  kVote,  // register := that of the first lane
};
enum class Kind : uint8_t { kWeak, kRelaxed, kAcquire, kRelease };
enum class Reach : uint8_t { kBlock, kGpu, kSystem };
enum class Lanes : uint8_t { kAll, kFirst, kOther };

struct Step {
  Act act = Act::kEnd;
  Slot slot = kX;
  uint8_t reg = 7;
  uint8_t value = 0;
  Kind kind = Kind::kWeak;
  Reach reach = Reach::kSystem;
  Lanes lanes = Lanes::kAll;
};
struct At {
  uint32_t rank, block, lanes = 1;
};
inline constexpr uint32_t kHostRank = ~0u;
inline constexpr uint32_t kMostSteps = 16, kMostThreads = 4;
struct Thread {
  At at{};
  Step steps[kMostSteps] = {};

  constexpr uint32_t size() const {
    uint32_t count = 0;
    while (count < kMostSteps && steps[count].act != Act::kEnd) ++count;
    return count;
  }
};

enum class Races { kIgnored, kMustReport, kMustNot };

struct Shape {
  const char* name;
  Thread threads[kMostThreads];
  const char* sees;   // outcomes that the machine must show, with '|' between
  const char* never;  // ... and must not
  Races races = Races::kIgnored;
  bool on_h200 = true, on_ptx = true;  // profiles of the machine that have this verdict
  const char* gap = "";                // outcomes that PTX allows, and the machine never shows
  bool on_gpu = true;

  constexpr uint32_t size() const {
    uint32_t count = 0;
    while (count < kMostThreads && threads[count].size() != 0) ++count;
    return count;
  }
};

// Words of the list.
inline constexpr At kHere{0, 0}, kNeighbour{0, 1}, kThird{0, 2}, kPeer{1, 0}, kPeer2{2, 0}, kPeer3{3, 0},
    kHostThread{kHostRank, 0}, kTwoLanes{0, 0, 2};
inline constexpr Kind kWeak = Kind::kWeak, kRelaxed = Kind::kRelaxed, kAcquire = Kind::kAcquire,
                      kRelease = Kind::kRelease;
inline constexpr Reach kBlock = Reach::kBlock, kGpu = Reach::kGpu, kSystem = Reach::kSystem;

template <class... Steps>
constexpr Thread thread(At at, Steps... steps) {
  return {at, {steps...}};
}
constexpr Step store(Slot slot, Kind kind, Reach reach = kSystem, uint8_t value = 1) {
  return {Act::kStore, slot, 7, value, kind, reach};
}
constexpr Step load(uint8_t reg, Slot slot, Kind kind, Reach reach = kSystem) {
  return {Act::kLoad, slot, reg, 0, kind, reach};
}
constexpr Step add(uint8_t reg, Slot slot, Kind kind, Reach reach) {
  return {Act::kAdd, slot, reg, 1, kind, reach};
}
constexpr Step fence(Reach reach) {
  return {Act::kFence, kX, 7, 0, kWeak, reach};
}
constexpr Step stop_unless(uint8_t reg, uint8_t value) {
  return {Act::kStopUnless, kX, reg, value};
}
constexpr Step of_slot(Act act, Slot slot, uint8_t reg = 7, uint8_t value = 0) {
  return {act, slot, reg, value};
}
constexpr Step store_row(Slot slot) {
  return of_slot(Act::kStoreRow, slot, 7, 1);
}
constexpr Step load_row(uint8_t reg, Slot slot) {
  return of_slot(Act::kLoadRow, slot, reg);
}
constexpr Step store_stage(uint8_t value) {
  return of_slot(Act::kStoreStage, kX, 7, value);
}
constexpr Step load_stage(uint8_t reg) {
  return of_slot(Act::kLoadStage, kX, reg);
}
constexpr Step wait(Act act, uint8_t value) {
  return of_slot(act, kX, 7, value);
}
constexpr Step only(Lanes lanes, Step step) {
  step.lanes = lanes;
  return step;
}
inline constexpr Step kSequential{Act::kFenceSequential}, kProxyFence{Act::kFenceAsync},
    kSharedProxyFence{Act::kFenceAsyncShared}, kInit{Act::kInitBarrier}, kSync{Act::kSyncWarp};

// Message passing: x is the data, y the flag.
constexpr Shape passing(const char* name, At writer, At reader, Kind data, Kind stored, Reach of_store,
                        Kind loaded, Reach of_load, const char* sees, const char* never) {
  return {name,
          {thread(writer, store(kX, data), store(kY, stored, of_store)),
           thread(reader, load(0, kY, loaded, of_load), load(1, kX, data))},
          sees,
          never};
}
constexpr Shape behind_fences(const char* name, At writer, At reader, Reach of_writer, Reach of_reader,
                              const char* sees, const char* never) {
  return {name,
          {thread(writer, store(kX, kWeak), fence(of_writer), store(kY, kRelaxed)),
           thread(reader, load(0, kY, kRelaxed), fence(of_reader), load(1, kX, kWeak))},
          sees,
          never};
}
// Store buffering, and independent reads of independent writes, with a step between.
constexpr Shape buffering(const char* name, Step between, const char* sees, const char* never) {
  return {name,
          {thread(kHere, store(kX, kRelease), between, load(0, kY, kAcquire)),
           thread(kPeer, store(kY, kRelease), between, load(1, kX, kAcquire))},
          sees,
          never};
}
constexpr Shape independent(const char* name, Step between, const char* sees, const char* never) {
  return {name,
          {thread(kHere, store(kX, kRelease)), thread(kPeer, store(kY, kRelease)),
           thread(kPeer2, load(0, kX, kAcquire), between, load(1, kY, kAcquire)),
           thread(kPeer3, load(2, kY, kAcquire), between, load(3, kX, kAcquire))},
          sees,
          never};
}
inline constexpr Step kNothing = stop_unless(6, kNotRead);
constexpr Shape load_buffering(const char* name, Kind loaded, Kind stored, const char* never,
                               const char* gap) {
  return {name,
          {thread(kHere, load(0, kX, loaded), store(kY, stored)),
           thread(kPeer, load(1, kY, loaded), store(kX, stored))},
          "0 0|0 1",
          never,
          Races::kIgnored,
          true,
          true,
          gap};
}
// A stage in shared memory is written, and a bulk copy stores it to the row; a flag follows.
constexpr Thread bulk_stored(Step before, Step waits, Step behind) {
  return thread(kHere, store_stage(1), before, of_slot(Act::kBulkStore, kRow), waits, behind,
                store(kY, kRelease));
}
inline constexpr Thread kLooksAtRow = thread(kPeer, load(0, kY, kAcquire), load_row(1, kRow));
// A peer's row is acquired, and then loaded by a bulk copy.
constexpr Thread bulk_loaded(Step between, bool waits) {
  const Step wait_loaded = wait(Act::kWaitLoaded, 0);
  return thread(kHere, store_stage(0), kInit, kSharedProxyFence, load(0, kY, kAcquire), between,
                of_slot(Act::kBulkLoad, kRow), waits ? wait_loaded : kNothing, load_stage(1),
                waits ? kNothing : wait_loaded);
}
inline constexpr Thread kStoresRow = thread(kPeer, store_row(kRow), store(kY, kRelease));
// DeepEP #621: lanes have read a stage, and one lets a bulk copy load over it.
constexpr Thread stage_used_again(Step of_readers) {
  return thread(kTwoLanes, only(Lanes::kFirst, kInit), only(Lanes::kFirst, kSharedProxyFence),
                only(Lanes::kFirst, of_slot(Act::kBulkLoad, kRow)), kSync, wait(Act::kWaitLoaded, 0),
                load_stage(0), of_readers, kSync, only(Lanes::kFirst, of_slot(Act::kBulkLoad, kOnes)),
                wait(Act::kWaitLoaded, 1));
}
// DeepEP #657: a load into the stage that a store may still read.
constexpr Thread stage_loaded_over(uint8_t pending) {
  return thread(kHere, kInit, kSharedProxyFence, of_slot(Act::kBulkLoad, kRow), wait(Act::kWaitLoaded, 0),
                of_slot(Act::kBulkStore, kOther), wait(Act::kWaitRead, pending),
                of_slot(Act::kBulkLoad, kOnes), wait(Act::kWaitLoaded, 1), wait(Act::kWaitWritten, 0),
                load_row(0, kOther));
}
// A slot is read, a credit says so, and the slot is written again.
constexpr Thread gives_credit(Kind kind) {
  return thread(kPeer, load_row(0, kRow), store(kY, kind));
}
inline constexpr Thread kTakesCredit =
    thread(kHere, load(4, kY, kAcquire), stop_unless(4, 1), store_row(kRow));
// One lane acquires; another loads after a vote, or after a sync.
constexpr Thread acquired_for_a_warp(Step behind) {
  return thread(kTwoLanes, only(Lanes::kFirst, load(4, kY, kAcquire)), of_slot(Act::kVote, kX, 4), behind,
                stop_unless(4, 1), only(Lanes::kOther, load_row(0, kRow)));
}
// Two words of a line that another thread stores.
inline constexpr Thread kStoresLine = thread(kHere, of_slot(Act::kStoreLine, kRow, 7, 1)),
                        kLoadsLine = thread(kPeer, of_slot(Act::kLoadLine, kRow));

inline constexpr Shape kShapes[] = {
    passing("MP weak", kHere, kNeighbour, kWeak, kWeak, kSystem, kWeak, kSystem, "1 0|1 1|0 0|0 1", ""),
    passing("MP relaxed", kHere, kPeer, kRelaxed, kRelaxed, kSystem, kRelaxed, kSystem, "1 0|1 1", ""),
    passing("MP release.sys acquire.sys", kHere, kPeer, kWeak, kRelease, kSystem, kAcquire, kSystem,
            "1 1|0 0", "1 0"),
    {"MP release.sys acquire.sys, no race",
     {thread(kHere, store(kX, kWeak), store(kY, kRelease)),
      thread(kPeer, load(4, kY, kAcquire), stop_unless(4, 1), load(0, kX, kWeak))},
     "1|9",
     "0",
     Races::kMustNot},
    {"MP relaxed, race",
     {thread(kHere, store(kX, kWeak), store(kY, kRelaxed)),
      thread(kPeer, load(4, kY, kAcquire), stop_unless(4, 1), load(0, kX, kWeak))},
     "",
     "",
     Races::kMustReport},
    {"MP release.sys, relaxed load",
     {thread(kHere, store(kX, kRelaxed), store(kY, kRelease)),
      thread(kPeer, load(0, kY, kRelaxed), load(1, kX, kRelaxed))},
     "1 0",
     "",
     Races::kIgnored,
     false},
    {"MP release.sys, relaxed load, branch",
     {thread(kHere, store(kX, kRelaxed), store(kY, kRelease)),
      thread(kPeer, load(0, kY, kRelaxed), stop_unless(0, 1), load(1, kX, kRelaxed))},
     "1 1|0",
     "1 0",
     Races::kIgnored,
     true,
     false},
    {"MP release.sys, relaxed load, branch, PTX alone",
     {thread(kHere, store(kX, kRelaxed), store(kY, kRelease)),
      thread(kPeer, load(0, kY, kRelaxed), stop_unless(0, 1), load(1, kX, kRelaxed))},
     "1 1|0|1 0",
     "",
     Races::kIgnored,
     false,
     true,
     "",
     false},
    {"MP release.sys, relaxed load, weak data",
     {thread(kHere, store(kX, kWeak), store(kY, kRelease)),
      thread(kPeer, load(0, kY, kRelaxed), load(1, kX, kWeak))},
     "1 0",
     ""},
    {"MP release.sys, relaxed load, branch, weak data",
     {thread(kHere, store(kX, kWeak), store(kY, kRelease)),
      thread(kPeer, load(0, kY, kRelaxed), stop_unless(0, 1), load(1, kX, kWeak))},
     "1 0|1 1",
     ""},
    passing("MP release.gpu acquire.gpu, blocks of a GPU", kHere, kNeighbour, kRelaxed, kRelease, kGpu,
            kAcquire, kGpu, "1 1", "1 0"),
    passing("MP release.gpu acquire.gpu, blocks of a GPU, weak data", kHere, kNeighbour, kWeak, kRelease,
            kGpu, kAcquire, kGpu, "1 1", "1 0"),
    passing("MP release.gpu acquire.gpu, two GPUs", kHere, kPeer, kRelaxed, kRelease, kGpu, kAcquire, kGpu,
            "1 0|1 1", ""),
    passing("MP release.sys acquire.gpu, two GPUs", kHere, kPeer, kWeak, kRelease, kSystem, kAcquire, kGpu,
            "1 0|1 1", ""),
    passing("MP release.gpu acquire.sys, two GPUs", kHere, kPeer, kRelaxed, kRelease, kGpu, kAcquire, kSystem,
            "1 0|1 1", ""),
    passing("MP release.cta acquire.cta, one block", kHere, kHere, kRelaxed, kRelease, kBlock, kAcquire,
            kBlock, "1 1", "1 0"),
    passing("MP release.cta acquire.cta, one block, weak data", kHere, kHere, kWeak, kRelease, kBlock,
            kAcquire, kBlock, "1 1", "1 0"),
    passing("MP release.cta acquire.cta, two blocks", kHere, kNeighbour, kRelaxed, kRelease, kBlock, kAcquire,
            kBlock, "1 0", ""),
    passing("MP release.cta acquire.gpu, two blocks", kHere, kNeighbour, kWeak, kRelease, kBlock, kAcquire,
            kGpu, "1 0", ""),
    passing("MP release.gpu acquire.cta, two blocks", kHere, kNeighbour, kWeak, kRelease, kGpu, kAcquire,
            kBlock, "1 0", ""),
    behind_fences("MP fences", kHere, kPeer, kSystem, kSystem, "1 1|0 0", "1 0"),
    behind_fences("MP fences.gpu, blocks of a GPU", kHere, kNeighbour, kGpu, kGpu, "1 1|0 0", "1 0"),
    behind_fences("MP fence.gpu, two GPUs", kHere, kPeer, kGpu, kSystem, "1 0", ""),
    behind_fences("MP fence.cta, two blocks", kHere, kNeighbour, kBlock, kGpu, "1 0", ""),
    {"MP by a third thread, cta then sys",
     {thread(kHere, store(kX, kWeak), store(kZ, kRelease, kBlock)),
      thread(kHere, load(4, kZ, kAcquire, kBlock), stop_unless(4, 1), store(kY, kRelease)),
      thread(kPeer, load(0, kY, kAcquire), load(1, kX, kWeak))},
     "1 1|0 0",
     "1 0"},
    {"MP by a chain of atomics",
     {thread(kHere, store(kX, kWeak), add(7, kY, kRelease, kSystem)),
      thread(kNeighbour, load(4, kY, kRelaxed), stop_unless(4, 1), add(7, kY, kRelaxed, kGpu)),
      thread(kThird, load(0, kY, kAcquire), load(1, kX, kWeak))},
     "2 1|0 0",
     "1 0|2 0"},
    {"atomics lose nothing",
     {thread(kHere, add(0, kX, kRelaxed, kGpu)), thread(kNeighbour, add(1, kX, kRelaxed, kGpu))},
     "0 1|1 0",
     "0 0|1 1"},
    buffering("SB", kNothing, "0 0|1 1", ""),
    buffering("SB, fence.acq_rel", fence(kSystem), "0 0", ""),
    buffering("SB, fence.sc", kSequential, "1 1|0 1", "0 0"),
    independent("IRIW acquire", kNothing, "1 0 1 0", ""),
    independent("IRIW, fence.sc", kSequential, "1 1 1 1", "1 0 1 0"),
    load_buffering("LB", kRelaxed, kRelaxed, "1 1", "1 1"),
    load_buffering("LB weak", kWeak, kWeak, "1 1", "1 1"),
    load_buffering("LB acquire, release", kAcquire, kRelease, "1 1", ""),
    {"coherence of reads",
     {thread(kHere, store(kX, kRelaxed), store(kX, kRelaxed, kSystem, 2)),
      thread(kPeer, load(0, kX, kRelaxed), load(1, kX, kRelaxed))},
     "1 2|0 2|0 1",
     "2 1|2 0|1 0"},
    {"coherence of reads, the second is weak",
     {thread(kHere, store(kX, kRelaxed), store(kX, kRelaxed, kSystem, 2)),
      thread(kPeer, load(0, kX, kRelaxed), load(1, kX, kWeak))},
     "1 2|0 2|0 1",
     "2 1|2 0|1 0"},
    {"coherence of weak reads",
     {thread(kHere, store(kX, kWeak), store(kX, kWeak, kSystem, 2)),
      thread(kPeer, load(0, kX, kWeak), load(1, kX, kWeak))},
     "1 2|0 2|0 1",
     "",
     Races::kIgnored,
     true,
     true,
     "2 1|2 0|1 0"},
    {"coherence of reads in two threads",
     {thread(kHere, store(kX, kRelaxed)), thread(kPeer, load(0, kX, kRelaxed), store(kY, kRelease)),
      thread(kPeer2, load(1, kY, kAcquire), load(2, kX, kRelaxed))},
     "1 1 1|0 1 0",
     "1 1 0"},
    {"own writes are read", {thread(kHere, store(kX, kWeak), load(0, kX, kWeak))}, "1", "0"},
    {"a line is whole", {kStoresLine, kLoadsLine}, "0 0|1 1", "1 0|0 1", Races::kIgnored, true, false},
    {"a line is torn", {kStoresLine, kLoadsLine}, "1 0|0 1", "", Races::kIgnored, false, true, "", false},
    passing("host to GPU", kHostThread, kHere, kWeak, kRelease, kSystem, kAcquire, kSystem, "1 1", "1 0"),
    passing("host to GPU, acquire.gpu", kHostThread, kHere, kWeak, kRelease, kSystem, kAcquire, kGpu, "1 0",
            ""),
    passing("GPU to host", kHere, kHostThread, kWeak, kRelease, kSystem, kAcquire, kSystem, "1 1", "1 0"),
    passing("GPU to host, release.gpu", kHere, kHostThread, kWeak, kRelease, kGpu, kAcquire, kSystem, "1 0",
            ""),
    behind_fences("GPU to host, fence", kHere, kHostThread, kSystem, kSystem, "1 1|0 0", "1 0"),
    {"SB with a host, fence.sc",
     {thread(kHere, store(kX, kRelaxed), kSequential, load(0, kY, kRelaxed)),
      thread(kHostThread, store(kY, kRelaxed), kSequential, load(1, kX, kRelaxed))},
     "1 1|0 1",
     "0 0"},
    passing("NIC with relaxed ordering", kHostThread, kHere, kWeak, kRelaxed, kSystem, kAcquire, kSystem,
            "1 0", ""),
    {"bulk store, no proxy fence",
     {bulk_stored(kNothing, wait(Act::kWaitWritten, 0), kProxyFence), kLooksAtRow},
     "1 2779096485",
     ""},
    {"bulk store, source waited for alone",
     {bulk_stored(kSharedProxyFence, wait(Act::kWaitRead, 0), kNothing), kLooksAtRow},
     "1 0",
     ""},
    {"bulk store",
     {bulk_stored(kSharedProxyFence, wait(Act::kWaitWritten, 0), kProxyFence), kLooksAtRow},
     "1 1|0 0",
     "1 0|1 2779096485"},
    {"bulk store, no proxy fence behind it",
     {bulk_stored(kSharedProxyFence, wait(Act::kWaitWritten, 0), kNothing), kLooksAtRow},
     "1 1|0 0",
     "1 0|1 2779096485"},
    {"bulk load, no proxy fence", {bulk_loaded(kNothing, true), kStoresRow}, "1 0", ""},
    {"bulk load, not waited for", {bulk_loaded(kProxyFence, false), kStoresRow}, "1 0|1 1", ""},
    {"bulk load", {bulk_loaded(kProxyFence, true), kStoresRow}, "1 1|0 0|0 1", "1 0"},
    {"bulk load of a bulk store",
     {bulk_loaded(kProxyFence, true),
      thread(kPeer, store_stage(1), kSharedProxyFence, of_slot(Act::kBulkStore, kRow),
             wait(Act::kWaitWritten, 0), kProxyFence, store(kY, kRelease))},
     "1 1|0 0",
     "1 0"},
    {"stage used again", {stage_used_again(kSharedProxyFence)}, "0", "1", Races::kMustNot},
    {"stage used again, no fence of its readers", {stage_used_again(kNothing)}, "", "", Races::kMustReport},
    {"stage loaded over", {stage_loaded_over(0)}, "0", "1", Races::kMustNot},
    {"stage loaded over, newest store not waited for", {stage_loaded_over(1)}, "", "", Races::kMustReport},
    {"credit released", {gives_credit(kRelease), kTakesCredit}, "0", "1", Races::kMustNot},
    {"credit relaxed", {gives_credit(kRelaxed), kTakesCredit}, "", "", Races::kMustReport},
    {"acquired for a warp, sync", {acquired_for_a_warp(kSync), kStoresRow}, "1|9", "0", Races::kMustNot},
    {"acquired for a warp, vote", {acquired_for_a_warp(kNothing), kStoresRow}, "", "", Races::kMustReport},
    // On a GPU the copy might never end.
    {"barrier without a proxy fence",
     {thread(kHere, kInit, of_slot(Act::kBulkLoad, kRow), wait(Act::kWaitLoaded, 0))},
     "",
     "",
     Races::kMustReport,
     true,
     true,
     "",
     false},
};
inline constexpr uint32_t kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);

}  // namespace weft::litmus
