// SPDX-License-Identifier: Apache-2.0
//
// litmus.cu: the litmus tests of tests/weak/shapes.h on one GPU. What it shows, tests/weak must allow.
//   nvcc -O2 -std=c++20 --expt-relaxed-constexpr -arch=sm_90 -Itests tests/gpu/litmus.cu -o /tmp/litmus
//   /tmp/litmus [seconds] [part of a name]
// Prints JSON: for each shape how often it ran, and its outcomes with their counts. test_litmus_gpu.py judges them.
//
// Each thread of a shape is a thread of some block; the ranks of a shape are blocks of this GPU. A block plays one such place
// for many instances at once, round after round, each in memory that nobody has touched since the launch. By the launch:
// which blocks play together, how instances are dealt to threads, how words lie, what is in L1 before, how long warps wait
// before they begin, and how many other blocks do nothing but load memory. Where a shape has a host's thread, its words lie
// in pinned memory, and a thread of this process plays it.
// All waits are bounded: an alarm ends the process 30 s after its time.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "weak/shapes.h"

namespace weft::litmus {
namespace {

#define CHECK(call)                                                        \
  do {                                                                     \
    cudaError_t status = (call);                                           \
    if (status != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status)); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

constexpr uint32_t kThreads = 256, kSlotBytes = 16, kMostPlaces = 4;
constexpr uint32_t kGateNs = 100'000;  // a block waits so long for those that it plays with, and then begins
constexpr uint64_t kHostNs = 2'000'000'000;  // ... for the host
constexpr uint32_t kBystanderNs = 50'000'000;
constexpr uint64_t kDeviceBytes = 768 << 20, kPinnedBytes = 48 << 20, kLoadBytes = 128 << 20;
constexpr uint32_t kHistogram = 1 << 16, kMostRounds = 48, kHostBlocks = 4, kDone = 16;

// The blocks of a shape: each has the threads of one place. A host's thread is in none.
struct Plan {
  uint32_t places = 0;
  uint32_t place_of[kMostThreads] = {};
  uint32_t first_of[kMostThreads] = {};  // thread of the block, in units of an instance's lanes
  uint32_t instances = kThreads;         // of a block
  bool has_host = false;
};
constexpr Plan plan_of(const Shape& shape) {
  Plan plan;
  uint32_t lanes[kMostPlaces] = {};
  for (uint32_t t = 0; t < shape.size(); ++t) {
    plan.place_of[t] = kMostPlaces;
    if (shape.threads[t].at.rank == kHostRank) {
      plan.has_host = true;
      continue;
    }
    plan.place_of[t] = plan.places;
    for (uint32_t other = 0; other < t; ++other)
      if (shape.threads[other].at.rank == shape.threads[t].at.rank &&
          shape.threads[other].at.block == shape.threads[t].at.block)
        plan.place_of[t] = plan.place_of[other];
    if (plan.place_of[t] == plan.places) ++plan.places;
    plan.first_of[t] = lanes[plan.place_of[t]];
    lanes[plan.place_of[t]] += shape.threads[t].at.lanes;
  }
  for (const uint32_t used : lanes)
    while (plan.instances * used > kThreads) plan.instances /= 2;
  return plan;
}

constexpr bool has_barrier(const Thread& thread) {
  for (uint32_t s = 0; s < thread.size(); ++s)
    if (thread.steps[s].act == Act::kInitBarrier) return true;
  return false;
}

struct Args {
  std::byte* memory;
  uint64_t round_bytes, instance_bytes, slot_bytes;
  uint8_t* results;       // [rounds, instances, kOutcomeRegisters]
  const uint32_t* roles;  // of each block: its group and place; those that are too many are bystanders
  uint32_t* gates;        // [rounds, groups]
  uint32_t* finished;     // blocks that are through
  uint4* load;
  uint64_t load_vecs;
  const uint64_t* go;  // pinned; null: no host's thread
  uint64_t* done;      // pinned: rounds of each block
  uint32_t groups, rounds, seed;
  uint32_t most_delay;  // cycles
  bool is_warm, is_shuffled;
};

__host__ __device__ constexpr uint32_t mixed(uint32_t a, uint32_t b) {
  uint32_t h = a * 0x9e3779b9u ^ b * 0x85ebca6bu;
  h = (h ^ h >> 15) * 0x2c1b3c6du;
  h = (h ^ h >> 12) * 0x297a2d39u;
  return h ^ h >> 15;
}
__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
  return ns;
}
__device__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// `name` with each scope.
#define WEFT_LOADS(kind, name)                                                         \
  if constexpr (kKind == kind && kReach == kBlock)                                     \
    asm volatile(name ".cta.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory"); \
  if constexpr (kKind == kind && kReach == kGpu)                                       \
    asm volatile(name ".gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory"); \
  if constexpr (kKind == kind && kReach == kSystem)                                    \
  asm volatile(name ".sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory")
#define WEFT_STORES(kind, name)                                                      \
  if constexpr (kKind == kind && kReach == kBlock)                                   \
    asm volatile(name ".cta.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory"); \
  if constexpr (kKind == kind && kReach == kGpu)                                     \
    asm volatile(name ".gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory"); \
  if constexpr (kKind == kind && kReach == kSystem)                                  \
  asm volatile(name ".sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory")
#define WEFT_ADDS(kind, name)                                                                        \
  if constexpr (kKind == kind && kReach == kGpu)                                                     \
    asm volatile(name ".gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(at), "l"(value) : "memory"); \
  if constexpr (kKind == kind && kReach == kSystem)                                                  \
  asm volatile(name ".sys.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(at), "l"(value) : "memory")

template <Kind kKind, Reach kReach>
__device__ uint64_t load_word(const std::byte* at) {
  uint64_t value = 0;
  if constexpr (kKind == kWeak) asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  WEFT_LOADS(kRelaxed, "ld.relaxed");
  WEFT_LOADS(kAcquire, "ld.acquire");
  return value;
}
template <Kind kKind, Reach kReach>
__device__ void store_word(std::byte* at, uint64_t value) {
  if constexpr (kKind == kWeak) asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
  WEFT_STORES(kRelaxed, "st.relaxed");
  WEFT_STORES(kRelease, "st.release");
}
template <Kind kKind, Reach kReach>
__device__ uint64_t add_word(std::byte* at, uint64_t value) {
  static_assert((kKind == kRelaxed || kKind == kRelease) && kReach != kBlock);
  uint64_t old = 0;
  WEFT_ADDS(kRelaxed, "atom.add.relaxed");
  WEFT_ADDS(kRelease, "atom.add.release");
  return old;
}
template <Reach kReach>
__device__ void fence_word() {
  if constexpr (kReach == kBlock) asm volatile("fence.acq_rel.cta;" ::: "memory");
  if constexpr (kReach == kGpu) asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if constexpr (kReach == kSystem) asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// What a thread has: its memory, and in shared memory a stage and a barrier.
struct Playing {
  std::byte* memory;
  uint64_t slot_bytes;
  uint32_t stage, barrier;
  uint32_t lane;  // of its instance
  uint64_t registers[kRegisters];

  __device__ std::byte* at(Slot slot) const { return memory + slot * slot_bytes; }
};

__device__ void store_vec_shared(uint32_t at, uint32_t v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(v) : "memory");
}

template <Step kStep>
__device__ void take_bulk(Playing& mine) {
  constexpr Act kAct = kStep.act;
  if constexpr (kAct == Act::kStoreStage) store_vec_shared(mine.stage, kStep.value);
  if constexpr (kAct == Act::kLoadStage) {
    uint32_t a, b, c, d;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(mine.stage)
                 : "memory");
    mine.registers[kStep.reg] = a;
  }
  if constexpr (kAct == Act::kBulkStore)
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 16;\n"
        "cp.async.bulk.commit_group;" ::"l"(mine.at(kStep.slot)),
        "r"(mine.stage)
        : "memory");
  if constexpr (kAct == Act::kBulkLoad)
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%1], [%2], 16, [%0];" ::"r"(
            mine.barrier),
        "r"(mine.stage), "l"(mine.at(kStep.slot))
        : "memory");
  if constexpr (kAct == Act::kInitBarrier)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(mine.barrier) : "memory");
  if constexpr (kAct == Act::kWaitLoaded) {
    uint32_t is_done = 0;
    while (!is_done)
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n"
          "}"
          : "=r"(is_done)
          : "r"(mine.barrier), "n"(kStep.value)
          : "memory");
  }
  if constexpr (kAct == Act::kWaitRead)
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStep.value) : "memory");
  if constexpr (kAct == Act::kWaitWritten)
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kStep.value) : "memory");
  if constexpr (kAct == Act::kFenceAsync) asm volatile("fence.proxy.async;" ::: "memory");
  if constexpr (kAct == Act::kFenceAsyncShared) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// False: the thread ends here.
