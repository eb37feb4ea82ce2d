// SPDX-License-Identifier: Apache-2.0
//
// The HIP target, for hiprtc and for clang without AMD's headers: CDNA (gfx942 and newer), waves of 64 lanes.
// See target.h for what the targets have in common. Compiled in tests; not run on hardware yet.
// Scopes: system = what peers and the host see; agent = one GPU. Sources: LLVM's AMDGPU memory model and
// built-ins.
#pragma once

#if defined(__HIPCC_RTC__)
using int8_t = __INT8_TYPE__;
using uint8_t = __UINT8_TYPE__;
using int16_t = __INT16_TYPE__;
using uint16_t = __UINT16_TYPE__;
using int32_t = __INT32_TYPE__;
using uint32_t = __UINT32_TYPE__;
using int64_t = __INT64_TYPE__;
using uint64_t = __UINT64_TYPE__;
using uintptr_t = __UINTPTR_TYPE__;
using size_t = __SIZE_TYPE__;
namespace std {
enum class byte : unsigned char {};
}
#else
#include <cstddef>
#include <cstdint>
#endif

// What HIP's own headers define, for a compiler that has only the language. AMD's second bound is waves per
// SIMD, not blocks per SM; four SIMDs share a block.
#if !defined(__global__)
#define __global__ __attribute__((global))
#endif
#undef __launch_bounds__
#define __launch_bounds__(threads, blocks)                  \
  __attribute__((amdgpu_flat_work_group_size(1, (threads)), \
                 amdgpu_waves_per_eu(((threads) * (blocks) + 255) / 256)))
#define __grid_constant__  // arguments lie in constant memory anyway

#define WEFT_DEVICE __attribute__((device, always_inline)) inline
#define WEFT_KERNEL __attribute__((device, always_inline)) inline
#define WEFT_UNROLL _Pragma("unroll")         // before a loop whose trip count is constant
#define WEFT_ROLLED _Pragma("nounroll")       // before a loop that is short: code is fetched from far, too
#define WEFT_STREAM_LOOP _Pragma("unroll 4")  // before a loop whose iterations are independent

#include "kernels/target/portable.h"

namespace weft {

// ---- groups
// ------------------------------------------------------------------------------------------------------

struct Block {
  WEFT_DEVICE uint32_t index() const { return __builtin_amdgcn_workgroup_id_x(); }
  WEFT_DEVICE uint32_t count() const {
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
  }
  WEFT_DEVICE uint32_t rank() const { return __builtin_amdgcn_workitem_id_x(); }
  WEFT_DEVICE uint32_t size() const { return __builtin_amdgcn_workgroup_size_x(); }
  WEFT_DEVICE uint32_t warps() const { return size() / 64; }
  WEFT_DEVICE std::byte* shared() const {
    extern __attribute__((shared, aligned(128))) unsigned char weft_shared[];
    return reinterpret_cast<std::byte*>(weft_shared);
  }
  WEFT_DEVICE void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  }
};

