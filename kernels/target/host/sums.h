// SPDX-License-Identifier: Apache-2.0
//
// Sums of whole rows by one thread, compiled for more than one kind of CPU: the widest one that this machine is of runs.
//   AddedRow rows[] = {{first, 0.5f}, {second, 0.25f}};
//   sum_bf16_by_thread<true>(out, rows, 2, row_bytes, true);
// Bit for bit what an element after the other gives: float32 from 0 on, rows in order, one rounding of each product, of each
// sum, and of the result.
#pragma once

#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/target/host/memory.h"

namespace weft {

inline constexpr bool kSumsByThread = true;

namespace detail {

// How far before it is added a line is asked for. A core looks ahead by itself along a row, but not along eight at once, nor
// past the end of a page.
inline constexpr uint64_t kSumAhead = 2048;

template <uint32_t kBytes>
struct Lanes {
  typedef float Floats __attribute__((vector_size(kBytes)));
  typedef uint32_t Words __attribute__((vector_size(kBytes)));
  typedef int32_t Signed __attribute__((vector_size(kBytes)));

  // What bf16_bits() gives, in the lower halves. By reference: vectors of a kind that not every CPU has are no arguments.
  [[gnu::always_inline]] static void round(const Floats& values, Words& rounded) {
    const Words bits = reinterpret_cast<Words>(values);
    const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // Signed, since x86 compares vectors of signed integers only.
    const Words is_nan = reinterpret_cast<Words>(reinterpret_cast<Signed>(bits & 0x7fffffffu) > 0x7f800000);
    rounded = (is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & nearest);
  }
};

// Keeps a compiler from making one operation, with one rounding, of a product and the sum that it goes into. Clang makes that
// of one statement alone.
template <class Floats>
[[gnu::always_inline]] inline void keep_rounded([[maybe_unused]] Floats& product) {
#if defined(__clang__)
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
}

// Bytes [at, at + kVectors * kBytes) of the sum.
template <bool kIsWeighted, uint32_t kBytes, uint32_t kVectors>
[[gnu::always_inline]] inline void sum_bf16_piece(std::byte* out, const AddedRow* rows, uint32_t count,
                                                  uint64_t at, bool past_caches) {
  using Floats = typename Lanes<kBytes>::Floats;
  using Words = typename Lanes<kBytes>::Words;
  Floats low[kVectors] = {}, high[kVectors] = {};
  for (uint32_t r = 0; r < count; ++r) {
    const std::byte* row = rows[r].at + at;
    for (uint32_t line = 0; line < kVectors * kBytes; line += 64) __builtin_prefetch(row + kSumAhead + line);
    for (uint32_t v = 0; v < kVectors; ++v) {
      Words words;
      std::memcpy(&words, row + v * kBytes, kBytes);
      const Words low_bits = words << 16, high_bits = words & 0xffff0000u;
      Floats of_low = reinterpret_cast<Floats>(low_bits);
      Floats of_high = reinterpret_cast<Floats>(high_bits);
      if constexpr (kIsWeighted) {
        of_low *= rows[r].weight;
        of_high *= rows[r].weight;
        keep_rounded(of_low);
        keep_rounded(of_high);
      }
      low[v] += of_low;
      high[v] += of_high;
    }
  }
  for (uint32_t v = 0; v < kVectors; ++v) {
    Words of_low, of_high;
    Lanes<kBytes>::round(low[v], of_low);
    Lanes<kBytes>::round(high[v], of_high);
    const Words words = of_low | of_high << 16;
    auto* to = reinterpret_cast<Vec16*>(out + at + v * kBytes);
    Vec16 vecs[kBytes / 16];
    std::memcpy(vecs, &words, kBytes);
    for (uint32_t i = 0; i < kBytes / 16; ++i)
      if (past_caches)
        store_vec_streaming(to + i, vecs[i]);
      else
        store_vec(to + i, vecs[i]);
  }
}

template <bool kIsWeighted, uint32_t kBytes>
[[gnu::always_inline]] inline void sum_bf16_as(std::byte* out, const AddedRow* rows, uint32_t count,
                                               uint64_t bytes, bool past_caches) {
  constexpr uint32_t kVectors = 4;
  uint64_t at = 0;
  for (; at + kVectors * kBytes <= bytes; at += kVectors * kBytes)
    sum_bf16_piece<kIsWeighted, kBytes, kVectors>(out, rows, count, at, past_caches);
  for (; at < bytes; at += 16) sum_bf16_piece<kIsWeighted, 16, 1>(out, rows, count, at, past_caches);
}

using SumBf16 = void (*)(std::byte* out, const AddedRow* rows, uint32_t count, uint64_t bytes,
                         bool past_caches);

template <bool kIsWeighted>
void sum_bf16_anywhere(std::byte* out, const AddedRow* rows, uint32_t count, uint64_t bytes,
                       bool past_caches) {
  sum_bf16_as<kIsWeighted, 16>(out, rows, count, bytes, past_caches);
}
#if defined(__x86_64__)
template <bool kIsWeighted>
[[gnu::target("avx2")]] void sum_bf16_by_avx2(std::byte* out, const AddedRow* rows, uint32_t count,
                                              uint64_t bytes, bool past_caches) {
  sum_bf16_as<kIsWeighted, 32>(out, rows, count, bytes, past_caches);
}
template <bool kIsWeighted>
[[gnu::target("avx512f,avx512bw")]] void sum_bf16_by_avx512(std::byte* out, const AddedRow* rows,
                                                            uint32_t count, uint64_t bytes,
                                                            bool past_caches) {
  sum_bf16_as<kIsWeighted, 64>(out, rows, count, bytes, past_caches);
}
#endif

// Of the vectors that the CPU has and the system saves. By cpuid, since __builtin_cpu_supports() knows of none where zig
// has compiled it, as in wheels.
inline uint32_t widest_vector_bytes() {
#if defined(__x86_64__)
  constexpr uint32_t kSavesAvx = 0x06, kSavesAvx512 = 0xe6;
  uint32_t a = 0, b = 0, c = 0, d = 0, saved = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 16;
  asm volatile("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
  if ((saved & kSavesAvx) != kSavesAvx || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2))
    return 16;
  constexpr uint32_t kAvx512 = bit_AVX512F | bit_AVX512BW;
  return (saved & kSavesAvx512) == kSavesAvx512 && (b & kAvx512) == kAvx512 ? 64 : 32;
#else
  return 16;
#endif
}

template <bool kIsWeighted>
SumBf16 widest_sum_bf16() {
#if defined(__x86_64__)
  if (widest_vector_bytes() == 64) return sum_bf16_by_avx512<kIsWeighted>;
  if (widest_vector_bytes() == 32) return sum_bf16_by_avx2<kIsWeighted>;
#endif
  return sum_bf16_anywhere<kIsWeighted>;
}
template <bool kIsWeighted>
inline const SumBf16 kSumBf16 = widest_sum_bf16<kIsWeighted>();

}  // namespace detail

// Writes the bf16 sum of `count` bf16 rows, times their weights if it is weighted. Places and `bytes` are multiples of 16.
// past_caches: the sum is not read soon.
template <bool kIsWeighted>
bool sum_bf16_by_thread(std::byte* out, const AddedRow* rows, uint32_t count, uint64_t bytes,
                        bool past_caches) {
  detail::kSumBf16<kIsWeighted>(out, rows, count, bytes, past_caches);
  return true;
}

}  // namespace weft