template <Step kStep>
__device__ bool take(Playing& mine) {
  constexpr Act kAct = kStep.act;
  if constexpr (kStep.lanes == Lanes::kFirst)
    if (mine.lane != 0) return true;
  if constexpr (kStep.lanes == Lanes::kOther)
    if (mine.lane == 0) return true;
  uint64_t& value = mine.registers[kStep.reg];
  std::byte* const at = mine.at(kStep.slot);
  if constexpr (kAct == Act::kStopUnless) return value == kStep.value;
  if constexpr (kAct == Act::kStore) store_word<kStep.kind, kStep.reach>(at, kStep.value);
  if constexpr (kAct == Act::kLoad) value = load_word<kStep.kind, kStep.reach>(at);
  if constexpr (kAct == Act::kAdd) value = add_word<kStep.kind, kStep.reach>(at, kStep.value);
  if constexpr (kAct == Act::kFence) fence_word<kStep.reach>();
  if constexpr (kAct == Act::kFenceSequential) asm volatile("fence.sc.sys;" ::: "memory");
  if constexpr (kAct == Act::kStoreRow)
    asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at), "r"(uint32_t{kStep.value}) : "memory");
  if constexpr (kAct == Act::kStoreLine)
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at), "r"(uint32_t{kStep.value})
                 : "memory");
  if constexpr (kAct == Act::kLoadRow || kAct == Act::kLoadLine) {
    uint32_t a, b, c, d;
    if constexpr (kAct == Act::kLoadRow)
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                   : "l"(at)
                   : "memory");
    else
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                   : "l"(at)
                   : "memory");
    (kAct == Act::kLoadRow ? value : mine.registers[0]) = a;
    if constexpr (kAct == Act::kLoadLine) mine.registers[1] = d;
  }
  if constexpr (kAct == Act::kSyncWarp) __syncwarp();
  if constexpr (kAct == Act::kVote)  // lanes of an instance are neighbours
    value = __shfl_sync(0xffffffff, value, static_cast<int>(threadIdx.x % 32 - mine.lane));
  take_bulk<kStep>(mine);
  return true;
}

