// SPDX-License-Identifier: Apache-2.0
//
// fence_costs.cu: what ordering a call of the ibgda transport costs a GPU, by scope and by where the memory lies. One warp
// stores a payload, one lane two entries, the doorbell record and the doorbell, again and again. Nobody reads them.
//   nvcc -O3 -std=c++17 -arch=sm_90 tests/gpu/fence_costs.cu -o /tmp/fence_costs && /tmp/fence_costs
// Prints ns per call: a row for each (ring, payload, stores of payload, what other warps do), a column for each way. Then what
// the two trips to memory before it cost, one after the other and at once.
// Ways: none orders nothing (what the stores cost). gpu, sys: release of the record, fence before the doorbell, in that scope.
// sc: fence.sc.sys twice. once: fence of the system before the record, of the GPU before the doorbell. early: doorbell, record,
// doorbell again, as DOCA rings. release: both words by st.release.gpu, as NVSHMEM rings. read back: no fence, but a load of
// each word before the next store.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                        \
  do {                                                                     \
    cudaError_t status = (call);                                           \
    if (status != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status)); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

enum Way { kNone, kGpu, kSys, kSc, kOnce, kEarly, kRelease, kReadBack, kWays };
const char* kWay[] = {"none", "gpu", "sys", "sc", "once", "early", "release", "read back"};
enum Busy { kIdle, kReadsGpu, kWritesGpu, kWritesHost, kBusys };
const char* kBusy[] = {"idle", "others read GPU", "others write GPU", "others write host"};

constexpr uint32_t kCalls = 1000, kRingBlocks = 64, kRepeats = 3;

struct Args {
  uint4* ring;         // [kRingBlocks * 4]
  uint4* payload;      // [32]
  uint32_t* record;    // where the ring is
  uint64_t* doorbell;  // pinned, as a register is beyond PCIe, too
  uint64_t* state;     // of the GPU; [0] points at [8]
  uint64_t* taken_ns;  // pinned
  uint32_t* done;      // of the GPU
  uint4* bulk;         // what others read or write
  uint64_t bulk_vecs;
  uint32_t way, busy, stores;
};

__device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
  return ns;
}
__device__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ void fence_sc() { asm volatile("fence.sc.sys;" ::: "memory"); }
__device__ void store16(uint4* at, uint32_t v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(at), "r"(v) : "memory");
}
__device__ void store_record(uint32_t* at, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ void ring(uint64_t* at, uint64_t v) {
  asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}
__device__ uint32_t look32(const void* at) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

template <Way kWayOf>
__device__ void post(const Args& a, uint4* block, uint32_t i) {
#pragma unroll
  for (int unit = 0; unit < 8; ++unit) store16(block + unit, i);
  if constexpr (kWayOf == kNone) {
    store_record(a.record, i);
  } else if constexpr (kWayOf == kGpu) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.record), "r"(i) : "memory");
    fence_gpu();
  } else if constexpr (kWayOf == kSys) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(a.record), "r"(i) : "memory");
    fence_sys();
  } else if constexpr (kWayOf == kSc) {
    fence_sc();
    store_record(a.record, i);
    fence_sc();
  } else if constexpr (kWayOf == kOnce) {
    fence_sys();
    store_record(a.record, i);
    fence_gpu();
  } else if constexpr (kWayOf == kEarly) {
    fence_sys();
    ring(a.doorbell, i);
    store_record(a.record, i);
    fence_gpu();
  } else if constexpr (kWayOf == kRelease) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.record), "r"(i) : "memory");
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(a.doorbell), "l"(uint64_t{i}) : "memory");
    return;
  } else if constexpr (kWayOf == kReadBack) {
    const uint32_t seen = look32(block + 7) ^ look32(block + 3);  // 0
    store_record(a.record, i + seen);
    ring(a.doorbell, i + (look32(a.record) ^ i));
    return;
  }
  ring(a.doorbell, i);
}

template <Way kWayOf>
__device__ void calls(const Args& a) {
  const uint32_t lane = threadIdx.x % 32;
  uint64_t begin = 0;
  for (uint32_t i = 0; i < kCalls + 100; ++i) {
    if (i == 100) begin = now();
    if (lane < a.stores) store16(a.payload + lane, i);
    __syncwarp();
    if (lane == 0) post<kWayOf>(a, a.ring + i % (kRingBlocks / 2) * 8, i);
    __syncwarp();
  }
  if (lane == 0) *a.taken_ns = now() - begin;
}

__device__ void be_busy(const Args& a) {
  const uint64_t threads = uint64_t{gridDim.x - 1} * blockDim.x;
  uint64_t at = uint64_t{blockIdx.x - 1} * blockDim.x + threadIdx.x;
  uint32_t sum = 0;
  while (look32(a.done) == 0) {
    for (int i = 0; i < 16; ++i, at = at + threads < a.bulk_vecs ? at + threads : at + threads - a.bulk_vecs) {
      if (a.busy == kReadsGpu)
        sum += a.bulk[at].x;
      else
        store16(a.bulk + at, sum);
    }
  }
  if (sum == 0x12345678) a.ring[0].x = sum;
}

