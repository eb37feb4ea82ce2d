// SPDX-License-Identifier: Apache-2.0
//
// The host target: a rank is a process (or a thread, in tests), a warp is one thread, a block is one or more.
// See target.h for what the targets have in common.
#pragma once

#include <sched.h>
#include <sys/uio.h>
#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define WEFT_DEVICE inline
#define WEFT_KERNEL inline
#define WEFT_UNROLL  // before a loop whose trip count is constant; the compiler decides
#define WEFT_ROLLED  // before a loop that is short and should stay small
// Before a loop whose iterations are independent. Clang's own pragma warns wherever it is of no use.
#if defined(__clang__)
#define WEFT_STREAM_LOOP
#else
#define WEFT_STREAM_LOOP _Pragma("GCC ivdep")
#endif
#define WEFT_HOST_TARGET 1

#include "kernels/target/portable.h"

namespace weft {

// ---- groups
// ------------------------------------------------------------------------------------------------------

// A barrier for the threads of one block. Yields while it waits: blocks may have more threads than there are
// cores.
class BlockBarrier {
 public:
  explicit BlockBarrier(uint32_t threads) : threads_(threads) {}
  void wait() {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    while (generation_.load(std::memory_order_acquire) == generation) sched_yield();
  }

 private:
  const uint32_t threads_;
  std::atomic<uint32_t> arrived_{0};
  std::atomic<uint32_t> generation_{0};
};

// What a thread does while it waits: its ports' work, for which another thread had to be woken otherwise.
struct HostHelp {
  bool (*once)(void* what) = nullptr;  // whether anything came of it; null: nothing to do
  void* what = nullptr;
};

// Where the calling thread stands in its launch. The launcher sets it before it calls the kernel.
struct HostThread {
  uint32_t block = 0;
  uint32_t blocks = 1;
  uint32_t warp = 0;
  uint32_t warps = 1;
  std::byte* shared = nullptr;      // the block's shared memory, 128-byte aligned
  BlockBarrier* barrier = nullptr;  // null where the block has one thread
  HostHelp help;
};
inline thread_local HostThread host_thread;

struct Block {
  uint32_t index() const { return host_thread.block; }
  uint32_t count() const { return host_thread.blocks; }
  uint32_t rank() const { return host_thread.warp; }
  uint32_t size() const { return host_thread.warps; }
  uint32_t warps() const { return host_thread.warps; }
  std::byte* shared() const { return host_thread.shared; }
  void sync() const {
    if (host_thread.barrier) host_thread.barrier->wait();
  }
};

struct Warp {
  static constexpr uint32_t kMaxSize = 1;
  uint32_t index() const { return host_thread.warp; }  // within its block
  uint32_t rank() const { return 0; }
  uint32_t size() const { return 1; }
  void sync() const {}
  template <class T>
  T broadcast(T value, uint32_t /*from*/ = 0) const {
    return value;
  }
  template <class T>
  T sum(T value) const {
    return value;
  }
  template <class T>
  T max(T value) const {
    return value;
  }
  template <class T>
  T min(T value) const {
    return value;
  }
  // The largest value among each `kLanes` neighbours.
  template <uint32_t kLanes, class T>
  T max_within(T value) const {
    return value;
  }
  // The sum of the values of lower ranks.
  template <class T>
  T scan_exclusive(T /*value*/) const {
    return T{};
  }
  bool any(bool value) const { return value; }
  // Of how many threads, and of how many of lower rank, the value is true.
  uint32_t count(bool value) const { return value ? 1 : 0; }
  uint32_t count_below(bool /*value*/) const { return 0; }
};

// ---- memory
// ------------------------------------------------------------------------------------------------------

struct alignas(16) Vec16 {
  uint32_t words[4];
};

// System scope: peers see it.
template <class T>
T load_acquire(const T* at) {
  return std::atomic_ref<T>(*const_cast<T*>(at)).load(std::memory_order_acquire);
}
template <class T>
T load_relaxed(const T* at) {
  return std::atomic_ref<T>(*const_cast<T*>(at)).load(std::memory_order_relaxed);
}
// A look at a signal that a peer may write, cheap enough to repeat; who sees what it waits for acquires then.
inline uint64_t peek(const uint64_t* at) {
  return load_relaxed(at);
}
// A look at a signal after which the thread branches, and then only stores, or loads what the signal says is
// there by load_relaxed() and load_vec_fresh(). Here it acquires.
inline uint64_t load_signal(const uint64_t* at) {
  return load_acquire(at);
}
// Streaming stores are not ordered by a release on x86; a store fence before it makes them so.
inline void publish_streaming_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
template <class T>
void store_release(T* at, T value) {
  publish_streaming_stores();
  std::atomic_ref<T>(*at).store(value, std::memory_order_release);
}
template <class T>
void store_relaxed(T* at, T value) {
  std::atomic_ref<T>(*at).store(value, std::memory_order_relaxed);
}
template <class T>
T add_release(T* at, T value) {
  publish_streaming_stores();
  return std::atomic_ref<T>(*at).fetch_add(value, std::memory_order_release);
}
// Two words that share 16 aligned bytes: whoever acquires the second sees the first. Released, they also publish what
// the thread knew before.
inline void store_pair_release(uint64_t* at, uint64_t first, uint64_t second) {
  store_relaxed(at, first);
  store_release(at + 1, second);
}
inline void store_pair(uint64_t* at, uint64_t first, uint64_t second) {
  store_relaxed(at, first);
  std::atomic_ref<uint64_t>(at[1]).store(second, std::memory_order_release);
}
// Tells a peer of what launches before this one did, which their end has finished.
inline void store_after_launch(uint64_t* at, uint64_t value) {
  store_release(at, value);
}
// Block scope; `at` is usually in shared memory.
inline uint32_t load_acquire_block(const uint32_t* at) {
  return load_acquire(at);
}
inline void store_release_block(uint32_t* at, uint32_t value) {
  std::atomic_ref<uint32_t>(*at).store(value, std::memory_order_release);
}
// Within one device.
template <class T>
T add_local(T* at, T value) {
  return std::atomic_ref<T>(*at).fetch_add(value, std::memory_order_relaxed);
}
template <class T>
T add_local_acq_rel(T* at, T value) {
  publish_streaming_stores();
  return std::atomic_ref<T>(*at).fetch_add(value, std::memory_order_acq_rel);
}
template <class T>
T exchange_local(T* at, T value) {
  return std::atomic_ref<T>(*at).exchange(value, std::memory_order_acq_rel);
}
// Orders everything before it against everything after it, for peers too.
inline void fence_system() {
  publish_streaming_stores();
}

inline Vec16 load_vec(const Vec16* at) {
  return *at;
}
inline Vec16 load_vec_streaming(const Vec16* at) {
  return *at;
}
// Of memory that a peer writes while the kernel runs: see load_signal().
inline Vec16 load_vec_fresh(const Vec16* at) {
  return *at;
}
inline void store_vec(Vec16* at, Vec16 value) {
  *at = value;
}
inline void store_vec_streaming(Vec16* at, Vec16 value) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  __m128i bits;
  std::memcpy(&bits, &value, sizeof(bits));
  _mm_stream_si128(reinterpret_cast<__m128i*>(at), bits);
#else
  *at = value;
#endif
}
// Whether results too large for the caches may be written past them.
inline constexpr bool kWritesPastCaches = true;
// Whether tests can make links slow (kernels/collective/link_delays.h).
inline constexpr bool kDelaysLinks = true;

