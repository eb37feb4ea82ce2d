// SPDX-License-Identifier: Apache-2.0
//
// The CUDA target, for NVRTC: sm_80 and newer, bulk copies (TMA) from sm_90. Inline PTX only; no header is
// needed. See target.h for what the targets have in common. Instruction meanings: PTX ISA 8.x, sections 9.7.8
// (memory), 9.7.9.25 (bulk copies), 9.7.12 (barriers).
#pragma once

#define WEFT_DEVICE __device__ __forceinline__
#define WEFT_KERNEL __device__ __forceinline__
#define WEFT_UNROLL _Pragma("unroll")         // before a loop whose trip count is constant
#define WEFT_ROLLED _Pragma("unroll 1")       // before a loop that is short: code is fetched from far, too
#define WEFT_STREAM_LOOP _Pragma("unroll 4")  // before a loop whose iterations are independent

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
using size_t = decltype(sizeof(0));
namespace std {
enum class byte : unsigned char {};
}
#else
#include <cstddef>
#include <cstdint>
#endif

#include "kernels/target/portable.h"

namespace weft {

// ---- groups
// ------------------------------------------------------------------------------------------------------

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

// ---- memory
// ------------------------------------------------------------------------------------------------------

struct alignas(16) Vec16 {
  uint32_t words[4];
};

// System scope: peers see it.
WEFT_DEVICE uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
WEFT_DEVICE uint64_t load_acquire(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
WEFT_DEVICE uint32_t load_relaxed(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
WEFT_DEVICE uint64_t load_relaxed(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
// A look at a signal that a peer may write, cheap enough to repeat; who sees what it waits for acquires then.
// Device scope suffices to see it: local memory is coherent in this GPU's L2, where the peer's store arrives.
WEFT_DEVICE uint64_t peek(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
// A look at a signal after which the thread branches, and then only stores, or loads what the signal says is
// there by load_relaxed() and load_vec_fresh(). Those go to L2, where the peer's stores arrived before its
// signal, and start after the branch: an acquire would be one more trip to memory. NCCL's receivers rely on
// the same.
WEFT_DEVICE uint64_t load_signal(const uint64_t* at) {
  return load_relaxed(at);
}
WEFT_DEVICE void store_release(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
WEFT_DEVICE void store_release(uint64_t* at, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
WEFT_DEVICE void store_relaxed(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
WEFT_DEVICE void store_relaxed(uint64_t* at, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// Two words that share 16 aligned bytes: whoever acquires the second sees the first, since both are one write on the
// bus. Released, they also publish what the thread knew before.
WEFT_DEVICE void store_pair_release(uint64_t* at, uint64_t first, uint64_t second) {
  asm volatile("st.release.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(first), "l"(second) : "memory");
}
WEFT_DEVICE void store_pair(uint64_t* at, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(first), "l"(second) : "memory");
}
// Tells a peer of what launches before this one did, which their end has made visible and finished.
WEFT_DEVICE void store_after_launch(uint64_t* at, uint64_t value) {
  store_relaxed(at, value);
}
WEFT_DEVICE uint32_t add_release(uint32_t* at, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.release.sys.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(value) : "memory");
  return old;
}
WEFT_DEVICE uint64_t add_release(uint64_t* at, uint64_t value) {
  uint64_t old;
  asm volatile("atom.add.release.sys.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(at), "l"(value) : "memory");
  return old;
}
// Block scope; `at` is usually in shared memory.
WEFT_DEVICE uint32_t load_acquire_block(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
WEFT_DEVICE void store_release_block(uint32_t* at, uint32_t value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Within one device. `at` may be in shared memory.
WEFT_DEVICE uint32_t add_local(uint32_t* at, uint32_t value) {
  return atomicAdd(at, value);
}
WEFT_DEVICE int32_t add_local(int32_t* at, int32_t value) {
  return atomicAdd(at, value);
}
WEFT_DEVICE uint64_t add_local(uint64_t* at, uint64_t value) {
  return atomicAdd(at, value);
}
WEFT_DEVICE uint32_t add_local_acq_rel(uint32_t* at, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(value) : "memory");
  return old;
}
WEFT_DEVICE uint32_t exchange_local(uint32_t* at, uint32_t value) {
  return atomicExch(at, value);
}
// Orders everything before it against everything after it, for peers too.
WEFT_DEVICE void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

WEFT_DEVICE Vec16 load_vec(const Vec16* at) {
  Vec16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(at)
               : "memory");
  return v;
}
// For data that nobody writes while the kernel runs and that is read once.
WEFT_DEVICE Vec16 load_vec_streaming(const Vec16* at) {
  Vec16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(at)
               : "memory");
  return v;
}
// Of memory that a peer writes while the kernel runs: see load_signal().
WEFT_DEVICE Vec16 load_vec_fresh(const Vec16* at) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(at)
               : "memory");
  return v;
}
WEFT_DEVICE void store_vec(Vec16* at, Vec16 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.words[0]), "r"(v.words[1]),
               "r"(v.words[2]), "r"(v.words[3])
               : "memory");
}
WEFT_DEVICE void store_vec_streaming(Vec16* at, Vec16 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.words[0]),
               "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
               : "memory");
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

// How many vectors of each of four rows a thread sums at once: as many as fit into registers beside what a
// long kernel keeps there. Memory is far.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
inline constexpr uint32_t kSumVecs = 4;
#else
inline constexpr uint32_t kSumVecs = 3;
#endif

// Asks for a line to be brought near; may do nothing.
WEFT_DEVICE void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// ---- numbers
// -----------------------------------------------------------------------------------------------------

// One rounding each: the compiler may not fuse them, so that every target gives the same bits.
WEFT_DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
WEFT_DEVICE float add(float a, float b) {
  return __fadd_rn(a, b);
}
WEFT_DEVICE float divide(float a, float b) {
  return __fdiv_rn(a, b);
}

// Four floats as float8_e4m3fn, first in the low byte: nearest even; above 448 it is 448.
WEFT_DEVICE uint32_t e4m3x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint16_t low;
  uint16_t high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return low | static_cast<uint32_t>(high) << 16;
#else
  return e4m3_portable(a) | e4m3_portable(b) << 8 | e4m3_portable(c) << 16 | e4m3_portable(d) << 24;
#endif
}

// FP16 to float32 and back, to nearest, ties to even.
WEFT_DEVICE float float_of_f16(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
}
WEFT_DEVICE uint32_t f16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// A line that a peer writes while this thread polls it: each 8-byte half is whole.
WEFT_DEVICE Vec16 load_line(const Vec16* at) {
  Vec16 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(at)
               : "memory");
  return v;
}
WEFT_DEVICE void store_line(Vec16* at, Vec16 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.words[0]),
               "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
               : "memory");
}
// Where a peer may look for a line's tag at the same time, and find something else. `at` may be in shared
// memory.
template <class T>
WEFT_DEVICE void store_watched(T* at, T value) {
  *at = value;
}
// Lanes of a warp that load the parts of a 128-byte line with one instruction get what was there at one time.
inline constexpr bool kLoadsLinesWhole = true;
// A part of a 128-byte line that the lanes of a warp store with one instruction, so that it arrives whole.
WEFT_DEVICE void store_line_part(Vec16* at, Vec16 v, bool /*is_last*/) {
  store_line(at, v);
}

