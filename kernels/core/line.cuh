// SPDX-License-Identifier: Apache-2.0
//
// line.cuh: lines of 128 bytes that say themselves that they have come: seven vectors, then a tag. Eight
// neighbours of a warp store a line, and load it, with one instruction of 16 bytes each, and NVLink delivers
// such a line whole (NCCL's LL128 relies on both); on the host one thread stores its parts in order, the tag
// last and released, and looks at the tag first. So data needs no fence and no signal after it, for 8/7 of
// its bytes. Only for links that keep lines whole: PCIe does not.
#pragma once

#include "kernels/target/target.h"

namespace weft {

inline constexpr uint32_t kLineBytes = 128, kLineParts = 8, kLineVecs = kLineParts - 1;

// Lines that `vecs` vectors take, and their parts: vector v stands in part v + v / kLineVecs.
WEFT_DEVICE constexpr uint32_t lines_of(uint32_t vecs) {
  return (vecs + kLineVecs - 1) / kLineVecs;
}
WEFT_DEVICE constexpr uint32_t parts_of(uint32_t vecs) {
  return lines_of(vecs) * kLineParts;
}

// One of the eight parts of 16 bytes of a line.
struct LinePart {
  uint32_t index;  // from the first line on

  WEFT_DEVICE constexpr bool is_tag() const { return index % kLineParts == kLineVecs; }
  // The vector that it holds, where it is no tag.
  WEFT_DEVICE constexpr uint32_t vec() const { return index - index / kLineParts; }
  WEFT_DEVICE constexpr bool holds(uint32_t vecs) const { return !is_tag() && vec() < vecs; }
};

// The tag of a call's lines: its number, mixed (splitmix64's finaliser, a bijection, so calls differ). Old
// contents of the same memory, rows and counts too, equal it with probability 2^-64 a line.
WEFT_DEVICE constexpr uint64_t line_tag(uint64_t number) {
  uint64_t tag = number + 0x9e3779b97f4a7c15u;
  tag = (tag ^ tag >> 30) * 0xbf58476d1ce4e5b9u;
  tag = (tag ^ tag >> 27) * 0x94d049bb133111ebu;
  return tag ^ tag >> 31;
}

// Stores a part. Lanes with the parts of one line call it together, a host thread in the order of parts.
// `vec` is what the part holds, if it is no tag.
WEFT_DEVICE void store_part(Vec16* lines, LinePart part, Vec16 vec, uint64_t tag) {
  if (part.is_tag()) {
    const auto low = static_cast<uint32_t>(tag), high = static_cast<uint32_t>(tag >> 32);
    vec = {{low, high, low, high}};
  }
  store_line_part(lines + part.index, vec, part.is_tag());
}

// Loads a part. Lanes with the parts of one line call it together. The line is whole if none of them gets
// false.
WEFT_DEVICE bool load_part(const Vec16* lines, LinePart part, uint64_t tag, Vec16& vec) {
  if constexpr (!kLoadsFullLines) {
    const Vec16 last = load_line_part(lines + part.index / kLineParts * kLineParts + kLineVecs);
    if ((last.words[2] | uint64_t{last.words[3]} << 32) != tag) return false;
  }
  vec = load_line_part(lines + part.index);
  return !part.is_tag() || (vec.words[2] | uint64_t{vec.words[3]} << 32) == tag;
}

}  // namespace weft
