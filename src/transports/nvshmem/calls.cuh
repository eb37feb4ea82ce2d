// SPDX-License-Identifier: Apache-2.0
//
// calls.cuh: the calls of NVSHMEM that the channel makes. On GPUs these are functions of a unit that is compiled once, with
// NVSHMEM's headers, and linked with each kernel (device_library.h): kernels themselves know no header of NVSHMEM. Where a
// kernel is compiled without the unit there is no NVSHMEM, and on CPUs a library that stands in for it.
// Threads: one, but for those of a warp.
#pragma once

#include "transports/nvshmem/wire.h"

#if defined(WEFT_NVSHMEM_CALLS)
extern "C" {
__device__ void weft_nvshmem_put(void* dst, const void* src, unsigned long long bytes, int peer);
__device__ void weft_nvshmem_put_warp(void* dst, const void* src, unsigned long long bytes, int peer);
__device__ void weft_nvshmem_get(void* dst, const void* src, unsigned long long bytes, int peer);
__device__ void weft_nvshmem_get_warp(void* dst, const void* src, unsigned long long bytes, int peer);
__device__ void weft_nvshmem_set(void* word, unsigned long long value, int peer);
__device__ void weft_nvshmem_add(void* word, unsigned long long n, int peer);
__device__ void weft_nvshmem_quiet();
__device__ int weft_nvshmem_rank();
}
#endif

namespace weft::shmem {

#if defined(WEFT_NVSHMEM_CALLS)

WEFT_DEVICE void put(const HostCalls*, std::byte* dst, const std::byte* src, uint64_t bytes, uint32_t peer) {
  weft_nvshmem_put(dst, src, bytes, static_cast<int>(peer));
}
WEFT_DEVICE void put_warp(const HostCalls*, std::byte* dst, const std::byte* src, uint64_t bytes,
                          uint32_t peer) {
  weft_nvshmem_put_warp(dst, src, bytes, static_cast<int>(peer));
}
WEFT_DEVICE void get(const HostCalls*, std::byte* dst, const std::byte* src, uint64_t bytes, uint32_t peer) {
  weft_nvshmem_get(dst, src, bytes, static_cast<int>(peer));
}
WEFT_DEVICE void get_warp(const HostCalls*, std::byte* dst, const std::byte* src, uint64_t bytes,
                          uint32_t peer) {
  weft_nvshmem_get_warp(dst, src, bytes, static_cast<int>(peer));
}
// A fence first: the word changes behind every earlier put to the peer.
WEFT_DEVICE void set(const HostCalls*, uint64_t* word, uint64_t value, uint32_t peer) {
  weft_nvshmem_set(word, value, static_cast<int>(peer));
}
WEFT_DEVICE void add(const HostCalls*, uint64_t* word, uint64_t n, uint32_t peer) {
  weft_nvshmem_add(word, n, static_cast<int>(peer));
}
WEFT_DEVICE void quiet(const HostCalls*) {
  weft_nvshmem_quiet();
}
WEFT_DEVICE uint32_t rank(uint32_t) {
  return static_cast<uint32_t>(weft_nvshmem_rank());
}

#else

WEFT_DEVICE void put(const HostCalls* calls, std::byte* dst, const std::byte* src, uint64_t bytes,
                     uint32_t peer) {
  calls->put(dst, src, bytes, peer);
}
WEFT_DEVICE void put_warp(const HostCalls* calls, std::byte* dst, const std::byte* src, uint64_t bytes,
                          uint32_t peer) {
  calls->put(dst, src, bytes, peer);
}
WEFT_DEVICE void get(const HostCalls* calls, std::byte* dst, const std::byte* src, uint64_t bytes,
                     uint32_t peer) {
  calls->get(dst, src, bytes, peer);
}
WEFT_DEVICE void get_warp(const HostCalls* calls, std::byte* dst, const std::byte* src, uint64_t bytes,
                          uint32_t peer) {
  calls->get(dst, src, bytes, peer);
}
WEFT_DEVICE void set(const HostCalls* calls, uint64_t* word, uint64_t value, uint32_t peer) {
  calls->fence();
  calls->set(word, value, peer);
}
WEFT_DEVICE void add(const HostCalls* calls, uint64_t* word, uint64_t n, uint32_t peer) {
  calls->fence();
  calls->add(word, n, peer);
}
WEFT_DEVICE void quiet(const HostCalls* calls) {
  calls->quiet();
}
WEFT_DEVICE uint32_t rank(uint32_t self) {
  return self;
}

#endif

}  // namespace weft::shmem