template <uint32_t kShape, uint32_t kThread, size_t... kSteps>
__device__ void take_all(Playing& mine, std::index_sequence<kSteps...>) {
  (take<kShapes[kShape].threads[kThread].steps[kSteps]>(mine) && ...);
}

// Values as four bits.
__host__ __device__ constexpr uint8_t code_of(uint64_t value) {
  return static_cast<uint8_t>(value == kPoison ? 10 : value <= kNotRead ? value : 15);
}

// This block's threads that play thread `kThread` do so.
template <uint32_t kShape, uint32_t kThread>
__device__ void play(const Args& args, uint32_t group, uint32_t place, uint32_t round, std::byte* shared) {
  constexpr Plan kPlan = plan_of(kShapes[kShape]);
  constexpr uint32_t kLanes = kShapes[kShape].threads[kThread].at.lanes;
  constexpr uint32_t kFirst = kPlan.first_of[kThread] * kPlan.instances;
  const uint32_t thread = threadIdx.x - kFirst;  // of those; huge for threads before them
  if (kPlan.place_of[kThread] != place || thread >= kPlan.instances * kLanes) return;
  const uint32_t number = thread / kLanes;
  const uint32_t drawn = mixed(args.seed + round, group * 8 + kThread);
  const uint32_t dealt = args.is_shuffled ? number * (drawn | 1) + (drawn >> 16) : number;
  const uint32_t instance = group * kPlan.instances + dealt % kPlan.instances;

  Playing mine;
  mine.memory = args.memory + round * args.round_bytes + instance * args.instance_bytes;
  mine.slot_bytes = args.slot_bytes;
  mine.lane = thread % kLanes;
  mine.stage = shared_address(shared + (threadIdx.x - mine.lane) * kSlotBytes);
  mine.barrier = shared_address(shared + kThreads * kSlotBytes + (threadIdx.x - mine.lane) * 8);
  for (uint64_t& value : mine.registers) value = kNotRead;
  const uint32_t delay = args.most_delay ? mixed(drawn, threadIdx.x / 32) % args.most_delay : 0;
  for (const int64_t since = clock64(); clock64() - since < delay;) {
  }
  take_all<kShape, kThread>(mine, std::make_index_sequence<kShapes[kShape].threads[kThread].size()>());
  if constexpr (has_barrier(kShapes[kShape].threads[kThread])) {
    __syncwarp();
    if (mine.lane == 0) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(mine.barrier) : "memory");
  }
  uint8_t* const results =
      args.results + (uint64_t{round} * args.groups * kPlan.instances + instance) * kOutcomeRegisters;
  for (uint32_t i = 0; i < kOutcomeRegisters; ++i)
    if (mine.registers[i] != kNotRead) results[i] = code_of(mine.registers[i]);
}

