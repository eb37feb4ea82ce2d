// SPDX-License-Identifier: Apache-2.0
//
// What the rows consist of that a combine sums: constants of its shape.
#pragma once

#include "kernels/core/constant.cuh"
#include "kernels/core/numbers.cuh"

namespace weft {

inline constexpr int64_t kElementBf16 = 0;
inline constexpr int64_t kElementFp32 = 1;
inline constexpr int64_t kElementFp16 = 2;
inline constexpr uint32_t kRowElements = 3;

WEFT_DEVICE constexpr uint32_t bytes_of_element(int64_t element) {
  return element == kElementFp32 ? 4 : 2;
}

template <int64_t kElement>
struct RowElement {
  using type = Bf16;
};
template <>
struct RowElement<kElementFp32> {
  using type = Fp32;
};
template <>
struct RowElement<kElementFp16> {
  using type = Fp16;
};

// Calls f(Bf16{}), f(Fp32{}) or f(Fp16{}), as shape.element says.
template <class Shape, class F>
WEFT_DEVICE void with_row_element(const Shape& shape, F f) {
  with_constant<int64_t, kRowElements>(
      shape, [](const auto& s) { return s.element; },
      [&](auto element) { f(typename RowElement<decltype(element)::value>::type{}); });
}

}  // namespace weft
