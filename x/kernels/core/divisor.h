// SPDX-License-Identifier: Apache-2.0
//
// Divisor is a number that is known before a launch and divides numbers in it: a GPU takes some 25
// instructions for a division, and this takes five.
//   args.parts = Divisor::of(plan.parts);      // on the host
//   const uint32_t part = item / args.parts;   // in a kernel, for any 32-bit item
// Granlund and Montgomery, Division by Invariant Integers using Multiplication (1994), figure 4.1.
#pragma once

#include "kernels/target/target.h"

namespace weft {

struct Divisor {
  uint32_t value;
  uint32_t magic;
  uint16_t first_shift;
  uint16_t last_shift;

  // `value`: at least 1.
  static WEFT_DEVICE constexpr Divisor of(uint32_t value) {
    uint32_t bits = 0;
    while (bits < 32 && (uint64_t{1} << bits) < value) ++bits;
    const uint64_t magic = (((uint64_t{1} << bits) - value) << 32) / value + 1;
    return {value, static_cast<uint32_t>(magic), static_cast<uint16_t>(bits < 1 ? bits : 1),
            static_cast<uint16_t>(bits < 1 ? 0 : bits - 1)};
  }

  friend WEFT_DEVICE constexpr uint32_t operator/(uint32_t number, Divisor by) {
    const auto high = static_cast<uint32_t>(uint64_t{number} * by.magic >> 32);
    return (high + ((number - high) >> by.first_shift)) >> by.last_shift;
  }
  friend WEFT_DEVICE constexpr uint32_t operator%(uint32_t number, Divisor by) {
    return number - number / by * by.value;
  }
};
static_assert(sizeof(Divisor) == 12);

}  // namespace weft