// Copies bytes of another process's memory here; false where that is not allowed or not there. Linux's
// process_vm_readv(2): one copy, no memory that both must map.
inline constexpr bool kReadsProcesses = true;
inline bool read_process(uint32_t process, void* dst, uint64_t src, uint64_t bytes) {
  for (uint64_t done = 0; done < bytes;) {
    const iovec local{static_cast<std::byte*>(dst) + done, bytes - done};
    const iovec remote{reinterpret_cast<void*>(src + done), bytes - done};
    const ssize_t got = process_vm_readv(static_cast<pid_t>(process), &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    done += static_cast<uint64_t>(got);
  }
  return true;
}

namespace detail {

// Reads a byte. Linux maps shared memory page by page as it is first written, but 16 pages at once as it is
// first read.
inline void touch(const std::byte* at) {
  (void)*static_cast<const volatile std::byte*>(at);
}

}  // namespace detail

// Copies by one thread as the system's library does, which knows the machine's best way for every size;
// false where a target has nothing better than a loop over vectors.
inline bool copy_alone(void* dst, const void* src, uint64_t bytes) {
  if (dst != src) std::memcpy(dst, src, bytes);
  return true;
}

// The same for memory that is in no cache. Lines are asked for ahead, those of `dst` for writing: a core has
// too few misses under way otherwise (6.2 GB/s instead of 4.8 on the machine of docs/benchmarks.md).
inline bool copy_cold(void* dst, const void* src, uint64_t bytes) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  constexpr uint64_t kStep = 128, kSrcAhead = 2048, kDstAhead = 1024;
  const auto* from = static_cast<const std::byte*>(src);
  auto* to = static_cast<std::byte*>(dst);
  if (bytes == 0) return true;
  detail::touch(to);
  detail::touch(to + bytes - 1);
  for (; bytes >= kStep; bytes -= kStep, from += kStep, to += kStep) {
    for (uint64_t line = 0; line < kStep; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(from + kSrcAhead + line), _MM_HINT_T0);
      asm volatile("prefetchw %0" : : "m"(to[kDstAhead + line]));
    }
    __m128i held[kStep / 16];
    for (uint64_t i = 0; i < kStep / 16; ++i)
      held[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (uint64_t i = 0; i < kStep / 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, held[i]);
  }
  return copy_alone(to, from, bytes);
#else
  return copy_alone(dst, src, bytes);
#endif
}

