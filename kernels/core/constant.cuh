// SPDX-License-Identifier: Apache-2.0
//
// constant.cuh: a field of a shape as a type. On GPUs it is a constant, so only what it chooses is compiled:
// a compiler that is given all choices finds late that the others are dead, and takes several times as long.
// On the host it is a value, and every choice is compiled.
#pragma once

#include "kernels/target/target.h"

namespace weft {

template <auto kValue>
struct Constant {
  static constexpr auto value = kValue;
};

// A shape of constants has nothing to store.
template <class Shape>
inline constexpr bool kIsConstant = __is_empty(Shape);

template <class Enum, uint32_t kCount, uint32_t kNumber, class F>
WEFT_DEVICE void call_with(F& f) {
  if constexpr (kNumber < kCount) f(Constant<static_cast<Enum>(kNumber)>{});
}

// Calls f(Constant<e>{}) for the e that field(shape) is, of an Enum's kCount enumerators, numbered from 0.
// field: a lambda without captures.
template <class Enum, uint32_t kCount, class Shape, class Field, class F>
WEFT_DEVICE void with_constant(const Shape& shape, Field field, F f) {
  static_assert(kCount <= 14, "add cases");
  if constexpr (kIsConstant<Shape>) {
    f(Constant<static_cast<Enum>(field(Shape{}))>{});
  } else {
    switch (field(shape)) {
      case 0:
        return call_with<Enum, kCount, 0>(f);
      case 1:
        return call_with<Enum, kCount, 1>(f);
      case 2:
        return call_with<Enum, kCount, 2>(f);
      case 3:
        return call_with<Enum, kCount, 3>(f);
      case 4:
        return call_with<Enum, kCount, 4>(f);
      case 5:
        return call_with<Enum, kCount, 5>(f);
      case 6:
        return call_with<Enum, kCount, 6>(f);
      case 7:
        return call_with<Enum, kCount, 7>(f);
      case 8:
        return call_with<Enum, kCount, 8>(f);
      case 9:
        return call_with<Enum, kCount, 9>(f);
      case 10:
        return call_with<Enum, kCount, 10>(f);
      case 11:
        return call_with<Enum, kCount, 11>(f);
      case 12:
        return call_with<Enum, kCount, 12>(f);
      case 13:
        return call_with<Enum, kCount, 13>(f);
    }
  }
}

}  // namespace weft