struct Warp {
  static constexpr uint32_t kMaxSize = 64;
  WEFT_DEVICE uint32_t index() const { return __builtin_amdgcn_workitem_id_x() / 64; }  // within its block
  WEFT_DEVICE uint32_t rank() const { return __builtin_amdgcn_workitem_id_x() % 64; }
  WEFT_DEVICE uint32_t size() const { return 64; }
  WEFT_DEVICE void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
  }
  template <class T>
  WEFT_DEVICE T broadcast(T value, uint32_t from = 0) const {
    return value_of_lane(value, from);
  }
  template <class T>
  WEFT_DEVICE T sum(T value) const {
    for (uint32_t step = 32; step > 0; step /= 2) value += value_of_lane(value, rank() ^ step);
    return value;
  }
  template <class T>
  WEFT_DEVICE T max(T value) const {
    for (uint32_t step = 32; step > 0; step /= 2) {
      const T other = value_of_lane(value, rank() ^ step);
      value = other > value ? other : value;
    }
    return value;
  }
  template <class T>
  WEFT_DEVICE T min(T value) const {
    for (uint32_t step = 32; step > 0; step /= 2) {
      const T other = value_of_lane(value, rank() ^ step);
      value = other < value ? other : value;
    }
    return value;
  }
  // The largest value among each `kLanes` neighbours; kLanes is a power of two.
  template <uint32_t kLanes, class T>
  WEFT_DEVICE T max_within(T value) const {
    for (uint32_t step = kLanes / 2; step > 0; step /= 2) {
      const T other = value_of_lane(value, rank() ^ step);
      value = other > value ? other : value;
    }
    return value;
  }
  // The sum of the values of lower ranks.
  template <class T>
  WEFT_DEVICE T scan_exclusive(T value) const {
    T inclusive = value;
    for (uint32_t step = 1; step < 64; step *= 2) {
      const T lower = value_of_lane(inclusive, rank() - step);
      if (rank() >= step) inclusive += lower;
    }
    return inclusive - value;
  }
  WEFT_DEVICE bool any(bool value) const { return __builtin_amdgcn_ballot_w64(value) != 0; }
  // Of how many threads, and of how many of lower rank, the value is true.
  WEFT_DEVICE uint32_t count(bool value) const {
    return static_cast<uint32_t>(__builtin_popcountll(__builtin_amdgcn_ballot_w64(value)));
  }
  WEFT_DEVICE uint32_t count_below(bool value) const {
    const uint64_t below = (uint64_t{1} << rank()) - 1;
    return static_cast<uint32_t>(__builtin_popcountll(__builtin_amdgcn_ballot_w64(value) & below));
  }

 private:
  // Lanes exchange 32-bit words; the lane number wraps at 64.
  template <class T>
  WEFT_DEVICE static T value_of_lane(T value, uint32_t lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    struct Words {
      int words[sizeof(T) / 4];
    };
    Words out = __builtin_bit_cast(Words, value);
    for (int& word : out.words) word = __builtin_amdgcn_ds_bpermute(static_cast<int>(lane * 4), word);
    return __builtin_bit_cast(T, out);
  }
};

// ---- memory
// ------------------------------------------------------------------------------------------------------

struct alignas(16) Vec16 {
  uint32_t words[4];
};