// Copies a few bytes between places of any alignment.
template <uint32_t kBytes>
void copy_few(void* dst, const void* src) {
  std::memcpy(dst, src, kBytes);
}

// How many vectors of a row a thread sums at once.
inline constexpr uint32_t kSumVecs = 8;

// Asks for a line to be brought near; may do nothing.
inline void prefetch(const void* at) {
  __builtin_prefetch(at);
}

// ---- numbers
// -----------------------------------------------------------------------------------------------------

// One rounding each, as on the other targets.
inline float multiply(float a, float b) {
  return a * b;
}
inline float add(float a, float b) {
  return a + b;
}
inline float divide(float a, float b) {
  return a / b;
}

// Four floats as float8_e4m3fn, first in the low byte: nearest even; above 448 it is 448.
inline uint32_t e4m3x4(float a, float b, float c, float d) {
  return e4m3_portable(a) | e4m3_portable(b) << 8 | e4m3_portable(c) << 16 | e4m3_portable(d) << 24;
}

// FP16 to float32 and back, to nearest, ties to even.
inline float float_of_f16(uint32_t bits) {
  return f16_to_float_portable(bits);
}
inline uint32_t f16_bits(float value) {
  return float_to_f16_portable(value);
}

// A line that a peer writes while this thread polls it: each 8-byte half is whole.
inline Vec16 load_line(const Vec16* at) {
  const auto* halves = reinterpret_cast<const uint64_t*>(at);
  const uint64_t low = load_acquire(halves);
  const uint64_t high = load_acquire(halves + 1);
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}
// The second half first: who sees the new first half sees the new second one.
inline void store_line(Vec16* at, Vec16 v) {
  auto* halves = reinterpret_cast<uint64_t*>(at);
  store_relaxed(halves + 1, v.words[2] | uint64_t{v.words[3]} << 32);
  store_release(halves, v.words[0] | uint64_t{v.words[1]} << 32);
}
// Where a peer may look for a line's tag at the same time, and find something else.
template <class T>
inline void store_watched(T* at, T value) {
  if constexpr (sizeof(T) == sizeof(Vec16))
    store_line(at, value);
  else
    std::atomic_ref<T>(*at).store(value, std::memory_order_relaxed);
}
// One thread loads the parts of a line one after the other.
inline constexpr bool kLoadsLinesWhole = false;
// A part of a line whose last word says that the whole line is there; `is_last` for that part.
inline void store_line_part(Vec16* at, Vec16 v, bool is_last) {
  auto* halves = reinterpret_cast<uint64_t*>(at);
  store_relaxed(halves, v.words[0] | uint64_t{v.words[1]} << 32);
  const uint64_t high = v.words[2] | uint64_t{v.words[3]} << 32;
  if (is_last)
    store_release(halves + 1, high);
  else
    store_relaxed(halves + 1, high);
}