// Loads what the block is about to play with, so that L1 has it. Only the plain words: copies and barriers are apart.
template <uint32_t kShape>
__device__ void warm(const Args& args, uint32_t group, uint32_t round) {
  constexpr Plan kPlan = plan_of(kShapes[kShape]);
  uint64_t sum = 0;
  for (uint32_t i = threadIdx.x; i < kPlan.instances; i += kThreads)
    for (uint32_t slot = kX; slot <= kRow; ++slot)
      sum += load_word<kWeak, kSystem>(args.memory + round * args.round_bytes +
                                       (uint64_t{group} * kPlan.instances + i) * args.instance_bytes +
                                       slot * args.slot_bytes);
  if (sum == ~uint64_t{0}) __trap();
}

__device__ bool await_go(const Args& args, uint32_t round) {
  __shared__ bool goes;
  if (threadIdx.x == 0) {
    goes = false;
    for (const uint64_t since = now_ns(); !goes && now_ns() - since < kHostNs;)
      goes = load_word<kRelaxed, kSystem>(reinterpret_cast<const std::byte*>(args.go)) > round;
  }
  __syncthreads();
  return goes;
}
__device__ void await_group(const Args& args, uint32_t group, uint32_t round, uint32_t places) {
  if (threadIdx.x != 0) return;
  uint32_t* const gate = args.gates + round * args.groups + group;
  atomicAdd(gate, 1);
  for (const uint64_t since = now_ns(); *static_cast<volatile uint32_t*>(gate) < places;)
    if (now_ns() - since > kGateNs) break;
}

// Traffic until the others are through.
__device__ void stand_by(const Args& args, uint32_t players) {
  const uint64_t since = now_ns();
  uint64_t at = mixed(args.seed, blockIdx.x * kThreads + threadIdx.x);
  const uint32_t way = mixed(args.seed, blockIdx.x) % 4;
  const uint64_t stride = way == 0 ? 1 : way == 1 ? 4099 : way == 2 ? 65537 : 128;
  for (uint32_t i = 0; *static_cast<volatile uint32_t*>(args.finished) < players; ++i) {
    for (uint32_t burst = 0; burst < 16; ++burst) {
      at = (at + stride * kThreads) % args.load_vecs;
      uint4& vec = args.load[at];
      if ((burst + way) % 3 != 0) {
        const uint4 read = vec;
        if (read.x == 0x12345678) vec = read;
      } else {
        vec = make_uint4(i, burst, way, 7);
      }
    }
    if (i % 16 == 15 && now_ns() - since > kBystanderNs) return;
  }
}

