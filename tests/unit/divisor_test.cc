// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/divisor.h"

#include <gtest/gtest.h>

#include <random>

namespace weft {
namespace {

void expect_divides(uint32_t number, uint32_t by) {
  EXPECT_EQ(number / Divisor::of(by), number / by) << number << " / " << by;
  EXPECT_EQ(number % Divisor::of(by), number % by) << number << " % " << by;
}

TEST(Divisor, DividesLikeADivision) {
  std::mt19937 random(1);
  constexpr uint32_t kMost = ~uint32_t{0};
  for (uint32_t by = 1; by < 3000; ++by)
    for (uint32_t number : {0u, 1u, by - 1, by, by + 1, 7 * by - 1, 7 * by, kMost / by * by - 1,
                            kMost / by * by, kMost - 1, kMost, static_cast<uint32_t>(random())})
      expect_divides(number, by);
  for (uint32_t bits = 1; bits < 32; ++bits)
    for (uint32_t by : {(1u << bits) - 1, 1u << bits, (1u << bits) + 1})
      for (uint32_t number : {0u, by - 1, by, kMost - by, kMost}) expect_divides(number, by);
  for (uint32_t turn = 0; turn < 100000; ++turn)
    expect_divides(static_cast<uint32_t>(random()), static_cast<uint32_t>(random() >> random() % 32) | 1);
  expect_divides(kMost, kMost);
}

}  // namespace
}  // namespace weft
