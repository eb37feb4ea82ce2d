// SPDX-License-Identifier: Apache-2.0
//
// Memory as CUDA kernels see it: words with scope and order, atomics, 16-byte vectors, lines that are polled.
// System scope is what peers and the host see; .gpu is one GPU, .cta one block.
#pragma once

#include "kernels/target/cuda/language.h"

namespace weft {

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
// A look at a signal that a peer may write, cheap enough to repeat. A thread that sees what it waits for acquires then.
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
// Within one device: publishes what the thread knew before to who acquires the word there.
WEFT_DEVICE void store_release_local(uint64_t* at, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
WEFT_DEVICE void store_release_local(uint32_t* at, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Raises a word to `value` unless it is more already, and publishes what the thread knew before, as above.
WEFT_DEVICE void max_local_release(uint64_t* at, uint64_t value) {
  asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// Writes a register of a NIC after everything that the thread knew before is visible to the NIC.
WEFT_DEVICE void store_register(uint64_t* at, uint64_t value) {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// The same where all that the NIC is to see lies in the device's own memory: the NIC's reads go through the device's L2, where
// this fence has brought it. The memory model names no NIC; NVSHMEM and DOCA order their queues so.
WEFT_DEVICE void store_register_local(uint64_t* at, uint64_t value) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// After store_register(): publishes what the thread knew before it to who sees the word there, within one device. The fence
// is that of the register; another would wait until the register's write has reached the NIC.
WEFT_DEVICE void store_after_register(uint64_t* at, uint64_t value) {
  store_relaxed(at, value);
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
// Lanes of a warp that load the parts of a 128-byte line with one instruction get what was there at one time.
inline constexpr bool kLoadsFullLines = true;
// A part of a 128-byte line that the lanes of a warp store with one instruction, so that it arrives whole.
WEFT_DEVICE void store_line_part(Vec16* at, Vec16 v, bool /*is_last*/) {
  store_line(at, v);
}
// The same of one that they load with one instruction.
WEFT_DEVICE Vec16 load_line_part(const Vec16* at) {
  return load_line(at);
}

}  // namespace weft
