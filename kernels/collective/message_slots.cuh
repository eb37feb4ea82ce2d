// SPDX-License-Identifier: Apache-2.0
//
// message_slots.cuh: the three ways in which units travel in a slot: plain memory, LL lines, LL128 lines.
// Each says how a unit is put, how it is taken, and how the receiver sees that it has arrived.
#pragma once

#include "kernels/collective/message_units.cuh"

namespace weft {
namespace message {

// How units travel in a slot. take() returns false where the unit did not come.
struct SimpleSlots {
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
// memory that was never written is no message. The second flag is the same, combined with the call's salt.
// A line's second half is visible no later than its first, or memory moves whole lines.
struct LlSlots {
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
struct Ll128Slots {
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

}  // namespace message
}  // namespace weft