template <uint32_t kShape, size_t... kThreadsOf>
__device__ void play_all(const Args& args, uint32_t group, uint32_t place, uint32_t round, std::byte* shared,
                         std::index_sequence<kThreadsOf...>) {
  (play<kShape, kThreadsOf>(args, group, place, round, shared), ...);
}

template <uint32_t kShape>
__global__ void __launch_bounds__(kThreads) run_shape(Args args) {
  constexpr Plan kPlan = plan_of(kShapes[kShape]);
  __shared__ alignas(128) std::byte shared[kThreads * (kSlotBytes + 8)];
  const uint32_t role = args.roles[blockIdx.x];
  const uint32_t group = role / kPlan.places, place = role % kPlan.places;
  if (group >= args.groups) return stand_by(args, args.groups * kPlan.places);
  const uint32_t stage = shared_address(shared + threadIdx.x * kSlotBytes);
  for (uint32_t round = 0; round < args.rounds; ++round) {
    store_vec_shared(stage, kPoison);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (args.is_warm) warm<kShape>(args, group, round);
    __syncthreads();
    if (args.go) {
      if (!await_go(args, round)) break;
    } else {
      await_group(args, group, round, kPlan.places);
    }
    __syncthreads();
    play_all<kShape>(args, group, place, round, shared, std::make_index_sequence<kShapes[kShape].size()>());
    __syncthreads();
    if (args.done && threadIdx.x == 0)
      store_word<kRelease, kSystem>(reinterpret_cast<std::byte*>(args.done + blockIdx.x), round + 1);
  }
  if (threadIdx.x == 0) atomicAdd(args.finished, 1);
}

// Four words that are 1, in every instance's slot for them.
__global__ void set_ones(Args args, uint32_t instances) {
  const uint64_t all = uint64_t{args.rounds} * instances;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < all;
       i += uint64_t{gridDim.x} * blockDim.x)
    *reinterpret_cast<uint4*>(args.memory + i / instances * args.round_bytes +
                              i % instances * args.instance_bytes + kOnes * args.slot_bytes) =
        make_uint4(1, 1, 1, 1);
}
__global__ void count(const uint8_t* results, uint64_t instances, unsigned long long* histogram) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < instances;
       i += uint64_t{gridDim.x} * blockDim.x) {
    const uchar4 r = reinterpret_cast<const uchar4*>(results)[i];
    const uint32_t outcome = r.x | r.y << 4 | r.z << 8 | r.w << 12;
    const uint32_t same = __match_any_sync(__activemask(), outcome);
    if (__ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % 32))
      atomicAdd(&histogram[outcome], static_cast<unsigned long long>(__popc(same)));
  }
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The host's thread of a shape, for one instance.
void play_on_host(const Thread& thread, std::byte* memory, uint64_t slot_bytes, uint8_t* results) {
  uint64_t registers[kRegisters];
  for (uint64_t& value : registers) value = kNotRead;
  for (uint32_t s = 0; s < thread.size(); ++s) {
    const Step& step = thread.steps[s];
    auto* const at = reinterpret_cast<uint64_t*>(memory + step.slot * slot_bytes);
    if (step.act == Act::kStopUnless && registers[step.reg] != step.value) break;
    if (step.act == Act::kStore && step.kind == kRelease) __atomic_store_n(at, step.value, __ATOMIC_RELEASE);
    if (step.act == Act::kStore && step.kind != kRelease) __atomic_store_n(at, step.value, __ATOMIC_RELAXED);
    if (step.act == Act::kLoad && step.kind == kAcquire)
      registers[step.reg] = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    if (step.act == Act::kLoad && step.kind != kAcquire)
      registers[step.reg] = __atomic_load_n(at, __ATOMIC_RELAXED);
    if (step.act == Act::kFence) __atomic_thread_fence(__ATOMIC_ACQ_REL);
    if (step.act == Act::kFenceSequential) __atomic_thread_fence(__ATOMIC_SEQ_CST);
  }
  for (uint32_t i = 0; i < kOutcomeRegisters; ++i)
    if (registers[i] != kNotRead) results[i] = code_of(registers[i]);
}

