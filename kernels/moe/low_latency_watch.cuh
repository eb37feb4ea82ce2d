// SPDX-License-Identifier: Apache-2.0
//
// low_latency_watch.cuh: the block that watches. Where ranks have port peers, the windows of GPUs lie in memory of the
// host: a poll of a word there crosses PCIe, and polls of many warps at one line are served one after the other, ahead
// of other loads and stores. So one block of a launch polls for all others, each of its threads other words, and copies
// changes to the control page (LowLatencyPage::control), which the others poll. A rank's signals to itself go to the
// control page at once.
// Waits: until all other blocks have come to their end, whose own waits are bounded.
// Order: a thread that sees a word on the control page sees everything that a thread would see that acquires the word
// in the window.
#pragma once

#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

// Words that a thread looks at before it uses any: memory is far.
inline constexpr uint32_t kWatchedAtOnce = 4;

// A word that others write, and where it is copied to; null: nothing to copy.
struct Watched {
  const uint64_t* from;
  uint64_t* to;
};

template <class C>
class Watcher {
 public:
  WEFT_DEVICE Watcher(const C& c, Epoch epoch) : c_(c), epoch_(epoch) {}

  // One round of looks. The block.
  WEFT_DEVICE void look() const {
    WEFT_ROLLED
    for (uint32_t first = c_.block.rank(); first < items(); first += kWatchedAtOnce * c_.block.size()) {
      Watched words[kWatchedAtOnce];
      uint64_t known[kWatchedAtOnce], seen[kWatchedAtOnce];
      WEFT_UNROLL
      for (uint32_t i = 0; i < kWatchedAtOnce; ++i) {
        words[i] = watched(first + i * c_.block.size());
        if (!words[i].from) continue;
        known[i] = load_relaxed(words[i].to);
        seen[i] = load_signal(words[i].from);
      }
      WEFT_UNROLL
      for (uint32_t i = 0; i < kWatchedAtOnce; ++i) {
        if (!words[i].from || seen[i] == known[i]) continue;
        fence_system();
        const uint32_t item = first + i * c_.block.size();
        if (item < c_.ranks()) copy_handshake(item);
        store_release_local(words[i].to, seen[i]);
      }
    }
    if (c_.block.rank() == 0) copy_fault();
  }

 private:
  // Handshakes that came, calls that peers have read, counts and batches.
  WEFT_DEVICE uint32_t items() const { return c_.ranks() * (3 + words_of_source()); }
  WEFT_DEVICE uint32_t words_of_source() const { return c_.awaited_counts() + c_.awaited_words(); }

  WEFT_DEVICE Watched watched(uint32_t item) const {
    if (item >= items()) return {};
    const LowLatencyCall& call = c_.a.call;
    const LowLatencyControl at = low_latency_control(c_.ranks());
    if (item < c_.ranks()) return in_window(item, control_offset(call, at.arrived, c_.ranks(), epoch_, item));
    item -= c_.ranks();
    if (item < 2 * c_.ranks())
      return in_window(item % c_.ranks(), call.region + at.consumed + uint64_t{item} * 8);
    item -= 2 * c_.ranks();
    const uint32_t source = item / words_of_source(), word = item % words_of_source();
    if (word < c_.awaited_counts())
      return has_arrived(source) ? in_window(source, c_.counts_at(source) + uint64_t{word} * 8) : Watched{};
    const uint32_t awaited = word - c_.awaited_counts();
    if (!c_.awaits_word(source, awaited) || (has_parts() && c_.is_near_word(awaited))) return {};
    const uint64_t offset = word_offset(call, c_.ranks(), epoch_, source, word - c_.awaited_counts());
    return from(source, c_.inbox(source), offset);
  }
  // Counts arrive as bytes, before the handshake. They may be read only after the handshake.
  WEFT_DEVICE bool has_arrived(uint32_t source) const {
    const uint64_t arrived =
        control_offset(c_.a.call, low_latency_control(c_.ranks()).arrived, c_.ranks(), epoch_, source);
    return load_signal(reinterpret_cast<const uint64_t*>(control_at(c_.a.call, c_.mesh, arrived))) >=
           epoch_.number;
  }
  WEFT_DEVICE Watched in_window(uint32_t source, uint64_t offset) const {
    return from(source, c_.mesh.local(), offset);
  }
  WEFT_DEVICE Watched from(uint32_t source, const std::byte* window, uint64_t offset) const {
    const int64_t places = records_of(c_.mesh, source);
    if (source == c_.mesh.rank() || is_told_here(source)) return {};
    return {reinterpret_cast<const uint64_t*>(window + places + offset),
            reinterpret_cast<uint64_t*>(control_at(c_.a.call, c_.mesh, offset))};
  }

