// SPDX-License-Identifier: Apache-2.0
//
// Thread groups on CUDA: the block, clusters of blocks from sm_90 on, and warps of 32 lanes that exchange values by
// shuffles.
#pragma once

#include "kernels/target/cuda/language.h"

namespace weft {

struct Block {
  WEFT_DEVICE uint32_t index() const { return blockIdx.x; }
  WEFT_DEVICE uint32_t count() const { return gridDim.x; }
  WEFT_DEVICE uint32_t rank() const { return threadIdx.x; }
  WEFT_DEVICE uint32_t size() const { return blockDim.x; }
  WEFT_DEVICE uint32_t warps() const { return blockDim.x / 32; }
  WEFT_DEVICE std::byte* shared() const {
    extern __shared__ __align__(128) unsigned char weft_shared[];
    return reinterpret_cast<std::byte*>(weft_shared);
  }
  WEFT_DEVICE void sync() const { __syncthreads(); }
};

struct Warp {
  static constexpr uint32_t kMaxSize = 32;
  WEFT_DEVICE uint32_t index() const { return threadIdx.x / 32; }  // within its block
  WEFT_DEVICE uint32_t rank() const { return threadIdx.x % 32; }
  WEFT_DEVICE uint32_t size() const { return 32; }
  WEFT_DEVICE void sync() const { __syncwarp(); }
  template <class T>
  WEFT_DEVICE T broadcast(T value, uint32_t from = 0) const {
    return __shfl_sync(0xffffffffu, value, static_cast<int>(from));
  }
  template <class T>
  WEFT_DEVICE T sum(T value) const {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
  }
  template <class T>
  WEFT_DEVICE T max(T value) const {
    for (int step = 16; step > 0; step /= 2) {
      const T other = __shfl_xor_sync(0xffffffffu, value, step);
      value = other > value ? other : value;
    }
    return value;
  }
  template <class T>
  WEFT_DEVICE T min(T value) const {
    for (int step = 16; step > 0; step /= 2) {
      const T other = __shfl_xor_sync(0xffffffffu, value, step);
      value = other < value ? other : value;
    }
    return value;
  }
  // The largest value among each `kLanes` neighbours; kLanes is a power of two.
  template <uint32_t kLanes, class T>
  WEFT_DEVICE T max_within(T value) const {
    for (int step = kLanes / 2; step > 0; step /= 2) {
      const T other = __shfl_xor_sync(0xffffffffu, value, step);
      value = other > value ? other : value;
    }
    return value;
  }
  // The sum of the values of lower ranks.
  template <class T>
  WEFT_DEVICE T scan_exclusive(T value) const {
    T inclusive = value;
    for (uint32_t step = 1; step < 32; step *= 2) {
      const T lower = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (rank() >= step) inclusive += lower;
    }
    return inclusive - value;
  }
  WEFT_DEVICE bool any(bool value) const { return __any_sync(0xffffffffu, value); }
  // Of how many threads, and of how many of lower rank, the value is true.
  WEFT_DEVICE uint32_t count(bool value) const {
    return static_cast<uint32_t>(__popc(__ballot_sync(0xffffffffu, value)));
  }
  WEFT_DEVICE uint32_t count_below(bool value) const {
    return static_cast<uint32_t>(__popc(__ballot_sync(0xffffffffu, value) & ((1u << rank()) - 1)));
  }
};

}  // namespace weft

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace weft {

// Blocks that run at the same time and read each other's shared memory: one alone, unless a launch asks for more.
struct Cluster {
  WEFT_DEVICE uint32_t rank() const {  // of this block
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
  }
  WEFT_DEVICE uint32_t blocks() const {
    uint32_t blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
  }
  // Where block `rank` has what this one has at `mine`, in shared memory.
  template <class T>
  WEFT_DEVICE const T* shared_of(uint32_t rank, const T* mine) const {
    uint64_t theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
    return reinterpret_cast<const T*>(theirs);
  }
  WEFT_DEVICE void sync() const {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
};

}  // namespace weft

#else
#include "kernels/target/cluster_of_one.h"
#endif