struct Memories {
  std::byte* device = nullptr;
  std::byte* pinned = nullptr;
  uint8_t* results = nullptr;         // of the GPU
  uint8_t* pinned_results = nullptr;  // with a host's thread
  uint32_t* roles = nullptr;
  uint32_t* words = nullptr;  // gates, and behind them `finished`
  uint64_t* go = nullptr;     // pinned: go, and kDone words on, done
  uint4* load = nullptr;
  unsigned long long* histogram = nullptr;
  uint32_t sms = 0;
  uint64_t most_results = 0, most_words = 0;
};

struct Counts {
  uint64_t instances = 0, launches = 0;
  std::map<std::string, uint64_t> outcomes;
};

std::string text_of(uint32_t outcome) {
  uint32_t used = kOutcomeRegisters;
  while (used > 1 && (outcome >> 4 * (used - 1) & 15) == kNotRead) --used;
  std::string text;
  for (uint32_t i = 0; i < used; ++i) {
    const uint32_t code = outcome >> 4 * i & 15;
    text += (i ? " " : "") + (code == 10 ? std::to_string(kPoison) : code == 15 ? "?" : std::to_string(code));
  }
  return text;
}

class Runner {
 public:
  explicit Runner(uint32_t seed) : random_(seed) {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    name_ = properties.name;
    m_.sms = static_cast<uint32_t>(properties.multiProcessorCount);
    m_.most_results = uint64_t{kMostRounds} * m_.sms * 8 * kThreads;
    m_.most_words = uint64_t{kMostRounds} * m_.sms * 8;
    CHECK(cudaMalloc(&m_.device, kDeviceBytes));
    CHECK(cudaMalloc(&m_.load, kLoadBytes));
    CHECK(cudaMemset(m_.load, 0, kLoadBytes));
    CHECK(cudaMalloc(&m_.results, m_.most_results * kOutcomeRegisters));
    CHECK(cudaMalloc(&m_.roles, m_.sms * 8 * sizeof(uint32_t)));
    CHECK(cudaMalloc(&m_.words, (m_.most_words + 1) * sizeof(uint32_t)));
    CHECK(cudaMalloc(&m_.histogram, kHistogram * sizeof(unsigned long long)));
    CHECK(cudaHostAlloc(&m_.pinned, kPinnedBytes, cudaHostAllocPortable));
    CHECK(cudaHostAlloc(&m_.pinned_results,
                        uint64_t{kMostRounds} * kHostBlocks * kThreads * kOutcomeRegisters,
                        cudaHostAllocPortable));
    CHECK(cudaHostAlloc(&m_.go, 4096, cudaHostAllocPortable));
  }
  const std::string& device() const { return name_; }

  template <uint32_t kShape>
  Counts run(double seconds) {
    Counts counts;
    CHECK(cudaMemset(m_.histogram, 0, kHistogram * sizeof(unsigned long long)));
    constexpr Plan kPlan = plan_of(kShapes[kShape]);
    const double end = now_s() + seconds;
    do {
      if constexpr (kPlan.has_host)
        counts.instances += launch_with_host<kShape>();
      else
        counts.instances += launch<kShape>();
      ++counts.launches;
    } while (now_s() < end);
    std::vector<unsigned long long> histogram(kHistogram);
    CHECK(cudaMemcpy(histogram.data(), m_.histogram, kHistogram * sizeof(unsigned long long),
                     cudaMemcpyDeviceToHost));
    for (uint32_t outcome = 0; outcome < kHistogram; ++outcome)
      if (histogram[outcome]) counts.outcomes[text_of(outcome)] += histogram[outcome];
    return counts;
  }

 private:
  uint32_t draw(uint32_t below) { return static_cast<uint32_t>(random_() % below); }