  // Where windows have two parts the control page is the window's own control area: near peers store there.
  WEFT_DEVICE bool has_parts() const { return port_places(c_.mesh).records != 0; }
  WEFT_DEVICE bool is_told_here(uint32_t source) const {
    return has_parts() && near_window(c_.mesh, source) != nullptr;
  }

  WEFT_DEVICE void copy_handshake(uint32_t source) const {
    const uint64_t offset = c_.a.call.region + low_latency_control(c_.ranks()).handshake +
                            (uint64_t{epoch_.parity} * c_.ranks() + source) * sizeof(LowLatencyHandshake);
    const auto* from = reinterpret_cast<const Vec16*>(c_.mesh.local() + records_of(c_.mesh, source) + offset);
    auto* to = reinterpret_cast<Vec16*>(control_at(c_.a.call, c_.mesh, offset));
    for (uint32_t i = 0; i < sizeof(LowLatencyHandshake) / sizeof(Vec16); ++i)
      store_vec(to + i, load_vec_fresh(from + i));
  }
  WEFT_DEVICE void copy_fault() const {
    LowLatencyState* state = state_of(c_.a.call, c_.mesh);
    const uint64_t raised = load_relaxed(&c_.a.call.wait.fault->raised);
    if (raised != load_relaxed(&state->raised)) store_relaxed(&state->raised, raised);
  }

  const C& c_;
  const Epoch epoch_;
};

// The block, whose threads look until the others have left. `joined`: in its first warp.
template <class C>
WEFT_DEVICE void watch(C& c, const Joined& joined, uint64_t* shared_epoch) {
  LowLatencyState* state = state_of(c.a.call, c.mesh);
  const uint64_t launches = load_relaxed(&state->watched);
  if (c.block.rank() == 0) *shared_epoch = call_number(c.a.call, joined.started);
  c.block.sync();
  c.epoch = {*shared_epoch, static_cast<uint32_t>(*shared_epoch & 1)};
  const Watcher<C> watcher(c, c.epoch);
  WEFT_ROLLED
  for (uint32_t rounds = 0; load_relaxed(&state->left) < (launches + 1) * kLaunchShare; ++rounds) {
    watcher.look();
    pause_near(rounds);
  }
  c.block.sync();
  if (c.block.rank() == 0) store_relaxed(&state->watched, launches + 1);
}

// Whether this block watches.
template <class C>
WEFT_DEVICE bool is_watching(const C& c) {
  return board_of(c.a.call, c.mesh).control && Block{}.index() == 0;
}

// Every other block, at its end.
template <class C>
WEFT_DEVICE void leave_watched(const C& c) {
  if (!board_of(c.a.call, c.mesh).control) return;
  c.block.sync();
  if (c.block.rank() != 0) return;
  const bool is_last = c.block.index() + 1 == c.block.count();
  add_local(&state_of(c.a.call, c.mesh)->left, is_last ? kLaunchShare - (c.block.count() - 1) : uint64_t{1});
}

}  // namespace low_latency
}  // namespace weft