// The eight bf16 of a Vec16 and their float32 sums: sums[0..3] belong to the low halves of the words,
// sums[4..7] to the high ones. Rounding is to nearest, ties to even.
WEFT_DEVICE void add_bf16x8(float (&sums)[8], const Vec16& vec) {
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    sums[i] += __uint_as_float(vec.words[i] << 16);
    sums[4 + i] += __uint_as_float(vec.words[i] & 0xffff0000u);
  }
}
WEFT_DEVICE Vec16 round_bf16x8(const float (&sums)[8]) {
  Vec16 vec;
  WEFT_UNROLL
  for (uint32_t i = 0; i < 4; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(vec.words[i]) : "f"(sums[4 + i]), "f"(sums[i]));
  return vec;
}

// ---- row pipe
// ----------------------------------------------------------------------------------------------------

WEFT_DEVICE uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
namespace bulk {

WEFT_DEVICE void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
// Makes initialised barriers and finished generic accesses visible to the bulk copy engine.
WEFT_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

WEFT_DEVICE void load(std::byte* stage, const std::byte* src, uint32_t bytes, uint64_t* barrier) {
  const uint32_t b = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(stage)),
      "l"(src), "r"(bytes), "r"(b)
      : "memory");
}
WEFT_DEVICE void wait_loaded(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
WEFT_DEVICE void store(std::byte* dst, const std::byte* stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
               "r"(shared_address(stage)), "r"(bytes)
               : "memory");
}
WEFT_DEVICE void commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <uint32_t kPending>
WEFT_DEVICE void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <uint32_t kPending>
WEFT_DEVICE void wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace bulk

