// SPDX-License-Identifier: Apache-2.0
//
// Thread groups on CDNA: the block, and waves of 64 lanes that exchange 32-bit words.
#pragma once

#include "kernels/target/hip/language.h"

namespace weft {

struct Block {
  WEFT_DEVICE uint32_t index() const { return __builtin_amdgcn_workgroup_id_x(); }
  WEFT_DEVICE uint32_t count() const {
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
  }
  WEFT_DEVICE uint32_t rank() const { return __builtin_amdgcn_workitem_id_x(); }
  WEFT_DEVICE uint32_t size() const { return __builtin_amdgcn_workgroup_size_x(); }
  WEFT_DEVICE uint32_t warps() const { return size() / 64; }
  WEFT_DEVICE std::byte* shared() const {
    extern __attribute__((shared, aligned(128))) unsigned char weft_shared[];
    return reinterpret_cast<std::byte*>(weft_shared);
  }
  WEFT_DEVICE void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  }
};

struct Warp {
  static constexpr uint32_t kMaxSize = 64;
  WEFT_DEVICE uint32_t index() const { return __builtin_amdgcn_workitem_id_x() / 64; }  // within its block
  WEFT_DEVICE uint32_t rank() const { return __builtin_amdgcn_workitem_id_x() % 64; }
  WEFT_DEVICE uint32_t size() const { return 64; }
  WEFT_DEVICE void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
  }
  template <class T>
  WEFT_DEVICE T broadcast(T value, uint32_t from = 0) const {
    return value_of_lane(value, from);
  }
  template <class T>
  WEFT_DEVICE T sum(T value) const {
    for (uint32_t step = 32; step > 0; step /= 2) value += value_of_lane(value, rank() ^ step);
    return value;
  }
  template <class T>
  WEFT_DEVICE T max(T value) const {
    for (uint32_t step = 32; step > 0; step /= 2) {
      const T other = value_of_lane(value, rank() ^ step);
      value = other > value ? other : value;
    }
    return value;
  }
  template <class T>
  WEFT_DEVICE T min(T value) const {
    for (uint32_t step = 32; step > 0; step /= 2) {
      const T other = value_of_lane(value, rank() ^ step);
      value = other < value ? other : value;
    }
    return value;
  }
  // The largest value among each `kLanes` neighbours; kLanes is a power of two.
  template <uint32_t kLanes, class T>
  WEFT_DEVICE T max_within(T value) const {
    for (uint32_t step = kLanes / 2; step > 0; step /= 2) {
      const T other = value_of_lane(value, rank() ^ step);
      value = other > value ? other : value;
    }
    return value;
  }
  // The sum of the values of lower ranks.
  template <class T>
  WEFT_DEVICE T scan_exclusive(T value) const {
    T inclusive = value;
    for (uint32_t step = 1; step < 64; step *= 2) {
      const T lower = value_of_lane(inclusive, rank() - step);
      if (rank() >= step) inclusive += lower;
    }
    return inclusive - value;
  }
  WEFT_DEVICE bool any(bool value) const { return __builtin_amdgcn_ballot_w64(value) != 0; }
  // Of how many threads, and of how many of lower rank, the value is true.
  WEFT_DEVICE uint32_t count(bool value) const {
    return static_cast<uint32_t>(__builtin_popcountll(__builtin_amdgcn_ballot_w64(value)));
  }
  WEFT_DEVICE uint32_t count_below(bool value) const {
    const uint64_t below = (uint64_t{1} << rank()) - 1;
    return static_cast<uint32_t>(__builtin_popcountll(__builtin_amdgcn_ballot_w64(value) & below));
  }

 private:
  // Lanes exchange 32-bit words; the lane number wraps at 64.
  template <class T>
  WEFT_DEVICE static T value_of_lane(T value, uint32_t lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    struct Words {
      int words[sizeof(T) / 4];
    };
    Words out = __builtin_bit_cast(Words, value);
    for (int& word : out.words) word = __builtin_amdgcn_ds_bpermute(static_cast<int>(lane * 4), word);
    return __builtin_bit_cast(T, out);
  }
};

}  // namespace weft

#include "kernels/target/cluster_of_one.h"