  // How words lie: of an instance in one line, in lines of their own, or those of all instances side by side.
  void lay_out(Args& args, uint64_t instances, uint64_t bytes) {
    switch (draw(4)) {
      case 0:
        args.slot_bytes = kSlotBytes;
        args.instance_bytes = 128;
        break;
      case 1:
        args.slot_bytes = 128 << draw(2);
        args.instance_bytes = args.slot_bytes * kSlots;
        break;
      default:
        args.instance_bytes = kSlotBytes << draw(4);
        args.slot_bytes = args.instance_bytes * instances + 128 * draw(64);
    }
    args.round_bytes = args.instance_bytes > args.slot_bytes ? args.instance_bytes * instances
                                                             : args.slot_bytes * kSlots + 128;
    args.round_bytes = (args.round_bytes + 127) / 128 * 128;
    args.rounds = static_cast<uint32_t>(std::min<uint64_t>(kMostRounds, bytes / args.round_bytes));
  }

  template <uint32_t kShape>
  Args prepare(uint32_t blocks, uint32_t groups, uint64_t bytes) {
    constexpr Plan kPlan = plan_of(kShapes[kShape]);
    Args args{};
    args.groups = groups;
    lay_out(args, uint64_t{groups} * kPlan.instances, bytes);
    args.results = m_.results;
    args.roles = m_.roles;
    args.gates = m_.words;
    args.finished = m_.words + m_.most_words;
    args.load = m_.load;
    args.load_vecs = kLoadBytes / sizeof(uint4);
    args.seed = draw(~0u);
    constexpr uint32_t kDelays[] = {0, 64, 512, 4096};
    args.most_delay = kDelays[draw(4)];
    args.is_warm = draw(2) == 0;
    args.is_shuffled = draw(4) != 0;
    // Blocks that play together are neighbours, or anywhere.
    std::vector<uint32_t> roles(blocks);
    for (uint32_t i = 0; i < blocks; ++i) roles[i] = i;
    if (draw(4) != 0) std::shuffle(roles.begin(), roles.end(), random_);
    CHECK(cudaMemcpy(m_.roles, roles.data(), blocks * sizeof(uint32_t), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(m_.words, 0, (m_.most_words + 1) * sizeof(uint32_t)));
    return args;
  }

  template <uint32_t kShape>
  uint64_t launch() {
    constexpr Plan kPlan = plan_of(kShapes[kShape]);
    int most = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, run_shape<kShape>, kThreads, 0));
    const uint32_t blocks = m_.sms * (1 + draw(std::min(static_cast<uint32_t>(most), 4u)));
    // All play, or some, and the others load memory.
    const uint32_t players = std::max(kPlan.places, blocks * (1 + draw(4)) / 4);
    Args args = prepare<kShape>(blocks, players / kPlan.places, kDeviceBytes);
    args.memory = m_.device;
    const uint64_t instances = uint64_t{args.groups} * kPlan.instances * args.rounds;
    CHECK(cudaMemset(m_.device, 0, args.round_bytes * args.rounds));
    CHECK(cudaMemset(m_.results, kNotRead, instances * kOutcomeRegisters));
    set_ones<<<m_.sms, 256>>>(args, args.groups * kPlan.instances);
    run_shape<kShape><<<blocks, kThreads>>>(args);
    count<<<m_.sms, 256>>>(m_.results, instances, m_.histogram);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    return instances;
  }

  template <uint32_t kShape>
  uint64_t launch_with_host() {
    constexpr Plan kPlan = plan_of(kShapes[kShape]);
    static_assert(kPlan.places == 1, "a host's thread plays with those of one block");
    const uint32_t blocks = kHostBlocks;
    Args args = prepare<kShape>(blocks, blocks, kPinnedBytes);
    args.memory = m_.pinned;
    args.results = m_.pinned_results;
    args.go = m_.go;
    args.done = m_.go + kDone;
    constexpr uint32_t kDelays[] = {1, 2000, 8000,
                                    20000};  // the host goes from one instance to the next in some ns
    args.most_delay = kDelays[draw(4)];
    const uint32_t each = args.groups * kPlan.instances;
    std::memset(m_.pinned, 0, args.round_bytes * args.rounds);
    std::memset(m_.pinned_results, kNotRead, uint64_t{each} * args.rounds * kOutcomeRegisters);
    std::memset(m_.go, 0, (kDone + kHostBlocks) * sizeof(uint64_t));
    of_host_.assign(uint64_t{each} * args.rounds * kOutcomeRegisters, kNotRead);
    run_shape<kShape><<<blocks, kThreads>>>(args);
    CHECK(cudaGetLastError());
    for (uint32_t round = 0; round < args.rounds; ++round) play_round(kShapes[kShape], args, round, each);
    CHECK(cudaDeviceSynchronize());
    for (uint64_t i = 0; i < of_host_.size(); ++i)
      if (of_host_[i] != kNotRead) m_.pinned_results[i] = of_host_[i];
    count<<<m_.sms, 256>>>(m_.pinned_results, uint64_t{each} * args.rounds, m_.histogram);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    return uint64_t{each} * args.rounds;
  }
  void play_round(const Shape& shape, const Args& args, uint32_t round, uint32_t instances) {
    const uint32_t step = draw(2) == 0 ? 1 : draw(instances) | 1, first = draw(instances);
    __atomic_store_n(&m_.go[0], uint64_t{round} + 1, __ATOMIC_RELEASE);
    for (uint32_t t = 0; t < shape.size(); ++t) {
      if (shape.threads[t].at.rank != kHostRank) continue;
      for (uint32_t i = 0; i < instances; ++i) {
        const uint32_t instance = (first + i * step) % instances;
        play_on_host(shape.threads[t],
                     args.memory + round * args.round_bytes + instance * args.instance_bytes, args.slot_bytes,
                     &of_host_[(uint64_t{round} * instances + instance) * kOutcomeRegisters]);
      }
    }
    const double end = now_s() + 3;
    for (uint32_t block = 0; block < kHostBlocks; ++block)
      while (__atomic_load_n(&m_.go[kDone + block], __ATOMIC_ACQUIRE) <= round)
        if (now_s() > end) {
          std::fprintf(stderr, "%s: waited 3 s for block %u: expected round %u, saw %llu\n", shape.name,
                       block, round + 1, static_cast<unsigned long long>(m_.go[kDone + block]));
          std::exit(1);
        }
  }

  Memories m_;
  std::vector<uint8_t> of_host_;  // results of the host's thread
  std::mt19937 random_;
  std::string name_;
};

