// SPDX-License-Identifier: Apache-2.0
//
// wire.h: what host and device share for ports through NVSHMEM. Addresses need no exchange: a place of the symmetric heap has
// the same name on every rank, its address at the caller. Rank and PE are the same number.
#pragma once

#include "kernels/core/channel.cuh"

namespace weft::shmem {

// NVSHMEM's calls know no deadline. To a peer whose memory it maps they wait for nothing. To others they wait for room in a
// queue, and for completions: the calling thread counts such a call before and after it, and a thread of the link reads
// the counts (ports.h).
struct alignas(16) Watch {  // of one peer, in memory that the host sees
  uint64_t began;
  uint64_t ended;
};
static_assert(sizeof(Watch) == 16);

// On CPUs there is no NVSHMEM. A library that stands in for it in tests (tests/support) has these in its place.
struct HostCalls {
  void (*put)(std::byte* dst, const std::byte* src, uint64_t bytes, uint32_t peer);
  void (*get)(std::byte* dst, const std::byte* src, uint64_t bytes, uint32_t peer);  // returns with the bytes
  void (*fence)();
  void (*set)(uint64_t* word, uint64_t value, uint32_t peer);
  void (*add)(uint64_t* word, uint64_t n, uint32_t peer);
  void (*quiet)();
};

}  // namespace weft::shmem
