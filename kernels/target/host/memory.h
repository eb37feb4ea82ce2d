// SPDX-License-Identifier: Apache-2.0
//
// Memory as host kernels see it: words with order, 16-byte vectors, copies of rows, lines that are polled.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels/target/host/language.h"

namespace weft {

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
// A look at a signal that a peer may write, cheap enough to repeat. A thread that sees what it waits for acquires then.
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
// Within one device: publishes what the thread knew before to who acquires the word there.
template <class T>
void store_release_local(T* at, T value) {
  store_release(at, value);
}
// Raises a word to `value` unless it is more already, and publishes what the thread knew before, as above.
inline void max_local_release(uint64_t* at, uint64_t value) {
  std::atomic_ref<uint64_t> word(*at);
  for (uint64_t seen = word.load(std::memory_order_relaxed); seen < value;)
    if (word.compare_exchange_weak(seen, value, std::memory_order_release, std::memory_order_relaxed)) return;
}
// Writes a register of a NIC after everything that the thread knew before is visible to the NIC.
inline void store_register(uint64_t* at, uint64_t value) {
  store_release(at, value);
  publish_streaming_stores();  // registers may be memory that combines writes
}
// The same where all that the NIC is to see lies in the device's own memory.
inline void store_register_local(uint64_t* at, uint64_t value) {
  store_register(at, value);
}
// After store_register(): publishes what the thread knew before it to who sees the word there, within one device.
inline void store_after_register(uint64_t* at, uint64_t value) {
  store_release(at, value);
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

// As they say for GPUs (kernels/target/gpu.h). A block is a thread or two; a core looks ahead by itself along a row, and
// starts anew with every other one; it has neither far memory nor few registers.
inline constexpr bool kHasFewBlocks = true, kIsAllNear = true, kAsksAhead = true;
inline constexpr uint32_t kSendVecs = 16, kSendRows = 1, kReceiveVecs = 16, kReceiveRows = 1, kOwnRows = 1;

// Copies by one thread as the system's library does, which knows the machine's best way for every size;
// false where a target has nothing better than a loop over vectors.
inline constexpr bool kCopiesAlone = true;
inline bool copy_by_thread(void* dst, const void* src, uint64_t bytes) {
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
  return copy_by_thread(to, from, bytes);
#else
  return copy_by_thread(dst, src, bytes);
#endif
}

// The same past the caches, for what nobody reads soon: they need not fetch then what is overwritten. Of rows of 14 KiB
// 8.2 GB/s instead of copy_cold()'s 5.9, and 15 instead of 7.7 where `src` is in a cache (2 cores of an EPYC at once).
inline bool copy_past_caches(void* dst, const void* src, uint64_t bytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  constexpr uint64_t kStep = 64, kSrcAhead = 2048;
  const auto* from = static_cast<const std::byte*>(src);
  auto* to = static_cast<std::byte*>(dst);
  if (bytes == 0 || reinterpret_cast<uint64_t>(to) % sizeof(Vec16) != 0)
    return copy_by_thread(dst, src, bytes);
  detail::touch(to);
  detail::touch(to + bytes - 1);
  for (; bytes >= kStep; bytes -= kStep, from += kStep, to += kStep) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kSrcAhead), _MM_HINT_T0);
    __m128i held[kStep / 16];
    for (uint64_t i = 0; i < kStep / 16; ++i)
      held[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (uint64_t i = 0; i < kStep / 16; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, held[i]);
  }
  return copy_by_thread(to, from, bytes);
#else
  return copy_by_thread(dst, src, bytes);
#endif
}

// A row, past the caches where it will not be read soon.
inline bool copy_row_by_thread(void* dst, const void* src, uint64_t bytes, bool past_caches) {
  return past_caches ? copy_past_caches(dst, src, bytes) : copy_by_thread(dst, src, bytes);
}
// Vectors [first, last) of a row, as many as there is room for.
template <uint32_t kVecs>
void load_row_by_thread(Vec16 (&held)[kVecs], const Vec16* row, uint32_t first, uint32_t last) {
  for (uint32_t v = 0; v < kVecs; ++v)
    if (first + v < last) held[v] = load_vec(row + first + v);
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
// A store without order, where a peer may load at the same time, in search of a line's tag.
template <class T>
inline void store_unordered(T* at, T value) {
  if constexpr (sizeof(T) == sizeof(Vec16))
    store_line(at, value);
  else
    std::atomic_ref<T>(*at).store(value, std::memory_order_relaxed);
}
// One thread loads the parts of a line one after the other.
inline constexpr bool kLoadsFullLines = false;
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
// A part of a line that is loaded after its tag.
inline Vec16 load_line_part(const Vec16* at) {
  return load_line(at);
}

}  // namespace weft