__global__ void run(Args a) {
  if (blockIdx.x > 0) return be_busy(a);
  if (threadIdx.x >= 32) return;
  switch (a.way) {
    case kNone: calls<kNone>(a); break;
    case kGpu: calls<kGpu>(a); break;
    case kSys: calls<kSys>(a); break;
    case kSc: calls<kSc>(a); break;
    case kOnce: calls<kOnce>(a); break;
    case kEarly: calls<kEarly>(a); break;
    case kRelease: calls<kRelease>(a); break;
    default: calls<kReadBack>(a);
  }
  if (threadIdx.x == 0) atomicExch(a.done, 1u);
}

// A look at a queue, then an add to the state that it names; or both at once. Behind a fence, as in a call.
__global__ void trips(Args a, bool is_chained) {
  auto* known = reinterpret_cast<unsigned long long*>(a.state + 8);
  uint64_t sum = 0;
  const uint64_t begin = now();
  for (uint32_t i = 0; i < kCalls; ++i) {
    fence_gpu();
    const uint64_t named = *reinterpret_cast<volatile uint64_t*>(a.state);
    auto* state = is_chained ? reinterpret_cast<unsigned long long*>(named) : known;
    const uint64_t first = atomicAdd(state, 1ull);
    sum += first + look32(state + 1) + look32(state + 2) + named;
    if (sum == 1) return;  // the next one waits for this one
  }
  *a.taken_ns = now() - begin + (sum == 2);
}

double best_ns(const Args& a, int blocks) {
  std::vector<double> taken;
  for (uint32_t i = 0; i < kRepeats; ++i) {
    CHECK(cudaMemset(a.done, 0, sizeof(uint32_t)));
    run<<<blocks, 256>>>(a);
    CHECK(cudaDeviceSynchronize());
    taken.push_back(static_cast<double>(*a.taken_ns) / kCalls);
  }
  std::sort(taken.begin(), taken.end());
  return taken[taken.size() / 2];
}

int main() {
  int device = 0, sms = 0;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  constexpr uint64_t kBulk = 256 << 20, kHostBulk = 64 << 20;
  Args a{};
  uint4 *gpu_ring, *host_ring, *gpu_bulk, *host_bulk;
  CHECK(cudaMalloc(&gpu_ring, 65536));
  CHECK(cudaHostAlloc(&host_ring, 65536, cudaHostAllocPortable));
  CHECK(cudaMalloc(&gpu_bulk, kBulk));
  CHECK(cudaHostAlloc(&host_bulk, kHostBulk, cudaHostAllocPortable));
  CHECK(cudaHostAlloc(&a.doorbell, 4096, cudaHostAllocPortable));
  CHECK(cudaHostAlloc(&a.taken_ns, 4096, cudaHostAllocPortable));
  CHECK(cudaMalloc(&a.state, 4096));
  CHECK(cudaMalloc(&a.done, 4096));
  CHECK(cudaMemset(a.state, 0, 4096));
  const uint64_t state = reinterpret_cast<uint64_t>(a.state + 8);
  CHECK(cudaMemcpy(a.state, &state, sizeof state, cudaMemcpyHostToDevice));

  std::printf("median ns per call: two entries, record, doorbell, and their order\n%-6s %-8s %-7s %-18s", "ring",
              "payload", "stores", "others");
  for (const char* way : kWay) std::printf(" %9s", way);
  std::printf("\n");
  struct Place {
    bool ring_on_gpu, payload_on_gpu;
  };
  for (const Place place : {Place{true, true}, Place{true, false}, Place{false, false}})
    for (const uint32_t stores : {0u, 1u, 32u})
      for (uint32_t busy = 0; busy < kBusys; ++busy) {
        a.ring = place.ring_on_gpu ? gpu_ring : host_ring;
        a.record = reinterpret_cast<uint32_t*>(a.ring + kRingBlocks * 4 + 4);
        a.payload = (place.payload_on_gpu ? gpu_ring : host_ring) + 2048;
        a.stores = stores;
        a.busy = busy;
        a.bulk = busy == kWritesHost ? host_bulk : gpu_bulk;
        a.bulk_vecs = (busy == kWritesHost ? kHostBulk : kBulk) / sizeof(uint4);
        std::printf("%-6s %-8s %-7u %-18s", place.ring_on_gpu ? "gpu" : "host",
                    place.payload_on_gpu ? "gpu" : "host", stores, kBusy[busy]);
        for (a.way = 0; a.way < kWays; ++a.way)
          std::printf(" %9.0f", best_ns(a, busy == kIdle ? 1 : sms));
        std::printf("\n");
      }
  for (const bool is_chained : {true, false}) {
    trips<<<1, 1>>>(a, is_chained);
    CHECK(cudaDeviceSynchronize());
    std::printf("trips to memory, %s: %.0f ns\n", is_chained ? "one after the other" : "at once",
                static_cast<double>(*a.taken_ns) / kCalls);
  }
  return 0;
}
