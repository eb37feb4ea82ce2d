// SPDX-License-Identifier: Apache-2.0
// Rows that one host thread adds as wholes: the same bits as an element after the other, on every CPU.
#include "kernels/target/host/sums.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "kernels/core/numbers.cuh"

namespace weft {
namespace {

constexpr uint64_t kMostBytes = 2048;
constexpr uint64_t kElements = kMostBytes / 2;

// Every kind of number, NaN and the largest ones too.
std::vector<uint16_t> random_rows(uint64_t elements, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> rows(elements);
  for (uint16_t& element : rows) element = static_cast<uint16_t>(random());
  return rows;
}

uint32_t summed(const std::vector<uint16_t>& rows, const std::vector<float>& weights, uint64_t at,
                bool is_weighted) {
  volatile float sum = 0.0f;  // every step is rounded
  for (uint64_t row = 0; row < weights.size(); ++row) {
    volatile float term = float_of_bf16(rows[row * kElements + at]);
    if (is_weighted) term = term * weights[row];
    sum = sum + term;
  }
  return bf16_bits(sum);
}

bool is_nan(uint32_t bits) {
  return (bits & 0x7fffu) > 0x7f80u;
}

template <bool kIsWeighted>
void check(detail::SumBf16 sum, uint32_t count, uint64_t bytes, bool past_caches) {
  const std::vector<uint16_t> rows = random_rows(count * kElements, count);
  std::vector<float> weights(count);
  std::vector<AddedRow> added(count);
  for (uint32_t i = 0; i < count; ++i) {
    weights[i] = 0.37f * static_cast<float>(i) - 0.9f;
    added[i] = {reinterpret_cast<const std::byte*>(rows.data() + i * kElements), weights[i]};
  }
  struct alignas(16) Out {
    uint16_t elements[kElements + 8];
  };
  const auto out = std::make_unique<Out>();
  std::fill_n(out->elements, kElements + 8, uint16_t{0x1234});
  sum(reinterpret_cast<std::byte*>(out->elements), added.data(), count, bytes, past_caches);
  publish_streaming_stores();
  for (uint64_t at = 0; at < bytes / 2; ++at) {
    const uint32_t wanted = summed(rows, weights, at, kIsWeighted);
    // Which of two NaN an addition passes on is the compiler's choice.
    const bool is_same = is_nan(wanted) ? is_nan(out->elements[at]) : out->elements[at] == wanted;
    ASSERT_TRUE(is_same) << count << " rows of " << bytes << " bytes, element " << at << ": "
                         << out->elements[at] << ", expected " << wanted;
  }
  for (uint64_t at = bytes / 2; at < kElements + 8; ++at) ASSERT_EQ(out->elements[at], 0x1234) << at;
}

template <bool kIsWeighted>
std::vector<detail::SumBf16> ways() {
  std::vector<detail::SumBf16> all{detail::sum_bf16_anywhere<kIsWeighted>};
#if defined(__x86_64__)
  if (detail::widest_vector_bytes() >= 32) all.push_back(detail::sum_bf16_by_avx2<kIsWeighted>);
  if (detail::widest_vector_bytes() >= 64) all.push_back(detail::sum_bf16_by_avx512<kIsWeighted>);
#endif
  return all;
}

template <bool kIsWeighted>
void check_all() {
  for (const detail::SumBf16 sum : ways<kIsWeighted>())
    for (const uint32_t count : {0u, 1u, 2u, 8u, kMostAddedRows})
      for (const uint64_t bytes : {0, 16, 48, 64, 240, 272, 1024, 2032, 2048})
        for (const bool past_caches : {false, true}) check<kIsWeighted>(sum, count, bytes, past_caches);
}

TEST(HostSums, OfRowsAreThoseOfTheirElements) {
  check_all<false>();
}

TEST(HostSums, OfWeightedRowsRoundEveryProduct) {
  check_all<true>();
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
TEST(HostSums, TheWidestVectorsAreThoseThatTheCompilerSees) {
  const uint32_t seen = __builtin_cpu_supports("avx512bw") ? 64 : __builtin_cpu_supports("avx2") ? 32 : 16;
  EXPECT_EQ(detail::widest_vector_bytes(), seen);
}
#endif

}  // namespace
}  // namespace weft
