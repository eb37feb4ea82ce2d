// SPDX-License-Identifier: Apache-2.0
//
// Memory of the weak target: each primitive with the scope and order that the CUDA target gives it.
#pragma once

#include <type_traits>

#include "weak/target/language.h"

namespace weft {

struct alignas(16) Vec16 {
  uint32_t words[4];
};

namespace weak {

// What is left of an order where a test weakens this site.
inline Order weakened(Order order, const Origin& origin) {
  Machine& run = machine();
  if (order.acquires || order.releases)
    if (run.is_changed(origin, Change::kRelaxed)) order.acquires = order.releases = false;
  if (order.scope == Scope::kSystem && (order.acquires || order.releases))
    if (run.is_changed(origin, Change::kGpuScope)) order.scope = Scope::kGpu;
  if (order.scope == Scope::kGpu && (order.acquires || order.releases))
    if (run.is_changed(origin, Change::kBlockScope)) order.scope = Scope::kBlock;
  return order;
}
inline constexpr Order kRelaxed{.is_strong = true}, kWeak{}, kAcquire{.is_strong = true, .acquires = true},
    kRelease{.is_strong = true, .releases = true};
inline constexpr Order of_gpu(Order order) {
  order.scope = Scope::kGpu;
  return order;
}
inline constexpr Order of_block(Order order) {
  order.scope = Scope::kBlock;
  return order;
}
inline Order line() {
  Order order = kRelaxed;
  order.whole = machine().profile().lines_are_atomic ? 16 : 4;
  return order;
}

template <class T>
T loaded(const T* at, Order order, const char* call, Spot spot) {
  const Origin origin{call, spot, nullptr};
  order.whole = order.whole > sizeof(T) ? order.whole : sizeof(T) == 8 ? 8 : order.whole;
  T value;
  machine().load(at, sizeof(T), &value, weakened(order, origin), origin);
  return value;
}
template <class T>
void stored(T* at, const T& value, Order order, const char* call, Spot spot) {
  const Origin origin{call, spot, nullptr};
  machine().store(at, sizeof(T), &value, weakened(order, origin), origin);
}
template <class T, class F>
T updated(T* at, Order order, const char* call, Spot spot, F next) {
  const Origin origin{call, spot, nullptr};
  return static_cast<T>(machine().update(at, sizeof(T), weakened(order, origin), origin, [&](uint64_t was) {
    return static_cast<uint64_t>(static_cast<std::make_unsigned_t<T>>(next(static_cast<T>(was))));
  }));
}

}  // namespace weak

// System scope: peers see it.
template <class T>
T load_acquire(const T* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::kAcquire, "load_acquire", spot);
}
template <class T>
T load_relaxed(const T* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::kRelaxed, "load_relaxed", spot);
}
// A look at a signal that a peer may write, cheap enough to repeat; who sees what it waits for acquires then.
inline uint64_t peek(const uint64_t* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::of_gpu(weak::kRelaxed), "peek", spot);
}
// A look at a signal after which the thread branches, and then only stores, or loads what the signal says is
// there by load_relaxed() and load_vec_fresh().
inline uint64_t load_signal(const uint64_t* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::kRelaxed, "load_signal", spot);
}
template <class T>
void store_release(T* at, T value, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, value, weak::kRelease, "store_release", spot);
}
template <class T>
void store_relaxed(T* at, T value, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, value, weak::kRelaxed, "store_relaxed", spot);
}
namespace weak {
struct alignas(16) Pair {
  uint64_t first, second;
};
inline void store_both(uint64_t* at, uint64_t first, uint64_t second, Order order, const char* call,
                       Spot spot) {
  const Origin origin{call, spot, nullptr};
  const Pair pair{first, second};
  machine().store(at, sizeof(pair), &pair, weakened(order, origin), origin);
}
}  // namespace weak
// Two words that share 16 aligned bytes: whoever acquires the second sees the first. Released, they also publish what
// the thread knew before.
inline void store_pair_release(uint64_t* at, uint64_t first, uint64_t second,
                               weak::Spot spot = weak::Spot::current()) {
  weak::store_both(at, first, second, weak::kRelease, "store_pair_release", spot);
}
inline void store_pair(uint64_t* at, uint64_t first, uint64_t second,
                       weak::Spot spot = weak::Spot::current()) {
  weak::store_both(at, first, second, weak::kRelaxed, "store_pair", spot);
}
// Tells a peer of what launches before this one did, which their end has made visible and finished.
inline void store_after_launch(uint64_t* at, uint64_t value, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, value, weak::kRelaxed, "store_after_launch", spot);
}
template <class T>
T add_release(T* at, T value, weak::Spot spot = weak::Spot::current()) {
  return weak::updated(at, weak::kRelease, "add_release", spot, [&](T was) { return was + value; });
}
// Block scope; `at` is usually in shared memory.
inline uint32_t load_acquire_block(const uint32_t* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::of_block(weak::kAcquire), "load_acquire_block", spot);
}
inline void store_release_block(uint32_t* at, uint32_t value, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, value, weak::of_block(weak::kRelease), "store_release_block", spot);
}
// Within one device. `at` may be in shared memory.
template <class T>
T add_local(T* at, T value, weak::Spot spot = weak::Spot::current()) {
  return weak::updated(at, weak::of_gpu(weak::kRelaxed), "add_local", spot,
                       [&](T was) { return was + value; });
}
template <class T>
T add_local_acq_rel(T* at, T value, weak::Spot spot = weak::Spot::current()) {
  weak::Order order = weak::of_gpu(weak::kAcquire);
  order.releases = true;
  return weak::updated(at, order, "add_local_acq_rel", spot, [&](T was) { return was + value; });
}
template <class T>
T exchange_local(T* at, T value, weak::Spot spot = weak::Spot::current()) {
  return weak::updated(at, weak::of_gpu(weak::kRelaxed), "exchange_local", spot, [&](T) { return value; });
}
// Within one device: publishes what the thread knew before to who acquires the word there.
template <class T>
void store_release_local(T* at, T value, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, value, weak::of_gpu(weak::kRelease), "store_release_local", spot);
}
// Raises a word to `value` unless it is more already, and publishes what the thread knew before, as above.
inline void max_local_release(uint64_t* at, uint64_t value, weak::Spot spot = weak::Spot::current()) {
  weak::updated(at, weak::of_gpu(weak::kRelease), "max_local_release", spot,
                [&](uint64_t was) { return was > value ? was : value; });
}
// Writes a register of a NIC after everything that the thread knew before is visible to the NIC.
inline void store_register(uint64_t* at, uint64_t value, weak::Spot spot = weak::Spot::current()) {
  weak::machine().fence(weak::Scope::kSystem, {"store_register", spot, nullptr});
  weak::stored(at, value, weak::kRelaxed, "store_register", spot);
}
// The same where all that the NIC is to see lies in the device's own memory. A NIC that reads there is taken for one of the
// device's threads.
inline void store_register_local(uint64_t* at, uint64_t value, weak::Spot spot = weak::Spot::current()) {
  weak::machine().fence(weak::Scope::kGpu, {"store_register_local", spot, nullptr});
  weak::stored(at, value, weak::kRelaxed, "store_register_local", spot);
}
// After store_register(): publishes what the thread knew before it to who sees the word there, within one device.
inline void store_after_register(uint64_t* at, uint64_t value, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, value, weak::kRelaxed, "store_after_register", spot);
}
// Orders everything before it against everything after it, for peers too.
inline void fence_system(weak::Spot spot = weak::Spot::current()) {
  weak::machine().fence(weak::Scope::kSystem, {"fence_system", spot, nullptr});
}

