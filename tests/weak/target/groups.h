// SPDX-License-Identifier: Apache-2.0
//
// Thread groups of the weak target: each lane is a fiber. Shuffles and votes order no memory, syncs do.
#pragma once

#include <cstring>

#include "weak/target/language.h"

#ifndef WEFT_WEAK_LANES
#define WEFT_WEAK_LANES 32
#endif

namespace weft {

struct Block {
  uint32_t index() const { return weak::machine().place().block - weak::machine().launched().first_block; }
  uint32_t count() const { return weak::machine().launched().blocks; }
  uint32_t rank() const {
    return weak::machine().place().warp * WEFT_WEAK_LANES + weak::machine().place().lane;
  }
  uint32_t size() const { return warps() * WEFT_WEAK_LANES; }
  uint32_t warps() const { return weak::machine().launched().warps; }
  std::byte* shared() const { return weak::machine().shared(); }
  void sync(weak::Spot spot = weak::Spot::current()) const {
    weak::machine().sync_block({"block.sync", spot, nullptr});
  }
};

struct Warp {
  static constexpr uint32_t kMaxSize = WEFT_WEAK_LANES;
  uint32_t index() const { return weak::machine().place().warp; }  // within its block
  uint32_t rank() const { return weak::machine().place().lane; }
  uint32_t size() const { return kMaxSize; }
  void sync(weak::Spot spot = weak::Spot::current()) const {
    weak::machine().sync_warp({"warp.sync", spot, nullptr});
  }
  template <class T>
  T broadcast(T value, uint32_t from = 0) const {
    return of(exchanged(value)[from % kMaxSize], value);
  }
  template <class T>
  T sum(T value) const {
    return within<kMaxSize>(value, [](T a, T b) { return a + b; });
  }
  template <class T>
  T max(T value) const {
    return max_within<kMaxSize>(value);
  }
  template <class T>
  T min(T value) const {
    return within<kMaxSize>(value, [](T a, T b) { return b < a ? b : a; });
  }
  // The largest value among each `kLanes` neighbours; kLanes is a power of two.
  template <uint32_t kLanes, class T>
  T max_within(T value) const {
    return within<kLanes>(value, [](T a, T b) { return b > a ? b : a; });
  }
  // The sum of the values of lower ranks.
  template <class T>
  T scan_exclusive(T value) const {
    const uint64_t* all = exchanged(value);
    T sum{};
    for (uint32_t lane = 0; lane < rank(); ++lane) sum += of(all[lane], value);
    return sum;
  }
  bool any(bool value) const { return count(value) != 0; }
  // Of how many threads, and of how many of lower rank, the value is true.
  uint32_t count(bool value) const { return counted(value, kMaxSize); }
  uint32_t count_below(bool value) const { return counted(value, rank()); }

 private:
  template <class T>
  static const uint64_t* exchanged(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return weak::machine().exchange(bits);
  }
  template <class T>
  static T of(uint64_t bits, T value) {
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
  // As shuffles do it: in a butterfly, so that sums of floats are those of a GPU.
  template <uint32_t kLanes, class T, class F>
  T within(T value, F f) const {
    const uint64_t* all = exchanged(value);
    T values[kMaxSize], next[kMaxSize];
    for (uint32_t lane = 0; lane < kMaxSize; ++lane) values[lane] = of(all[lane], value);
    for (uint32_t step = kLanes / 2; step > 0; step /= 2) {
      for (uint32_t lane = 0; lane < kMaxSize; ++lane) next[lane] = f(values[lane], values[lane ^ step]);
      std::memcpy(values, next, sizeof(values));
    }
    return values[rank()];
  }
  uint32_t counted(bool value, uint32_t below) const {
    const uint64_t* all = exchanged(uint64_t{value});
    uint32_t sum = 0;
    for (uint32_t lane = 0; lane < below; ++lane) sum += all[lane] != 0 ? 1 : 0;
    return sum;
  }
};

}  // namespace weft

#include "kernels/target/cluster_of_one.h"
