// SPDX-License-Identifier: Apache-2.0
//
// pinned_looks.cu: what looks at memory of the host cost a GPU, and those beside them. Some warps look at words until others,
// the workers, have moved bytes. Prints how long the workers took, and how long one look took in the mean.
//   nvcc -O3 -std=c++17 -arch=sm_90 tests/gpu/pinned_looks.cu -o /tmp/pinned_looks && /tmp/pinned_looks
// Looks: one lane of a warp, .sys, 300 ns between looks, at one word, at words of one line each, or one of 16 words of a line.
// Work: stores to the host, loads from the host, loads from memory of the GPU, atomics on one word of the host.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                  \
  do {                                                                               \
    cudaError_t status = (call);                                                     \
    if (status != cudaSuccess) {                                                     \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));           \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

enum Where { kOneWord, kOneLine, kOwnLines, kDevice };
enum Work { kStore, kLoad, kLoadWeak, kLoadDevice, kAtomic, kChase };
const char* kWhere[] = {"one word", "16 words of one line", "a line each", "one word of the GPU"};
const char* kWork[] = {"store to host",  "load .sys from host",    "load weak from host",
                       "load from GPU", "atomics on one host word", "dependent looks at host"};

struct Args {
  uint4* host;       // pinned
  uint4* device;
  uint64_t* words;   // pinned, 1 MiB
  uint64_t* near;    // of the GPU
  uint64_t* taken;   // [0] looks, [1] ns of looks, [2] workers that are done, [3] longest worker in ns
  uint32_t vecs;     // of all workers
  uint32_t workers;  // warps
  uint32_t where, work;
};

__device__ uint64_t now() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
  return ns;
}
__device__ uint64_t look(const uint64_t* at) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
  return v;
}
__device__ uint4 load_sys(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}
__device__ uint4 load_weak(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ void work(const Args& a, uint32_t worker) {
  const uint32_t lane = threadIdx.x % 32, share = a.vecs / a.workers;
  const uint64_t begin = now();
  uint32_t sum = 0;
  if (a.work == kAtomic) {
    if (lane == 0) sum = static_cast<uint32_t>(atomicAdd(reinterpret_cast<unsigned long long*>(a.words), 1ull));
  } else if (a.work == kChase) {
    const uint64_t* at = a.words + 4096 + worker * 16;
    for (int i = 0; i < 20; ++i) at += look(at);
  } else {
    for (uint32_t i = lane; i < share; i += 128) {
      uint4 v[4];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t at = worker * share + i + j * 32;
        if (i + j * 32 >= share) continue;
        if (a.work == kStore)
          a.host[at] = make_uint4(at, at, at, at);
        else
          v[j] = a.work == kLoad       ? load_sys(a.host + at)
                 : a.work == kLoadWeak ? load_weak(a.host + at)
                                       : load_weak(a.device + at);
      }
      if (a.work != kStore)
        for (uint32_t j = 0; j < 4; ++j)
          if (i + j * 32 < share) sum += v[j].x;
    }
  }
  if (a.work == kStore) __threadfence_system();
  if (sum == 0x12345) a.taken[4] = sum;
  __syncwarp();
  const uint64_t took = now() - begin;
  if (lane != 0) return;
  atomicMax(reinterpret_cast<unsigned long long*>(a.taken + 3), static_cast<unsigned long long>(took));
  atomicAdd(reinterpret_cast<unsigned long long*>(a.taken + 2), 1ull);
}