inline Vec16 load_vec(const Vec16* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::kWeak, "load_vec", spot);
}
inline Vec16 load_vec_streaming(const Vec16* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::kWeak, "load_vec_streaming", spot);
}
// Of memory that a peer writes while the kernel runs: see load_signal().
inline Vec16 load_vec_fresh(const Vec16* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::kRelaxed, "load_vec_fresh", spot);
}
inline void store_vec(Vec16* at, Vec16 v, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, v, weak::kWeak, "store_vec", spot);
}
inline void store_vec_streaming(Vec16* at, Vec16 v, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, v, weak::kWeak, "store_vec_streaming", spot);
}
inline constexpr uint32_t kSumVecs = 4;
inline void prefetch(const void* /*at*/) {}

// A line that a peer writes while this thread polls it: each 8-byte half is whole.
inline Vec16 load_line(const Vec16* at, weak::Spot spot = weak::Spot::current()) {
  return weak::loaded(at, weak::line(), "load_line", spot);
}
inline void store_line(Vec16* at, Vec16 v, weak::Spot spot = weak::Spot::current()) {
  weak::stored(at, v, weak::line(), "store_line", spot);
}
// Eight neighbours of a warp, which call it together, store a line with one write, and load it from one (profile).
inline constexpr bool kLoadsFullLines = true;
inline void store_line_part(Vec16* at, Vec16 v, bool /*is_last*/, weak::Spot spot = weak::Spot::current()) {
  weak::machine().take_line(at, &v, true, {"store_line_part", spot, nullptr});
}
inline Vec16 load_line_part(const Vec16* at, weak::Spot spot = weak::Spot::current()) {
  Vec16 v;
  weak::machine().take_line(const_cast<Vec16*>(at), &v, false, {"load_line_part", spot, nullptr});
  return v;
}

}  // namespace weft
