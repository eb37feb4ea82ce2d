// SPDX-License-Identifier: Apache-2.0
//
// message_ll128.cuh: one pass over LL128 lines. Eight lanes of a warp move a line of 15 words and its tag, each
// lane a pair of words: take it from a message or from memory, combine it, store it, put it into a message.
#pragma once

#include "kernels/collective/message_slots.cuh"

namespace weft {
namespace message {

WEFT_DEVICE uint64_t load_word(const Piece& piece, uint64_t word) {
  uint64_t value = 0;
  if (word * 8 + 8 <= piece.bytes) {
    if (reinterpret_cast<uint64_t>(piece.at) % 8 == 0)
      return reinterpret_cast<const uint64_t*>(piece.at)[word];
    copy_few<8>(&value, piece.at + word * 8);
    return value;
  }
  for (uint64_t at = word * 8; at < piece.bytes; ++at)
    value |= static_cast<uint64_t>(piece.at[at]) << (8 * (at - word * 8));
  return value;
}
WEFT_DEVICE void store_word(const Piece& piece, uint64_t word, uint64_t value) {
  if (word * 8 + 8 <= piece.bytes) {
    if (reinterpret_cast<uint64_t>(piece.at) % 8 == 0)
      reinterpret_cast<uint64_t*>(piece.at)[word] = value;
    else
      copy_few<8>(piece.at + word * 8, &value);
    return;
  }
  for (uint64_t at = word * 8; at < piece.bytes; ++at)
    piece.at[at] = static_cast<std::byte>(value >> (8 * (at - word * 8)));
}

// Two neighbouring words of a line, as one vector; a line's last vector has one word.
struct Pair {
  uint64_t first;  // word
  bool has_second;
};
WEFT_DEVICE Vec16 load_pair(const Piece& piece, const Pair& pair) {
  const uint64_t low = load_word(piece, pair.first);
  const uint64_t high = pair.has_second ? load_word(piece, pair.first + 1) : 0;
  return {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
           static_cast<uint32_t>(high >> 32)}};
}
WEFT_DEVICE uint64_t word_of(const Vec16& value, uint32_t which) {
  return value.words[2 * which] | static_cast<uint64_t>(value.words[2 * which + 1]) << 32;
}

// One pair of a message's words over lines of 128 bytes. False: it did not come.
template <class Combiner, class GiveUp>
WEFT_DEVICE bool move_pair(const Movement& m, uint64_t line, uint32_t lane, const Pair& pair, Vec16& value,
                           GiveUp gives_up) {
  if (m.in.at) {
    for (uint32_t polls = 0; !Ll128Slots::is_there(m.in, line); ++polls)
      if (gives_up(polls)) return false;
    value = load_line(reinterpret_cast<const Vec16*>(m.in.at + line * Ll128Slots::kLineBytes) + lane);
    if (m.src.at) value = combined<Combiner>(value, load_pair(m.src, pair), m.divisor);
  } else {
    value = load_pair(m.src, pair);
    if (m.adds_dst) value = combined<Combiner>(load_pair(m.dst, pair), value, m.divisor);
  }
  if (m.dst.at) {
    store_word(m.dst, pair.first, word_of(value, 0));
    if (pair.has_second) store_word(m.dst, pair.first + 1, word_of(value, 1));
  }
  return true;
}

// All lanes of a warp loop together, so that the eight lanes of a line store it at once. A line that did not
// arrive is not sent on.
template <class Combiner, class GiveUp>
WEFT_DEVICE void move_lines(Block block, const Movement& m, GiveUp gives_up) {
  const Warp warp;
  const uint64_t lines = (m.units * 2 + Ll128Slots::kLineWords - 1) / Ll128Slots::kLineWords;
  const uint64_t items = lines * Ll128Slots::kLanes;
  const uint64_t turns = (items + warp.size() - 1) / warp.size() * warp.size();
  for (uint64_t item = block.rank(); item < turns; item += block.size()) {
    const uint64_t line = item / Ll128Slots::kLanes;
    const auto lane = static_cast<uint32_t>(item % Ll128Slots::kLanes);
    const bool has_second = lane + 1 < Ll128Slots::kLanes;
    const Pair pair{line * Ll128Slots::kLineWords + 2 * lane, has_second};
    Vec16 value{};
    const bool came = item >= items || move_pair<Combiner>(m, line, lane, pair, value, gives_up);
    if (!m.out.at || warp.any(!came)) continue;
    const uint64_t tag = m.out.tag + 1;
    if (!has_second) {
      value.words[2] = static_cast<uint32_t>(tag);
      value.words[3] = static_cast<uint32_t>(tag >> 32);
    }
    if (item < items)
      store_line_part(reinterpret_cast<Vec16*>(m.out.at + line * Ll128Slots::kLineBytes) + lane, value,
                      !has_second);
  }
}

}  // namespace message

// Moves all units of a message over lines of 128 bytes.
template <class Shape, class GiveUp>
WEFT_DEVICE void move_ll128(Block block, const Shape& shape, const Movement& m, GiveUp gives_up) {
  with_combiner(shape, [&](auto combiner) { message::move_lines<decltype(combiner)>(block, m, gives_up); });
}

}  // namespace weft
