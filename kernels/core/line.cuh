// SPDX-License-Identifier: Apache-2.0
//
// line.cuh: lines of 128 bytes that say themselves that they have come: 15 words of 8 bytes, then a tag.
// Eight neighbours of a warp store a line with one instruction of 16 bytes each, and NVLink delivers such a
// line whole; on the host one thread stores its parts in order, the tag last and released. So data needs no
// fence and no signal after it, for 128/120 of its bytes. Only for links that keep lines whole: PCIe does
// not.
//
// Rows travel on sheets of four lines, since a sheet's 60 words are 30 whole vectors: the seven parts of 16
// bytes beside each tag are vectors 0 to 27 of the sheet, the words beside the tags are vectors 28 and 29.
#pragma once

#include "kernels/target/target.h"

namespace weft {

inline constexpr uint32_t kLineBytes = 128, kLineWords = 15, kLineParts = 8;
inline constexpr uint32_t kSheetLines = 4, kSheetParts = kSheetLines * kLineParts;
inline constexpr uint32_t kSheetVecs = kSheetLines * kLineWords / 2;

// Lines that `vecs` vectors take.
WEFT_DEVICE constexpr uint64_t lines_of_vecs(uint64_t vecs) {
  const uint64_t rest = vecs % kSheetVecs;
  const uint64_t lines = (rest + kLineParts - 2) / (kLineParts - 1);
  return vecs / kSheetVecs * kSheetLines + (lines < kSheetLines ? lines : kSheetLines);
}
WEFT_DEVICE constexpr uint64_t sheets_of_vecs(uint64_t vecs) {
  return (vecs + kSheetVecs - 1) / kSheetVecs;
}

// The tag of a call's lines: its number, mixed (splitmix64's finaliser, a bijection, so calls differ). What
// other calls left in the same memory, rows and counts too, looks like it with probability 2^-64 a line.
WEFT_DEVICE constexpr uint64_t line_tag(uint64_t number) {
  uint64_t tag = number + 0x9e3779b97f4a7c15u;
  tag = (tag ^ tag >> 30) * 0xbf58476d1ce4e5b9u;
  tag = (tag ^ tag >> 27) * 0x94d049bb133111ebu;
  return tag ^ tag >> 31;
}

// A part of a row on its sheets: 16 bytes of a line, of which the last part of the line gives 8 to the tag.
struct LinePart {
  uint32_t vec;       // of the row, that it holds, whole or one half of
  uint32_t half;      // where it holds one half: which
  bool has_tag;       // it holds one half, and the tag
  uint32_t line_vec;  // of the row, the first that its line holds

  // In a row of `vecs`: whether the line travels, and whether the part says anything but the tag.
  WEFT_DEVICE bool travels(uint64_t vecs) const { return line_vec < vecs; }
  WEFT_DEVICE bool holds(uint64_t vecs) const { return vec < vecs; }
};
WEFT_DEVICE LinePart line_part(uint32_t part) {
  const uint32_t first = part / kSheetParts * kSheetVecs;
  const uint32_t line = part % kSheetParts / kLineParts;
  const uint32_t in_line = part % kLineParts;
  const bool has_tag = in_line == kLineParts - 1;
  const uint32_t beside_tags = kSheetLines * (kLineParts - 1);
  const uint32_t vec = has_tag ? beside_tags + line / 2 : line * (kLineParts - 1) + in_line;
  return {first + vec, line % 2, has_tag, first + line * (kLineParts - 1)};
}

WEFT_DEVICE Vec16 with_tag(uint32_t low, uint32_t high, uint64_t tag) {
  return {{low, high, static_cast<uint32_t>(tag), static_cast<uint32_t>(tag >> 32)}};
}

// Stores part `part` of a row's lines. Lanes with the parts of one line call it together, a host thread in
// order of parts.
WEFT_DEVICE void store_part(Vec16* lines, uint32_t part, const LinePart& at, Vec16 vec, uint64_t tag) {
  if (at.has_tag)
    vec = with_tag(at.half ? vec.words[2] : vec.words[0], at.half ? vec.words[3] : vec.words[1], tag);
  store_line_part(lines + part, vec, at.has_tag);
}

// Stores what a part brought to its place in a row.
WEFT_DEVICE void keep_part(std::byte* row, const LinePart& at, const Vec16& vec) {
  std::byte* place = row + uint64_t{at.vec} * sizeof(Vec16);
  if (!at.has_tag) return store_vec(reinterpret_cast<Vec16*>(place), vec);
  *reinterpret_cast<uint64_t*>(place + 8 * at.half) = vec.words[0] | uint64_t{vec.words[1]} << 32;
}

// Word `word`, of 4 bytes, of a row that came on lines.
WEFT_DEVICE uint32_t load_line_word(const Vec16* lines, uint32_t word) {
  const uint32_t sheet = word / 4 / kSheetVecs;
  const uint32_t vec = word / 4 % kSheetVecs;
  const uint32_t beside_tags = kSheetLines * (kLineParts - 1);
  const auto* words = reinterpret_cast<const uint32_t*>(lines + uint64_t{sheet} * kSheetParts);
  if (vec < beside_tags)
    return load_relaxed(words + (vec / (kLineParts - 1) * kLineParts + vec % (kLineParts - 1)) * 4 +
                        word % 4);
  const uint32_t line = (vec - beside_tags) * 2 + word % 4 / 2;
  return load_relaxed(words + (line * kLineParts + kLineParts - 1) * 4 + word % 2);
}

// Whether a line has come: its tag is looked at alone, which costs a quarter of the line's way through the
// caches. What this thread, and lanes that it meets, load_line() after that is the line's; parts loaded at
// the same time as the tag may be older.
WEFT_DEVICE bool line_is_there(const Vec16* line, uint64_t tag) {
  const Vec16 last = load_line(line + kLineParts - 1);
  return (last.words[2] | uint64_t{last.words[3]} << 32) == tag;
}

}  // namespace weft
