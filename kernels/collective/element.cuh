// SPDX-License-Identifier: Apache-2.0
//
// element.cuh: the numbers that collectives reduce. Sixteen bytes at a time; 8- and 16-bit floats are
// computed in float32 and rounded to nearest, ties to even; NaN wins in min and max of floats.
#pragma once

#include "kernels/collective/program_args.h"
#include "kernels/core/constant.cuh"
#include "kernels/core/numbers.cuh"

namespace weft {

WEFT_DEVICE constexpr uint32_t element_bytes(Element element) {
  switch (element) {
    case Element::kE4m3:
    case Element::kE5m2:
    case Element::kInt8:
    case Element::kUint8:
      return 1;
    case Element::kFp16:
    case Element::kBf16:
    case Element::kInt16:
    case Element::kUint16:
      return 2;
    case Element::kFp64:
    case Element::kInt64:
    case Element::kUint64:
      return 8;
    default:
      return 4;
  }
}

namespace element {

// How a stored number becomes one to compute with, and back.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  WEFT_DEVICE static T load(T stored) { return stored; }
  WEFT_DEVICE static T store(T value) { return value; }
};
struct Half {
  using Stored = uint16_t;
  using Value = float;
  WEFT_DEVICE static float load(uint16_t bits) { return float_of_f16(bits); }
  WEFT_DEVICE static uint16_t store(float value) { return static_cast<uint16_t>(f16_bits(value)); }
};
struct Brain {
  using Stored = uint16_t;
  using Value = float;
  WEFT_DEVICE static float load(uint16_t bits) { return float_of_bf16(bits); }
  WEFT_DEVICE static uint16_t store(float value) { return static_cast<uint16_t>(bf16_bits(value)); }
};
struct E5m2 {
  using Stored = uint8_t;
  using Value = float;
  WEFT_DEVICE static float load(uint8_t bits) { return float_of_f16(static_cast<uint32_t>(bits) << 8); }
  WEFT_DEVICE static uint8_t store(float value) { return static_cast<uint8_t>(e5m2_bits(value)); }
};
struct E4m3 {
  using Stored = uint8_t;
  using Value = float;
  WEFT_DEVICE static float load(uint8_t bits) { return float_of_e4m3(bits); }
  WEFT_DEVICE static uint8_t store(float value) {
    return static_cast<uint8_t>(e4m3x4(value, 0.0f, 0.0f, 0.0f) & 0xffu);
  }
};

struct Sum {
  template <class T>
  WEFT_DEVICE static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
  // Signed integers wrap.
  WEFT_DEVICE static int32_t apply(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
  WEFT_DEVICE static int64_t apply(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
struct Product {
  template <class T>
  WEFT_DEVICE static T apply(T a, T b) {
    return static_cast<T>(a * b);
  }
  // Integers wrap. A product of 16-bit ones is computed as int, which has no room for it.
  WEFT_DEVICE static uint16_t apply(uint16_t a, uint16_t b) {
    return static_cast<uint16_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
  }
  WEFT_DEVICE static int32_t apply(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
  }
  WEFT_DEVICE static int64_t apply(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
// NaN is not equal to itself. No branches, so that a host's compiler makes vectors of it.
struct Min {
  template <class T>
  WEFT_DEVICE static T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class T>
  WEFT_DEVICE static T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

// Of the bits of integers, whatever their width.
struct And {
  WEFT_DEVICE static uint64_t apply(uint64_t a, uint64_t b) { return a & b; }
};
struct Or {
  WEFT_DEVICE static uint64_t apply(uint64_t a, uint64_t b) { return a | b; }
};
struct Xor {
  WEFT_DEVICE static uint64_t apply(uint64_t a, uint64_t b) { return a ^ b; }
};

// An element divided by a number. Integers round towards zero.
template <class Format>
WEFT_DEVICE typename Format::Stored divided(typename Format::Stored stored, uint32_t divisor) {
  using Value = typename Format::Value;
  return Format::store(static_cast<Value>(Format::load(stored) / static_cast<Value>(divisor)));
}
// An element multiplied by another of its type. Integers wrap.
template <class Format>
WEFT_DEVICE typename Format::Stored multiplied(typename Format::Stored stored,
                                               typename Format::Stored factor) {
  return Format::store(Product::apply(Format::load(stored), Format::load(factor)));
}

// Adds; the finished sum is divided by the number of summands.
struct Average : Sum {};
template <class Op>
inline constexpr bool kDivides = false;
template <>
inline constexpr bool kDivides<Average> = true;

// The target's type that combines whole vectors of a format; void: it has none.
template <class Format>
struct LanesOf {
  using Type = void;
};
// clang-format off
template <> struct LanesOf<Brain> { using Type = Bf16Lanes; };
template <> struct LanesOf<Half> { using Type = F16Lanes; };
template <> struct LanesOf<Plain<float>> { using Type = F32Lanes; };
// clang-format on
template <class Lanes>
inline constexpr bool kHasLanesOf = kHasLanes;
template <>
inline constexpr bool kHasLanesOf<void> = false;

// Combines two vectors element by element.
template <class Format, class Op>
struct Combiner {
  static constexpr uint32_t kPerVec = 16 / sizeof(typename Format::Stored);
  static constexpr bool kIsAverage = kDivides<Op>;
  using Lanes = typename LanesOf<Format>::Type;
  struct Elements {
    typename Format::Stored values[kPerVec];
  };
  WEFT_DEVICE static Vec16 apply(const Vec16& a, const Vec16& b) {
    if constexpr (kHasLanesOf<Lanes>)
      return combine_lanes<Lanes, Op>(a, b);
    else
      return apply_each(a, b);
  }
  WEFT_DEVICE static Vec16 apply_each(const Vec16& a, const Vec16& b) {
    const auto x = __builtin_bit_cast(Elements, a);
    const auto y = __builtin_bit_cast(Elements, b);
    Elements out;
    WEFT_UNROLL
    for (uint32_t i = 0; i < kPerVec; ++i)
      out.values[i] = Format::store(Op::apply(Format::load(x.values[i]), Format::load(y.values[i])));
    return __builtin_bit_cast(Vec16, out);
  }
  // The last operation on a finished sum: the same as dividing the stored sums.
  WEFT_DEVICE static Vec16 finish(const Vec16& combined, [[maybe_unused]] uint32_t summands) {
    if constexpr (!kDivides<Op>)
      return combined;
    else if constexpr (kHasLanesOf<Lanes>)
      return divide_lanes<Lanes>(combined, static_cast<float>(summands));
    else
      return finish_each(combined, summands);
  }
  WEFT_DEVICE static Vec16 finish_each(const Vec16& combined, uint32_t summands) {
    auto elements = __builtin_bit_cast(Elements, combined);
    WEFT_UNROLL
    for (uint32_t i = 0; i < kPerVec; ++i) elements.values[i] = divided<Format>(elements.values[i], summands);
    return __builtin_bit_cast(Vec16, elements);
  }
};

template <Element kElement>
struct FormatOf;
template <Reduction kReduction>
struct OpOf;
// clang-format off
template <> struct FormatOf<Element::kFp32> { using Type = Plain<float>; };
template <> struct FormatOf<Element::kFp16> { using Type = Half; };
template <> struct FormatOf<Element::kBf16> { using Type = Brain; };
template <> struct FormatOf<Element::kE4m3> { using Type = E4m3; };
template <> struct FormatOf<Element::kE5m2> { using Type = E5m2; };
template <> struct FormatOf<Element::kFp64> { using Type = Plain<double>; };
template <> struct FormatOf<Element::kInt8> { using Type = Plain<int8_t>; };
template <> struct FormatOf<Element::kUint8> { using Type = Plain<uint8_t>; };
template <> struct FormatOf<Element::kInt32> { using Type = Plain<int32_t>; };
template <> struct FormatOf<Element::kUint32> { using Type = Plain<uint32_t>; };
template <> struct FormatOf<Element::kInt64> { using Type = Plain<int64_t>; };
template <> struct FormatOf<Element::kUint64> { using Type = Plain<uint64_t>; };
template <> struct FormatOf<Element::kInt16> { using Type = Plain<int16_t>; };
template <> struct FormatOf<Element::kUint16> { using Type = Plain<uint16_t>; };

template <> struct OpOf<Reduction::kSum> { using Type = Sum; };
template <> struct OpOf<Reduction::kProduct> { using Type = Product; };
template <> struct OpOf<Reduction::kMin> { using Type = Min; };
template <> struct OpOf<Reduction::kMax> { using Type = Max; };
template <> struct OpOf<Reduction::kAverage> { using Type = Average; };
template <> struct OpOf<Reduction::kAnd> { using Type = And; };
template <> struct OpOf<Reduction::kOr> { using Type = Or; };
template <> struct OpOf<Reduction::kXor> { using Type = Xor; };

// The format that an operation is compiled for: operations on bits are the same for all formats, and compiled once.
template <class Format, class Op> struct TakenFor { using Type = Format; };
template <class Format> struct TakenFor<Format, And> { using Type = Plain<uint64_t>; };
template <class Format> struct TakenFor<Format, Or> { using Type = Plain<uint64_t>; };
template <class Format> struct TakenFor<Format, Xor> { using Type = Plain<uint64_t>; };
// clang-format on

// Calls f with the format of the shape's element type.
template <class Shape, class F>
WEFT_DEVICE void with_format(const Shape& shape, F f) {
  with_constant<Element, kElements>(
      shape, [](const auto& s) { return s.element; },
      [&](auto element) { f(typename FormatOf<decltype(element)::value>::Type{}); });
}

}  // namespace element

// Calls f with the combiner of the shape's element type and reduction.
template <class Shape, class F>
WEFT_DEVICE void with_combiner(const Shape& shape, F f) {
  element::with_format(shape, [&](auto format) {
    with_constant<Reduction, kReductions>(
        shape, [](const auto& s) { return s.reduction; },
        [&](auto reduction) {
          using Op = typename element::OpOf<decltype(reduction)::value>::Type;
          f(element::Combiner<typename element::TakenFor<decltype(format), Op>::Type, Op>{});
        });
  });
}

}  // namespace weft
