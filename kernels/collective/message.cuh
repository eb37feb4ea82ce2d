// SPDX-License-Identifier: Apache-2.0
//
// message.cuh: what a step moves. One pass over 16-byte units: take a unit from a message or from memory,
// combine it with memory, store it, and put it into a message.
#pragma once

#include "kernels/collective/element.cuh"
#include "kernels/core/copy.cuh"

namespace weft {

// Local memory of one piece: `bytes` of it exist (the last chunk of a buffer may be short). Null: not used.
struct Piece {
  std::byte* at = nullptr;
  uint64_t bytes = 0;
};

// Where a message is or goes: a slot of a connection, or of a direct message the memory itself, of which
// `bytes` exist. Null: not used.
struct Slot {
  std::byte* at = nullptr;
  uint64_t tag = 0;  // of the message
  uint64_t bytes = ~uint64_t{0};
};

struct Movement {
  Slot in;
  Piece src;  // combined with `in` where both are there
  Piece dst;
  Slot out;
  bool adds_dst = false;  // dst = dst + src
  bool streams = false;   // what moves is too large for the caches, and not read soon; on the host only
  uint32_t divisor = 0;   // of what an average combines here for the last time; 0: not the last time
  uint64_t units = 0;
};

namespace message {

WEFT_DEVICE bool is_aligned(const std::byte* at) {
  return reinterpret_cast<uint64_t>(at) % 16 == 0;
}

// Units that lie whole and aligned in a piece or slot; all of them where it is not used.
template <class Memory>
WEFT_DEVICE uint64_t whole_units(const Memory& memory, uint64_t units) {
  if (!memory.at) return units;
  if (!is_aligned(memory.at)) return 0;
  const uint64_t whole = memory.bytes / 16;
  return whole < units ? whole : units;
}

// What combining gave, divided where that ends an average.
template <class Combiner>
WEFT_DEVICE Vec16 combined(const Vec16& a, const Vec16& b, [[maybe_unused]] uint32_t divisor) {
  const Vec16 value = Combiner::apply(a, b);
  if constexpr (Combiner::kIsAverage) {
    if (divisor) return Combiner::finish(value, divisor);
  }
  return value;
}

// A unit that may be unaligned or run over the end, where it reads zero and is not written.
WEFT_DEVICE Vec16 load_ragged(const Piece& piece, uint64_t unit) {
  struct Bytes {
    std::byte values[16];
  } bytes;
  if (unit * 16 + 16 <= piece.bytes) {
    copy_few<16>(bytes.values, piece.at + unit * 16);
    return __builtin_bit_cast(Vec16, bytes);
  }
  for (uint32_t i = 0; i < 16; ++i) {
    const uint64_t at = unit * 16 + i;
    bytes.values[i] = at < piece.bytes ? piece.at[at] : std::byte{0};
  }
  return __builtin_bit_cast(Vec16, bytes);
}
WEFT_DEVICE void store_ragged(const Piece& piece, uint64_t unit, const Vec16& value) {
  struct Bytes {
    std::byte values[16];
  };
  const auto bytes = __builtin_bit_cast(Bytes, value);
  if (unit * 16 + 16 <= piece.bytes) {
    copy_few<16>(piece.at + unit * 16, bytes.values);
    return;
  }
  for (uint32_t i = 0; i < 16; ++i)
    if (unit * 16 + i < piece.bytes) piece.at[unit * 16 + i] = bytes.values[i];
}

// How units travel in a slot. take() returns false where the unit did not come.
struct SimpleWire {
  static constexpr bool kIsPlain = true;
  template <class GiveUp>
  WEFT_DEVICE static bool take(const Slot& slot, uint64_t unit, Vec16& value, GiveUp) {
    value = load_ragged({slot.at, slot.bytes}, unit);
    return true;
  }
  WEFT_DEVICE static void put(const Slot& slot, uint64_t unit, const Vec16& value) {
    store_ragged({slot.at, slot.bytes}, unit, value);
  }
};

// Two lines of (4 bytes, flag, 4 bytes, flag) per unit. The first flag is the message's number plus one, so
// memory that was never written is no message; the second is the same with the call's salt. A line's second
// half is visible no later than its first, or memory moves whole lines.
struct LlWire {
  static constexpr bool kIsPlain = false;
  WEFT_DEVICE static uint32_t flag(uint64_t tag) { return static_cast<uint32_t>(tag) + 1; }
  WEFT_DEVICE static uint32_t salted_flag(uint64_t tag) {
    return flag(tag) ^ static_cast<uint32_t>(tag >> 32);
  }
  WEFT_DEVICE static bool is_there(const Slot& slot, const Vec16& line) {
    return line.words[1] == flag(slot.tag) && line.words[3] == salted_flag(slot.tag);
  }
  template <class GiveUp>
  WEFT_DEVICE static bool take(const Slot& slot, uint64_t unit, Vec16& value, GiveUp gives_up) {
    const auto* lines = reinterpret_cast<const Vec16*>(slot.at) + 2 * unit;
    Vec16 low = load_line(lines);
    Vec16 high = load_line(lines + 1);
    for (uint32_t polls = 0; !(is_there(slot, low) && is_there(slot, high)); ++polls) {
      if (gives_up(polls)) return false;
      low = load_line(lines);
      high = load_line(lines + 1);
    }
    value = {{low.words[0], low.words[2], high.words[0], high.words[2]}};
    return true;
  }
  WEFT_DEVICE static void put(const Slot& slot, uint64_t unit, const Vec16& value) {
    auto* lines = reinterpret_cast<Vec16*>(slot.at) + 2 * unit;
    const uint32_t number = flag(slot.tag), salted = salted_flag(slot.tag);
    store_line(lines, {{value.words[0], number, value.words[1], salted}});
    store_line(lines + 1, {{value.words[2], number, value.words[3], salted}});
  }
  // Whether a unit has arrived, without waiting.
  WEFT_DEVICE static bool arrived(const Slot& slot, uint64_t unit) {
    const auto* lines = reinterpret_cast<const Vec16*>(slot.at) + 2 * unit;
    return is_there(slot, load_line(lines)) && is_there(slot, load_line(lines + 1));
  }
};

// Lines of 128 bytes: 15 words of 8 bytes, then the message's tag plus one. Eight neighbours of a warp
// write a line with one instruction each of 16 bytes at the same time, and NVLink delivers such a line whole;
// on the host the number is stored last.
struct Ll128Wire {
  static constexpr bool kIsPlain = false;
  static constexpr uint32_t kLineBytes = 128, kLineWords = 15, kLanes = 8;
  WEFT_DEVICE static const uint64_t* tag_of(const Slot& slot, uint64_t line) {
    return reinterpret_cast<const uint64_t*>(slot.at + line * kLineBytes) + kLineWords;
  }
  WEFT_DEVICE static bool is_there(const Slot& slot, uint64_t line) {
    return load_acquire(tag_of(slot, line)) == slot.tag + 1;
  }
  // Whether the line with a unit's end has arrived, without waiting.
  WEFT_DEVICE static bool arrived(const Slot& slot, uint64_t unit) {
    return is_there(slot, (2 * unit + 1) / kLineWords);
  }
};

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
    for (uint32_t polls = 0; !Ll128Wire::is_there(m.in, line); ++polls)
      if (gives_up(polls)) return false;
    value = load_line(reinterpret_cast<const Vec16*>(m.in.at + line * Ll128Wire::kLineBytes) + lane);
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

// All lanes of a warp go around together, so that the eight of a line store it at once. What did not come is
// not sent on.
template <class Combiner, class GiveUp>
WEFT_DEVICE void move_lines(Block block, const Movement& m, GiveUp gives_up) {
  const Warp warp;
  const uint64_t lines = (m.units * 2 + Ll128Wire::kLineWords - 1) / Ll128Wire::kLineWords;
  const uint64_t items = lines * Ll128Wire::kLanes;
  const uint64_t turns = (items + warp.size() - 1) / warp.size() * warp.size();
  for (uint64_t item = block.rank(); item < turns; item += block.size()) {
    const uint64_t line = item / Ll128Wire::kLanes;
    const auto lane = static_cast<uint32_t>(item % Ll128Wire::kLanes);
    const bool has_second = lane + 1 < Ll128Wire::kLanes;
    const Pair pair{line * Ll128Wire::kLineWords + 2 * lane, has_second};
    Vec16 value{};
    const bool came = item >= items || move_pair<Combiner>(m, line, lane, pair, value, gives_up);
    if (!m.out.at || warp.any(!came)) continue;
    const uint64_t tag = m.out.tag + 1;
    if (!has_second) {
      value.words[2] = static_cast<uint32_t>(tag);
      value.words[3] = static_cast<uint32_t>(tag >> 32);
    }
    if (item < items)
      store_line_part(reinterpret_cast<Vec16*>(m.out.at + line * Ll128Wire::kLineBytes) + lane, value,
                      !has_second);
  }
}

// Units that are not whole in some piece, or whose wire is not plain memory. What did not come goes nowhere.
template <class Wire, class Combiner, class GiveUp>
WEFT_DEVICE void move_unit(const Movement& m, uint64_t unit, bool is_ragged, GiveUp gives_up) {
  auto load = [&](const Piece& piece) {
    return is_ragged ? load_ragged(piece, unit) : load_vec(reinterpret_cast<const Vec16*>(piece.at) + unit);
  };
  Vec16 value;
  if (m.in.at) {
    if (!Wire::take(m.in, unit, value, gives_up)) return;
    if (m.src.at) value = combined<Combiner>(value, load(m.src), m.divisor);
  } else {
    value = load(m.src);
    if (m.adds_dst) value = combined<Combiner>(load(m.dst), value, m.divisor);
  }
  if (m.dst.at) {
    if (is_ragged)
      store_ragged(m.dst, unit, value);
    else
      store_vec(reinterpret_cast<Vec16*>(m.dst.at) + unit, value);
  }
  if (m.out.at) Wire::put(m.out, unit, value);
}

// Vectors that a thread loads before it uses any: sixteen conversions a vector leave few registers for more.
template <class Combiner>
constexpr uint32_t loads_in_flight() {
  return Combiner::kPerVec > 8 && kLoadsInFlight > 1 ? kLoadsInFlight / 2 : kLoadsInFlight;
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
  constexpr uint32_t kAhead = kHasB ? loads_in_flight<Combiner>() : kLoadsInFlight;
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
  uint64_t whole = whole_units(s.dst, units);
  for (uint32_t i = 0; i < s.count; ++i) whole = whole_units(s.sources[i], whole);
  auto load = [](const Piece& piece, uint64_t unit) {
    return load_vec(reinterpret_cast<const Vec16*>(piece.at) + unit);
  };
  auto divisor_after = [&](uint32_t added) { return added == s.count ? s.divisor : 0; };
  for (uint64_t unit = block.rank(); unit < whole; unit += block.size()) {
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

// Moves all units of a message over lines of 128 bytes.
template <class Shape, class GiveUp>
WEFT_DEVICE void move_ll128(Block block, const Shape& shape, const Movement& m, GiveUp gives_up) {
  with_combiner(shape, [&](auto combiner) { message::move_lines<decltype(combiner)>(block, m, gives_up); });
}

// Moves all units of a message by the whole block. gives_up(polls) is asked while a unit has not arrived.
template <class Wire, class Shape, class GiveUp>
WEFT_DEVICE void move(Block block, const Shape& shape, const Movement& m, GiveUp gives_up) {
  uint64_t whole = message::whole_units(m.src, m.units);
  whole = message::whole_units(m.dst, whole);
  whole = message::whole_units(m.in, whole);
  whole = message::whole_units(m.out, whole);
  auto run = [&](auto combiner) {
    using Combiner = decltype(combiner);
    if constexpr (Wire::kIsPlain) {
      if (kWritesPastCaches && m.streams)
        message::stream<Combiner, kWritesPastCaches>(block, m, whole);
      else
        message::stream<Combiner, false>(block, m, whole);
      for (uint64_t unit = whole + block.rank(); unit < m.units; unit += block.size())
        message::move_unit<Wire, Combiner>(m, unit, true, gives_up);
    } else {
      for (uint64_t unit = block.rank(); unit < m.units; unit += block.size())
        message::move_unit<Wire, Combiner>(m, unit, unit >= whole, gives_up);
    }
  };
  with_combiner(shape, run);
}

}  // namespace weft