// Streams items (rows or pieces of rows) to one or more places each.
//   pipe.run(next, sink): next() -> RowItem, one without a source ends; sink(tag, stage) calls
//   pipe.store(dst, stage).
// All lanes call run(), next(), sink() and store(); each lane gives store() its own place, or null. Loads run
// ahead of stores by half the stages. After drain() every store is visible to a peer that acquires a later
// release by lane 0 of this warp; after drain_but<n>() every store but those of the last n items. A relaxed
// store may overtake drained rows on NVLink (seen on H200).
template <uint32_t kStages>
class RowPipe {
 public:
  static constexpr uint32_t kAhead = kStages / 2;
  static constexpr uint32_t kBarrierBytes = 128;
  static_assert(kStages * 8 <= kBarrierBytes && kStages >= 2);

  WEFT_DEVICE RowPipe(Warp warp, std::byte* shared, uint32_t piece_bytes)
      : barriers_(reinterpret_cast<uint64_t*>(shared)),
        stages_(shared + kBarrierBytes),
        piece_bytes_(piece_bytes),
        warp_(warp) {
    if (warp_.rank() == 0) {
      for (uint32_t i = 0; i < kStages; ++i) bulk::barrier_init(&barriers_[i]);
      bulk::fence_async_shared();
    }
    warp_.sync();
  }

  template <class Next, class Sink>
  WEFT_DEVICE void run(Next next, Sink sink) {
    decltype(next()) loading[kAhead] = {};  // oldest first
    for (bool more = true; more || stored_ != loaded_;) {
      const auto oldest = loading[0];
      WEFT_UNROLL
      for (uint32_t i = 1; i < kAhead; ++i) loading[i - 1] = loading[i];
      loading[kAhead - 1] = {};
      if (more) loading[kAhead - 1] = next();
      more = more && loading[kAhead - 1].piece.src;
      if (more) load(loading[kAhead - 1].piece);
      if (!oldest.piece.src) continue;
      bulk::wait_loaded(&barriers_[stored_ % kStages], (stored_ / kStages) & 1);
      sink(oldest.tag, RowPiece{stages_ + (stored_ % kStages) * piece_bytes_, oldest.piece.bytes});
      bulk::commit();
      ++stored_;
    }
  }
  WEFT_DEVICE void store(std::byte* dst, RowPiece stage) {
    if (dst) bulk::store(dst, stage.src, stage.bytes);
  }
  template <uint32_t kItems>
  WEFT_DEVICE void drain_but() {
    bulk::wait_written<kItems>();
    warp_.sync();
  }
  WEFT_DEVICE void drain() { drain_but<0>(); }

 private:
  WEFT_DEVICE void load(RowPiece piece) {
    // The stage was last stored kStages items ago; at most kStages - kAhead - 1 items were committed since.
    bulk::wait_read<kStages - kAhead - 1>();
    warp_.sync();
    if (warp_.rank() == 0)
      bulk::load(stages_ + (loaded_ % kStages) * piece_bytes_, piece.src, piece.bytes,
                 &barriers_[loaded_ % kStages]);
    ++loaded_;
  }

  uint64_t* barriers_;
  std::byte* stages_;
  uint32_t piece_bytes_;
  Warp warp_;
  uint32_t loaded_ = 0;  // items so far: stages and barrier phases continue across runs
  uint32_t stored_ = 0;
};
#else
// Before sm_90 the same object copies with loads and stores, straight from the source.
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
    for (uint32_t lane = 0; lane < warp_.size(); ++lane) {
      auto* to = reinterpret_cast<Vec16*>(warp_.broadcast(reinterpret_cast<uint64_t>(dst), lane));
      if (!to) continue;
      for (uint32_t i = warp_.rank(); i < stage.bytes / 16; i += warp_.size())
        store_vec(to + i, load_vec(from + i));
    }
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
#endif

// ---- time
// --------------------------------------------------------------------------------------------------------

WEFT_DEVICE uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// For measuring waits: cycles of this multiprocessor.
WEFT_DEVICE uint64_t cycles() {
  return static_cast<uint64_t>(clock64());
}

// About that long, at most 1 ms; for polls that are in no hurry.
WEFT_DEVICE void pause_ns(uint32_t ns) {
  __nanosleep(ns);
}

WEFT_DEVICE void pause(uint32_t polls) {
  // Many warps that poll without a pause slow low-latency combine down severely (seen on H200).
  __nanosleep(polls < 4 ? 50 : 300);
}

// The same for a word in shared memory, at which a warp may look without disturbing others.
WEFT_DEVICE void pause_near(uint32_t /*polls*/) {}

// A loop that waits looks at the clock and the fault box after so many looks in vain, for the first time
// after kFirstCheck. The box is in host memory: reads of it take some 0.6 us each, one after the other, so
// that all warps of a GPU together take more than a millisecond. Where waits of less led to a check, one late
// call made the peers' warps check, which made the next call late (seen on H200).
inline constexpr uint32_t kLooksPerCheck = 4096, kFirstCheck = kLooksPerCheck - 1;

}  // namespace weft
