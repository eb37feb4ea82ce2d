// SPDX-License-Identifier: Apache-2.0
//
// Memory as HIP kernels see it: words with scope and order, atomics, 16-byte vectors, lines that are polled.
// Scopes: system = what peers and the host see; agent = one GPU.
#pragma once

#include "kernels/target/hip/language.h"

namespace weft {

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
// Within one device: publishes what the thread knew before to who acquires the word there.
WEFT_DEVICE void store_release_local(uint64_t* at, uint64_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
WEFT_DEVICE void store_release_local(uint32_t* at, uint32_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
// Raises a word to `value` unless it is more already, and publishes what the thread knew before, as above.
WEFT_DEVICE void max_local_release(uint64_t* at, uint64_t value) {
  __hip_atomic_fetch_max(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
// Writes a register of a NIC after everything that the thread knew before is visible to the NIC.
WEFT_DEVICE void store_register(uint64_t* at, uint64_t value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
// The same where all that the NIC is to see lies in the device's own memory. Nobody has asked the hardware what less is enough.
WEFT_DEVICE void store_register_local(uint64_t* at, uint64_t value) {
  store_register(at, value);
}
// After store_register(): publishes what the thread knew before it to who sees the word there, within one device.
WEFT_DEVICE void store_after_register(uint64_t* at, uint64_t value) {
  store_release_local(at, value);
}
// A look at a signal that a peer may write, cheap enough to repeat. A thread that sees what it waits for acquires then.
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

// How many vectors of each of four rows a thread sums at once.
inline constexpr uint32_t kSumVecs = 2;

// Asks for a line to be brought near; may do nothing.
WEFT_DEVICE void prefetch(const void* at) {
  __builtin_prefetch(at);
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
// Lanes that load the parts of a line at one time may get them from different times.
inline constexpr bool kLoadsFullLines = false;
// A part of a line whose last word says that the whole line is there; `is_last` for that part.
WEFT_DEVICE void store_line_part(Vec16* at, Vec16 v, bool /*is_last*/) {
  store_line(at, v);
}
// A part of a line that the lanes load at one time.
WEFT_DEVICE Vec16 load_line_part(const Vec16* at) {
  return load_line(at);
}

}  // namespace weft