namespace detail {

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));

inline Word4 bf16_bits_of(Float4 values) {
  const Word4 bits = reinterpret_cast<Word4>(values);
  const Word4 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Signed, since x86 compares vectors of signed integers only.
  typedef int32_t Int4 __attribute__((vector_size(16)));
  const Int4 infinity = {0x7f800000, 0x7f800000, 0x7f800000, 0x7f800000};
  const Word4 is_nan = reinterpret_cast<Word4>(reinterpret_cast<Int4>(bits & 0x7fffffffu) > infinity);
  return (is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded);
}

}  // namespace detail

// The eight bf16 of a Vec16 and their float32 sums: sums[0..3] belong to the low halves of the words,
// sums[4..7] to the high ones. Rounding is to nearest, ties to even.
inline void add_bf16x8(float (&sums)[8], const Vec16& vec) {
  detail::Float4 low, high;
  detail::Word4 words;
  std::memcpy(&low, sums, sizeof(low));
  std::memcpy(&high, sums + 4, sizeof(high));
  std::memcpy(&words, &vec, sizeof(words));
  low += reinterpret_cast<detail::Float4>(words << 16);
  high += reinterpret_cast<detail::Float4>(words & 0xffff0000u);
  std::memcpy(sums, &low, sizeof(low));
  std::memcpy(sums + 4, &high, sizeof(high));
}
inline Vec16 round_bf16x8(const float (&sums)[8]) {
  detail::Float4 low, high;
  std::memcpy(&low, sums, sizeof(low));
  std::memcpy(&high, sums + 4, sizeof(high));
  const detail::Word4 words = detail::bf16_bits_of(low) | detail::bf16_bits_of(high) << 16;
  Vec16 vec;
  std::memcpy(&vec, &words, sizeof(vec));
  return vec;
}

// ---- row pipe
// ----------------------------------------------------------------------------------------------------

// Streams items (rows or pieces of rows) to one or more places each. On the host the source itself is the
// stage.
//   pipe.run(next, sink): next() -> RowItem, one without a source ends; sink(tag, stage) calls
//   pipe.store(dst, stage).
// All lanes call run(), next(), sink() and store(); each lane gives store() its own place, or null.
// After drain() every store is visible to a peer that acquires a later release by this warp; after
// drain_but<n>() every store but those of the last n items.
template <uint32_t kStages>
class RowPipe {
 public:
  RowPipe(Warp, std::byte* /*shared*/, uint32_t /*piece_bytes*/) {}

  template <class Next, class Sink>
  void run(Next next, Sink sink) {
    for (auto item = next(); item.piece.src; item = next()) sink(item.tag, item.piece);
  }
  void store(std::byte* dst, RowPiece stage) {
    if (dst) copy_cold(dst, stage.src, stage.bytes);
  }
  template <uint32_t kItems>
  void drain_but() {}
  void drain() {}
};

// ---- time
// --------------------------------------------------------------------------------------------------------

inline uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// For measuring waits. There is no portable cycle counter, so these are nanoseconds.
inline uint64_t cycles() {
  return now_ns();
}

// About that long, at most 1 ms; for polls that are in no hurry.
inline void pause_ns(uint32_t /*ns*/) {
  sched_yield();
}

// A loop that waits looks at the clock and the fault box after so many looks in vain, for the first time
// after kFirstCheck. Both are near here.
inline constexpr uint32_t kLooksPerCheck = 64, kFirstCheck = 0;

// One pause of a polling loop that has polled `polls` times. There may be more ranks than cores, so it yields
// soon; and there may be more busy processes than cores, who would be given a whole time slice for every
// yield, so it then sleeps: who sleeps is woken before those.
inline void pause(uint32_t polls) {
  if (host_thread.help.once && host_thread.help.once(host_thread.help.what)) return;
  if (polls < 16) return;
  if (polls < 128) {
    sched_yield();
    return;
  }
  const timespec nap{0, 20'000};
  nanosleep(&nap, nullptr);
}
// The same for a word in shared memory.
inline void pause_near(uint32_t polls) {
  pause(polls);
}

}  // namespace weft