// Warp 0 of each of the first blocks works, as far as there are workers; the rest looks.
__global__ void run(Args a) {
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  if (warp < a.workers) return work(a, warp);
  if (threadIdx.x % 32 != 0) return;
  const uint32_t looker = warp - a.workers;
  const uint64_t* at = a.where == kOneWord   ? a.words
                       : a.where == kOneLine ? a.words + looker % 16
                       : a.where == kDevice  ? a.near
                                             : a.words + looker % 8192 * 16;
  uint64_t looks = 0, spent = 0;
  while (*reinterpret_cast<volatile uint64_t*>(a.taken + 2) < a.workers) {
    const uint64_t begin = now();
    const uint64_t value = look(at);
    spent += now() - begin + value;
    ++looks;
    __nanosleep(looks < 4 ? 50 : 300);
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(a.taken), static_cast<unsigned long long>(looks));
  atomicAdd(reinterpret_cast<unsigned long long*>(a.taken + 1), static_cast<unsigned long long>(spent));
}

int main() {
  constexpr uint32_t kBytes = 128 * 14336;
  Args a{};
  CHECK(cudaSetDevice(0));
  CHECK(cudaHostAlloc(&a.host, kBytes, cudaHostAllocPortable | cudaHostAllocMapped));
  CHECK(cudaHostAlloc(&a.words, 1 << 20, cudaHostAllocPortable | cudaHostAllocMapped));
  CHECK(cudaMalloc(&a.device, kBytes));
  CHECK(cudaMalloc(&a.near, 128));
  CHECK(cudaMalloc(&a.taken, 64));
  for (int i = 0; i < 1 << 17; ++i) a.words[i] = 0;
  CHECK(cudaMemset(a.near, 0, 128));
  std::printf("%-26s %7s  %-22s %7s %10s %9s %9s\n", "work of 1.8 MB, or one each", "workers", "looks at", "lookers",
              "work us", "look us", "looks/us");
  for (uint32_t kind = kStore; kind <= kChase; ++kind)
    for (uint32_t workers : {16u, 256u})
      for (uint32_t where = kOneWord; where <= kDevice; ++where)
        for (uint32_t warps : {1u, 2u, 16u}) {  // of a block
          if (kind == kAtomic && workers == 16) continue;
          if (132 * warps <= workers || (warps == 1 && where != kOneWord)) continue;
          if (where == kDevice && warps != 16) continue;
          double best = 1e30, look_us = 0, rate = 0;
          a.where = where, a.work = kind, a.workers = workers, a.vecs = kBytes / 16;
          for (int turn = 0; turn < 4; ++turn) {
            CHECK(cudaMemset(a.taken, 0, 64));
            run<<<132, 32 * warps>>>(a);
            CHECK(cudaDeviceSynchronize());
            uint64_t taken[4];
            CHECK(cudaMemcpy(taken, a.taken, sizeof taken, cudaMemcpyDeviceToHost));
            if (turn == 0 || taken[3] / 1e3 >= best) continue;
            best = taken[3] / 1e3;
            look_us = taken[0] ? taken[1] / 1e3 / taken[0] : 0;
            rate = taken[0] / best;
          }
          a.words[0] = 0;
          std::printf("%-26s %7u  %-22s %7u %10.1f %9.2f %9.2f\n", kWork[kind], workers, kWhere[where],
                      132 * warps - workers, best, look_us, rate);
        }
  // The same without lookers.
  for (uint32_t kind = kStore; kind <= kChase; ++kind)
    for (uint32_t workers : {16u, 64u, 256u, 2112u}) {
      if (kind == kAtomic && workers > 1000) continue;
      double best = 1e30;
      a.where = kDevice, a.work = kind, a.workers = workers;
      for (int turn = 0; turn < 4; ++turn) {
        CHECK(cudaMemset(a.taken, 0, 64));
        run<<<132, 32 * ((workers + 131) / 132)>>>(a);
        CHECK(cudaDeviceSynchronize());
        uint64_t taken[4];
        CHECK(cudaMemcpy(taken, a.taken, sizeof taken, cudaMemcpyDeviceToHost));
        if (turn > 0 && taken[3] / 1e3 < best) best = taken[3] / 1e3;
      }
      a.words[0] = 0;
      std::printf("%-26s %7u  %-22s %7u %10.1f\n", kWork[kind], workers, "-", 0u, best);
    }
  return 0;
}
