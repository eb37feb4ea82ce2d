// SPDX-License-Identifier: Apache-2.0
//
// message_stream.cuh: the fast part of a pass, where all memory is whole and aligned. Vectors are loaded several
// at a time, since memory is far; then come the units that are left over.
#pragma once

#include "kernels/collective/message_units.cuh"

namespace weft {
namespace message {

// A host thread goes line by line, and asks for lines that much ahead: a core by itself has too few under way, and none past the
// end of a page. A sum of memory that is in no cache takes two thirds of the time (8.7 GB/s instead of 5.9 on each of 2 cores).
inline constexpr bool kAsksAhead = Warp::kMaxSize == 1;
inline constexpr uint32_t kUnitsPerLine = 64 / sizeof(Vec16);
inline constexpr uint64_t kUnitsAhead = 2048 / sizeof(Vec16);

// Vectors that a thread loads before it uses any: sixteen conversions a vector leave few registers for more.
template <class Combiner>
constexpr uint32_t loads_in_flight() {
  return Combiner::kPerVec > 8 ? kLoadsInFlight / 2 : kLoadsInFlight;
}

// Whole and aligned memory: a, or a + b, to one or two places.
struct Streams {
  const Vec16* a;
  const Vec16* b;
  Vec16* first;
  Vec16* second;
  uint32_t divisor;
};
template <class Combiner, bool kHasB, bool kTwoPlaces, bool kStreams>
WEFT_DEVICE void stream_units(Block block, const Streams& s, uint64_t units) {
  constexpr uint32_t kAhead = kAsksAhead ? kUnitsPerLine
                              : kHasB    ? loads_in_flight<Combiner>()
                                         : kLoadsInFlight;
  const uint64_t step = block.size();
  auto put = [&](uint64_t i, Vec16 value) {
    if constexpr (kStreams)
      store_vec_streaming(s.first + i, value);
    else
      store_vec(s.first + i, value);
    if constexpr (kTwoPlaces) store_vec(s.second + i, value);
  };
  uint64_t i = block.rank();
  for (; i + (kAhead - 1) * step < units; i += kAhead * step) {
    if constexpr (kAsksAhead) {
      prefetch(s.a + i + kUnitsAhead);
      if constexpr (kHasB) prefetch(s.b + i + kUnitsAhead);
    }
    Vec16 x[kAhead], y[kAhead];
    WEFT_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) x[j] = load_vec(s.a + i + j * step);
    if constexpr (kHasB) {
      WEFT_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) y[j] = load_vec(s.b + i + j * step);
    }
    WEFT_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) {
      if constexpr (kHasB) x[j] = combined<Combiner>(x[j], y[j], s.divisor);
      put(i + j * step, x[j]);
    }
  }
  for (; i < units; i += step) {
    Vec16 value = load_vec(s.a + i);
    if constexpr (kHasB) value = combined<Combiner>(value, load_vec(s.b + i), s.divisor);
    put(i, value);
  }
}

template <class Combiner, bool kStreams>
WEFT_DEVICE void stream(Block block, const Movement& m, uint64_t units) {
  auto vec = [](std::byte* at) { return reinterpret_cast<Vec16*>(at); };
  const Streams s{vec(m.in.at      ? m.in.at
                      : m.adds_dst ? m.dst.at
                                   : m.src.at),
                  m.in.at || m.adds_dst ? vec(m.src.at) : nullptr, vec(m.dst.at ? m.dst.at : m.out.at),
                  m.dst.at ? vec(m.out.at) : nullptr, m.divisor};
  if (s.b && s.second) return stream_units<Combiner, true, true, kStreams>(block, s, units);
  if (s.b) return stream_units<Combiner, true, false, kStreams>(block, s, units);
  if (s.second) return stream_units<Combiner, false, true, kStreams>(block, s, units);
  if (kStreams && block.size() == 1 && copy_cold(s.first, s.a, units * 16)) return;
  copy_bytes(block, s.first, s.a, units * 16);
}

// A sum of up to kMaxSources pieces and what `dst` holds, in their order.
struct FusedSum {
  Piece dst;
  Piece sources[kMaxSources];
  uint32_t count;
  uint32_t divisor;  // as in Movement
};

// dst += every source, in one pass. Loads of two sources are under way together; more cost registers that
// element types with long conversions do not have.
template <class Combiner>
WEFT_DEVICE void add_sources(Block block, const FusedSum& s, uint64_t units) {
  uint64_t whole = full_units(s.dst, units);
  for (uint32_t i = 0; i < s.count; ++i) whole = full_units(s.sources[i], whole);
  auto load = [](const Piece& piece, uint64_t unit) {
    return load_vec(reinterpret_cast<const Vec16*>(piece.at) + unit);
  };
  auto divisor_after = [&](uint32_t added) { return added == s.count ? s.divisor : 0; };
  for (uint64_t unit = block.rank(); unit < whole; unit += block.size()) {
    if (kAsksAhead && unit % kUnitsPerLine == 0) {
      prefetch(s.dst.at + (unit + kUnitsAhead) * sizeof(Vec16));
      for (uint32_t i = 0; i < s.count; ++i) prefetch(s.sources[i].at + (unit + kUnitsAhead) * sizeof(Vec16));
    }
    Vec16 sum = load(s.dst, unit);
    Vec16 next = load(s.sources[0], unit);
    for (uint32_t i = 1; i <= s.count; ++i) {
      const Vec16 held = next;
      if (i < s.count) next = load(s.sources[i], unit);
      sum = combined<Combiner>(sum, held, divisor_after(i));
    }
    store_vec(reinterpret_cast<Vec16*>(s.dst.at) + unit, sum);
  }
  for (uint64_t unit = whole + block.rank(); unit < units; unit += block.size()) {
    Vec16 sum = load_ragged(s.dst, unit);
    for (uint32_t i = 0; i < s.count; ++i)
      sum = combined<Combiner>(sum, load_ragged(s.sources[i], unit), divisor_after(i + 1));
    store_ragged(s.dst, unit, sum);
  }
}

}  // namespace message

// Adds all sources to dst.
template <class Shape>
WEFT_DEVICE void move_sums(Block block, const Shape& shape, const message::FusedSum& sum, uint64_t units) {
  with_combiner(shape, [&](auto combiner) { message::add_sources<decltype(combiner)>(block, sum, units); });
}

}  // namespace weft
