// SPDX-License-Identifier: Apache-2.0
//
// What the two GPU targets have alike: what only the host can do, bytes of any alignment, and how often a loop
// that waits looks at the clock. Included by their language.h, after WEFT_DEVICE.
#pragma once

namespace weft {

// Whether results too large for the caches may be written past them. GPUs are never told to, and need not
// compile for it.
inline constexpr bool kWritesPastCaches = false;
// Whether tests can make links slow: on the host only (kernels/collective/link_delays.h).
inline constexpr bool kDelaysLinks = false;

// Processes read each other's memory on the host only.
inline constexpr bool kReadsProcesses = false;
WEFT_DEVICE bool read_process(uint32_t /*process*/, void* /*dst*/, uint64_t /*src*/, uint64_t /*bytes*/) {
  return false;
}

// Whether launches have far fewer blocks than batches: on the host.
inline constexpr bool kHasFewBlocks = false;
// Whether memory that others wrote is as near as any other, so that a kernel may look at more of it: on the host.
inline constexpr bool kIsAllNear = false;
// Whether a kernel asks for the rows that it uses next. Here other warps work while one waits.
inline constexpr bool kAsksAhead = false;
// How many vectors of how many rows a lane of low latency's combine loads before it uses any, in what it sends, receives
// and sums of its own: memory is far, and registers are few.
inline constexpr uint32_t kSendVecs = 2, kSendRows = 4, kReceiveVecs = 1, kReceiveRows = 8, kOwnRows = 4;

// One thread has nothing better here than a loop over vectors.
inline constexpr bool kCopiesAlone = false;
WEFT_DEVICE bool copy_by_thread(void* /*dst*/, const void* /*src*/, uint64_t /*bytes*/) {
  return false;
}

WEFT_DEVICE bool copy_cold(void* /*dst*/, const void* /*src*/, uint64_t /*bytes*/) {
  return false;
}

struct Vec16;
struct AddedRow;
inline constexpr bool kSumsByThread = false;
template <bool kIsWeighted>
WEFT_DEVICE bool sum_bf16_by_thread(std::byte* /*out*/, const AddedRow* /*rows*/, uint32_t /*count*/,
                                    uint64_t /*bytes*/, bool /*past_caches*/) {
  return false;
}

// Vectors of numbers that the host combines as wholes. GPUs have none, and call neither.
struct Bf16Lanes;
struct F16Lanes;
struct F32Lanes;
inline constexpr bool kHasLanes = false;
template <class Lanes, class Op>
WEFT_DEVICE Vec16 combine_lanes(const Vec16& a, const Vec16& b);
template <class Lanes>
WEFT_DEVICE Vec16 divide_lanes(const Vec16& vec, float divisor);

WEFT_DEVICE bool copy_past_caches(void* /*dst*/, const void* /*src*/, uint64_t /*bytes*/) {
  return false;
}
WEFT_DEVICE bool copy_row_alone(void* /*dst*/, const void* /*src*/, uint64_t /*bytes*/,
                                bool /*past_caches*/) {
  return false;
}
template <uint32_t kVecs>
WEFT_DEVICE void load_row_alone(Vec16 (& /*held*/)[kVecs], const Vec16* /*row*/, uint32_t /*first*/,
                                uint32_t /*last*/) {}

// Copies a few bytes between places of any alignment.
template <uint32_t kBytes>
WEFT_DEVICE void copy_few(void* dst, const void* src) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < kBytes; ++i)
    static_cast<unsigned char*>(dst)[i] = static_cast<const unsigned char*>(src)[i];
}

// A plain store, where a peer may load at the same time, in search of a line's tag. `at` may be in shared memory.
template <class T>
WEFT_DEVICE void store_unordered(T* at, T value) {
  *at = value;
}

// The same for a word in shared memory, at which a warp may look without disturbing others.
WEFT_DEVICE void pause_near(uint32_t /*polls*/) {}

// A loop that waits looks at the clock and the fault box after so many looks in vain, for the first time
// after kFirstCheck. The box is in host memory: reads of it take some 0.6 us each, one after the other, so
// that all warps of a GPU together take more than a millisecond. Where waits of less led to a check, one late
// call made the peers' warps check, which made the next call late (seen on H200).
inline constexpr uint32_t kLooksPerCheck = 4096, kFirstCheck = kLooksPerCheck - 1;

}  // namespace weft
