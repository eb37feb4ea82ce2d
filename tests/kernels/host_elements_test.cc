// SPDX-License-Identifier: Apache-2.0
// Vectors that a host thread combines as wholes: the same bits as an element after the other.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "kernels/collective/element.cuh"

namespace weft {
namespace {

using element::Average;
using element::Brain;
using element::Combiner;
using element::Half;
using element::Max;
using element::Min;
using element::Plain;
using element::Product;
using element::Sum;

template <class Combiner>
class Vectors : public ::testing::Test {};
using Kinds = ::testing::Types<
    Combiner<Brain, Sum>, Combiner<Brain, Average>, Combiner<Brain, Product>, Combiner<Brain, Min>,
    Combiner<Brain, Max>, Combiner<Half, Sum>, Combiner<Half, Average>, Combiner<Half, Product>,
    Combiner<Half, Min>, Combiner<Half, Max>, Combiner<Plain<float>, Sum>, Combiner<Plain<float>, Average>,
    Combiner<Plain<float>, Product>, Combiner<Plain<float>, Min>, Combiner<Plain<float>, Max>>;
TYPED_TEST_SUITE(Vectors, Kinds);

bool is_nan(uint16_t bits, Brain) {
  return (bits & 0x7fffu) > 0x7f80u;
}
bool is_nan(uint16_t bits, Half) {
  return (bits & 0x7fffu) > 0x7c00u;
}
bool is_nan(float value, Plain<float>) {
  return value != value;
}

template <class Format, class Op>
Format format_of(Combiner<Format, Op>) {
  return {};
}

// The same bits; where one has NaN, any NaN.
template <class Kind>
void expect_same(const Vec16& whole, const Vec16& each, const typename Kind::Elements& x,
                 const typename Kind::Elements& y) {
  using Format = decltype(format_of(Kind{}));
  const auto got = __builtin_bit_cast(typename Kind::Elements, whole);
  const auto expected = __builtin_bit_cast(typename Kind::Elements, each);
  for (uint32_t i = 0; i < Kind::kPerVec; ++i) {
    if (is_nan(expected.values[i], Format{}))
      ASSERT_TRUE(is_nan(got.values[i], Format{})) << x.values[i] << " and " << y.values[i];
    else
      ASSERT_EQ(std::memcmp(&got.values[i], &expected.values[i], sizeof(got.values[i])), 0)
          << x.values[i] << " and " << y.values[i];
  }
}

// All numbers that 16 bits have, and their like of 32, beside random ones: zeros of both signs, the smallest, infinities, NaN.
TYPED_TEST(Vectors, AreCombinedToTheSameBits) {
  static_assert(element::kHasLanesOf<typename TypeParam::Lanes>);
  constexpr uint32_t kNumbers = TypeParam::kPerVec, kBits = 128 / kNumbers;
  typename TypeParam::Elements x, y;
  std::mt19937 random(7);
  for (uint32_t turn = 0; turn < 1 << 16; ++turn) {
    for (uint32_t i = 0; i < kNumbers; ++i) {
      const uint32_t first = (turn + i * 8191) << (kBits - 16) | (random() & ((1u << (kBits - 16)) - 1));
      const uint32_t second = turn % 16 == 0 ? first ^ 1u << (kBits - 1) : static_cast<uint32_t>(random());
      std::memcpy(&x.values[i], &first, kBits / 8);
      std::memcpy(&y.values[i], &second, kBits / 8);
    }
    const auto a = __builtin_bit_cast(Vec16, x), b = __builtin_bit_cast(Vec16, y);
    const Vec16 sum = TypeParam::apply(a, b), sum_each = TypeParam::apply_each(a, b);
    expect_same<TypeParam>(sum, sum_each, x, y);
    if constexpr (TypeParam::kIsAverage)
      expect_same<TypeParam>(TypeParam::finish(sum, 3), TypeParam::finish_each(sum_each, 3), x, y);
    if (this->HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace weft
