// SPDX-License-Identifier: Apache-2.0
//
// message.cuh: what a step moves. One pass over 16-byte units: take a unit from a message or from memory,
// combine it with memory, store it, and put it into a message.
#pragma once

#include "kernels/collective/message_ll128.cuh"
#include "kernels/collective/message_slots.cuh"
#include "kernels/collective/message_stream.cuh"

namespace weft {
namespace message {

// Units that are not whole in some piece, or whose slots are not plain memory. A unit that did not arrive is neither
// stored nor sent.
template <class Slots, class Combiner, class GiveUp>
WEFT_DEVICE void move_unit(const Movement& m, uint64_t unit, bool is_ragged, GiveUp gives_up) {
  auto load = [&](const Piece& piece) {
    return is_ragged ? load_ragged(piece, unit) : load_vec(reinterpret_cast<const Vec16*>(piece.at) + unit);
  };
  Vec16 value;
  if (m.in.at) {
    if (!Slots::take(m.in, unit, value, gives_up)) return;
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
  if (m.out.at) Slots::put(m.out, unit, value);
}

}  // namespace message

// Moves all units of a message by the whole block. gives_up(polls) is asked while a unit has not arrived.
template <class Slots, class Shape, class GiveUp>
WEFT_DEVICE void move(Block block, const Shape& shape, const Movement& m, GiveUp gives_up) {
  uint64_t whole = message::full_units(m.src, m.units);
  whole = message::full_units(m.dst, whole);
  whole = message::full_units(m.in, whole);
  whole = message::full_units(m.out, whole);
  auto run = [&](auto combiner) {
    using Combiner = decltype(combiner);
    if constexpr (Slots::kIsPlain) {
      if (kWritesPastCaches && m.streams)
        message::stream<Combiner, kWritesPastCaches>(block, m, whole);
      else
        message::stream<Combiner, false>(block, m, whole);
      for (uint64_t unit = whole + block.rank(); unit < m.units; unit += block.size())
        message::move_unit<Slots, Combiner>(m, unit, true, gives_up);
    } else {
      for (uint64_t unit = block.rank(); unit < m.units; unit += block.size())
        message::move_unit<Slots, Combiner>(m, unit, unit >= whole, gives_up);
    }
  };
  with_combiner(shape, run);
}

}  // namespace weft