// System scope: peers see it.
WEFT_DEVICE uint32_t load_acquire(const uint32_t* at) {
  return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE uint64_t load_acquire(const uint64_t* at) {
  return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE uint32_t load_relaxed(const uint32_t* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE uint64_t load_relaxed(const uint64_t* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE void store_release(uint32_t* at, uint32_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE void store_release(uint64_t* at, uint64_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE void store_relaxed(uint32_t* at, uint32_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE void store_relaxed(uint64_t* at, uint64_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// Two words that share 16 aligned bytes: whoever acquires the second sees the first. Released, they also publish what
// the thread knew before.
WEFT_DEVICE void store_pair_release(uint64_t* at, uint64_t first, uint64_t second) {
  store_relaxed(at, first);
  store_release(at + 1, second);
}
WEFT_DEVICE void store_pair(uint64_t* at, uint64_t first, uint64_t second) {
  store_pair_release(at, first, second);
}
WEFT_DEVICE uint32_t add_release(uint32_t* at, uint32_t value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
WEFT_DEVICE uint64_t add_release(uint64_t* at, uint64_t value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
// Within one device. `at` may be in shared memory.
WEFT_DEVICE uint32_t add_local(uint32_t* at, uint32_t value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
WEFT_DEVICE int32_t add_local(int32_t* at, int32_t value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
WEFT_DEVICE uint64_t add_local(uint64_t* at, uint64_t value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
WEFT_DEVICE uint32_t add_local_acq_rel(uint32_t* at, uint32_t value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}
WEFT_DEVICE uint32_t exchange_local(uint32_t* at, uint32_t value) {
  return __hip_atomic_exchange(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
// A look at a signal that a peer may write, cheap enough to repeat; who sees what it waits for acquires then.
WEFT_DEVICE uint64_t peek(const uint64_t* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// A look at a signal after which the thread branches, and then only stores, or loads what the signal says is
// there by load_relaxed() and load_vec_fresh(). Here it acquires.
WEFT_DEVICE uint64_t load_signal(const uint64_t* at) {
  return load_acquire(at);
}
// Block scope; `at` is usually in shared memory.
WEFT_DEVICE uint32_t load_acquire_block(const uint32_t* at) {
  return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
// Tells a peer of what launches before this one did, which their end has finished.
WEFT_DEVICE void store_after_launch(uint64_t* at, uint64_t value) {
  store_relaxed(at, value);
}
WEFT_DEVICE void store_release_block(uint32_t* at, uint32_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_WORKGROUP);
}
// Orders everything before it against everything after it, for peers too.
WEFT_DEVICE void fence_system() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
}

namespace detail {
using NativeVec16 = uint32_t __attribute__((ext_vector_type(4)));
}  // namespace detail
WEFT_DEVICE Vec16 load_vec(const Vec16* at) {
  return *at;
}
// For data that nobody writes while the kernel runs and that is read once.
WEFT_DEVICE Vec16 load_vec_streaming(const Vec16* at) {
  return __builtin_bit_cast(Vec16,
                            __builtin_nontemporal_load(reinterpret_cast<const detail::NativeVec16*>(at)));
}
// Of memory that a peer writes while the kernel runs: see load_signal().
WEFT_DEVICE Vec16 load_vec_fresh(const Vec16* at) {
  return load_vec(at);
}
WEFT_DEVICE void store_vec(Vec16* at, Vec16 v) {
  *at = v;
}
WEFT_DEVICE void store_vec_streaming(Vec16* at, Vec16 v) {
  __builtin_nontemporal_store(__builtin_bit_cast(detail::NativeVec16, v),
                              reinterpret_cast<detail::NativeVec16*>(at));
}
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

// One thread has nothing better here than a loop over vectors.
WEFT_DEVICE bool copy_alone(void* /*dst*/, const void* /*src*/, uint64_t /*bytes*/) {
  return false;
}

WEFT_DEVICE bool copy_cold(void* /*dst*/, const void* /*src*/, uint64_t /*bytes*/) {
  return false;
}

// Copies a few bytes between places of any alignment.
template <uint32_t kBytes>
WEFT_DEVICE void copy_few(void* dst, const void* src) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < kBytes; ++i)
    static_cast<unsigned char*>(dst)[i] = static_cast<const unsigned char*>(src)[i];
}

// How many vectors of each of four rows a thread sums at once.
inline constexpr uint32_t kSumVecs = 2;

// Asks for a line to be brought near; may do nothing.
WEFT_DEVICE void prefetch(const void* at) {
  __builtin_prefetch(at);
}

// ---- numbers
// -----------------------------------------------------------------------------------------------------

// One rounding each: the compiler may not fuse them, so that every target gives the same bits.
WEFT_DEVICE float multiply(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
WEFT_DEVICE float add(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
WEFT_DEVICE float divide(float a, float b) {
#pragma clang fp contract(off)
  return a / b;
}

// Four floats as float8_e4m3fn, first in the low byte: nearest even; above 448 it is 448. CDNA 3's own
// conversion is to another format (e4m3fnuz).
WEFT_DEVICE uint32_t e4m3x4(float a, float b, float c, float d) {
  return e4m3_portable(a) | e4m3_portable(b) << 8 | e4m3_portable(c) << 16 | e4m3_portable(d) << 24;
}

// FP16 to float32 and back, to nearest, ties to even.
WEFT_DEVICE float float_of_f16(uint32_t bits) {
  return f16_to_float_portable(bits);
}
WEFT_DEVICE uint32_t f16_bits(float value) {
  return float_to_f16_portable(value);
}

// A line that a peer writes while this thread polls it: each 8-byte half is whole.
WEFT_DEVICE Vec16 load_line(const Vec16* at) {
  const auto* halves = reinterpret_cast<const uint64_t*>(at);
  const uint64_t low = load_acquire(halves);
  const uint64_t high = load_acquire(halves + 1);
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}
WEFT_DEVICE void store_line(Vec16* at, Vec16 v) {
  auto* halves = reinterpret_cast<uint64_t*>(at);
  store_relaxed(halves, v.words[0] | uint64_t{v.words[1]} << 32);
  store_relaxed(halves + 1, v.words[2] | uint64_t{v.words[3]} << 32);
}
// Where a peer may look for a line's tag at the same time, and find something else. `at` may be in shared
// memory.
template <class T>
WEFT_DEVICE void store_watched(T* at, T value) {
  *at = value;
}
// Lanes that load the parts of a line at one time may get them from different times.
inline constexpr bool kLoadsLinesWhole = false;
// A part of a line whose last word says that the whole line is there; `is_last` for that part.
WEFT_DEVICE void store_line_part(Vec16* at, Vec16 v, bool /*is_last*/) {
  store_line(at, v);
}

namespace detail {

WEFT_DEVICE uint32_t bf16_bits_of(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

}  // namespace detail

// The eight bf16 of a Vec16 and their float32 sums: sums[0..3] belong to the low halves of the words,
// sums[4..7] to the high ones. Rounding is to nearest, ties to even.
WEFT_DEVICE void add_bf16x8(float (&sums)[8], const Vec16& vec) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    sums[i] += __builtin_bit_cast(float, vec.words[i] << 16);
    sums[4 + i] += __builtin_bit_cast(float, vec.words[i] & 0xffff0000u);
  }
}
WEFT_DEVICE Vec16 round_bf16x8(const float (&sums)[8]) {
  Vec16 vec;
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i)
    vec.words[i] = detail::bf16_bits_of(sums[i]) | detail::bf16_bits_of(sums[4 + i]) << 16;
  return vec;
}

// ---- row pipe
// ----------------------------------------------------------------------------------------------------

// Streams items (rows or pieces of rows) to one or more places each, with loads and stores straight from the
// source: CDNA has no engine that a kernel could hand a whole row to.
//   pipe.run(next, sink): next() -> RowItem, one without a source ends; sink(tag, stage) calls
//   pipe.store(dst, stage) for each place.
// After drain() every store made so far is visible to a peer that acquires a later release by lane 0 of this
// warp; drain_but() does the same here.
template <uint32_t kStages>
class RowPipe {
 public:
  WEFT_DEVICE RowPipe(Warp warp, std::byte* /*shared*/, uint32_t /*piece_bytes*/) : warp_(warp) {}

  template <class Next, class Sink>
  WEFT_DEVICE void run(Next next, Sink sink) {
    for (auto item = next(); item.piece.src; item = next()) sink(item.tag, item.piece);
  }
  WEFT_DEVICE void store(std::byte* dst, RowPiece stage) {
    const auto* from = reinterpret_cast<const Vec16*>(stage.src);
    auto* to = reinterpret_cast<Vec16*>(dst);
    for (uint32_t i = warp_.rank(); i < stage.bytes / 16; i += warp_.size())
      store_vec(to + i, load_vec_streaming(from + i));
  }
  template <uint32_t kItems>
  WEFT_DEVICE void drain_but() {
    fence_system();
    warp_.sync();
  }
  WEFT_DEVICE void drain() { drain_but<0>(); }

 private:
  Warp warp_;
};

// ---- time
// --------------------------------------------------------------------------------------------------------

// The constant clock counts at 100 MHz.
WEFT_DEVICE uint64_t now_ns() {
  return __builtin_amdgcn_s_memrealtime() * 10;
}

// For measuring waits: cycles of this compute unit.
WEFT_DEVICE uint64_t cycles() {
  return __builtin_readcyclecounter();
}

// About that long, at most 1 ms; for polls that are in no hurry.
WEFT_DEVICE void pause_ns(uint32_t ns) {
  // 8 * 64 cycles, about 256 ns at 2 GHz; the instruction takes only a constant.
  for (uint32_t slept = 0; slept < ns; slept += 256) __builtin_amdgcn_s_sleep(8);
}

WEFT_DEVICE void pause(uint32_t polls) {
  if (polls > 1024) __builtin_amdgcn_s_sleep(2);
}

// The same for a word in shared memory, at which a warp may look without disturbing others.
WEFT_DEVICE void pause_near(uint32_t /*polls*/) {}

// A loop that waits looks at the clock and the fault box after so many looks in vain, for the first time
// after kFirstCheck. The box is in host memory: reads of it take some 0.6 us each, one after the other, so
// that all warps of a GPU together take more than a millisecond. Where waits of less led to a check, one late
// call made the peers' warps check, which made the next call late (seen on H200).
inline constexpr uint32_t kLooksPerCheck = 4096, kFirstCheck = kLooksPerCheck - 1;

}  // namespace weft