template <uint32_t kShape>
void run_one(Runner& runner, const std::string& part, double seconds, bool& is_first) {
  constexpr const Shape& kThis = kShapes[kShape];
  if constexpr (kThis.on_gpu) {
    if (std::string(kThis.name).find(part) == std::string::npos) return;
    const Counts counts = runner.run<kShape>(seconds);
    std::printf("%s\n  \"%s\": {\"instances\": %llu, \"launches\": %llu, \"outcomes\": {",
                is_first ? "" : ",", kThis.name, static_cast<unsigned long long>(counts.instances),
                static_cast<unsigned long long>(counts.launches));
    is_first = false;
    const char* comma = "";
    for (const auto& [outcome, count] : counts.outcomes) {
      std::printf("%s\"%s\": %llu", comma, outcome.c_str(), static_cast<unsigned long long>(count));
      comma = ", ";
    }
    std::printf("}}");
    std::fflush(stdout);
  }
}
template <size_t... kAll>
void run_all(Runner& runner, const std::string& part, double seconds, std::index_sequence<kAll...>) {
  uint32_t chosen = 0;
  for (const Shape& shape : kShapes)
    chosen += shape.on_gpu && std::string(shape.name).find(part) != std::string::npos ? 1 : 0;
  bool is_first = true;
  (run_one<kAll>(runner, part, seconds / std::max(chosen, 1u), is_first), ...);
}

}  // namespace
}  // namespace weft::litmus

int main(int argc, char** argv) {
  using namespace weft::litmus;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 50;
  const std::string part = argc > 2 ? argv[2] : "";
  alarm(static_cast<unsigned>(seconds) + 30);
  const auto seed = static_cast<uint32_t>(std::chrono::system_clock::now().time_since_epoch().count());
  const double started = now_s();
  Runner runner(seed);
  std::printf("{\"device\": \"%s\", \"seed\": %u, \"shapes\": {", runner.device().c_str(), seed);
  run_all(runner, part, seconds, std::make_index_sequence<kNumShapes>());
  std::printf("},\n \"seconds\": %.1f}\n", now_s() - started);
  return 0;
}
