// SPDX-License-Identifier: Apache-2.0
//
// low_latency_call.cuh: how a launch of low-latency mode starts, and how it waits.
//
// Nothing runs at the end of a launch: no block meets another. What a launch has read is acknowledged by the
// next one, when the stream has ordered all of it; peers need that acknowledgement two calls later.
#pragma once

#include "kernels/core/reach.cuh"
#include "kernels/moe/low_latency_ports.h"
#include "kernels/moe/routes.cuh"

namespace weft {
namespace low_latency {

inline constexpr bool kIsHost = Warp::kMaxSize == 1;

// Every launch with a send phase adds this much to LowLatencyState::started, its blocks together.
inline constexpr uint64_t kLaunchShare = 1 << 16;

struct Epoch {
  uint64_t number;  // of the call, from 1 on
  uint32_t parity;  // which half it uses
};

WEFT_DEVICE uint64_t half_offset(const LowLatencyCall& call, uint64_t ranks, Epoch epoch) {
  return call.region + low_latency_control(ranks).end + epoch.parity * call.half_bytes;
}
// Where the outbox for port peers begins.
WEFT_DEVICE uint64_t outbox_offset(const LowLatencyCall& call, uint64_t ranks, Epoch epoch) {
  return half_offset(call, ranks, epoch) + call.lines_at;
}
// Offset in the window of element `at` of one parity of a u64[2][per_parity] array of the control area.
WEFT_DEVICE uint64_t control_offset(const LowLatencyCall& call, uint64_t array, uint64_t per_parity,
                                    Epoch epoch, uint64_t at) {
  return call.region + array + (epoch.parity * per_parity + at) * 8;
}
WEFT_DEVICE uint64_t word_offset(const LowLatencyCall& call, uint64_t ranks, Epoch epoch, uint64_t source,
                                 uint64_t word) {
  return control_offset(call, low_latency_control(ranks).word, ranks * kWordsPerSource, epoch,
                        source * kWordsPerSource + word);
}

template <class MeshT>
WEFT_DEVICE LowLatencyState* state_of(const LowLatencyCall& call, const MeshT& mesh) {
  return reinterpret_cast<LowLatencyState*>(mesh.local() + call.region +
                                            low_latency_control(mesh.ranks()).state);
}

WEFT_DEVICE bool is_masked(const LowLatencyCall& call, uint32_t peer) {
  return call.masked && load_relaxed(call.masked + peer) != 0;
}

// A peer that was waited for in vain is masked, or it is a fault.
WEFT_DEVICE void lose(const LowLatencyCall& call, uint32_t peer, Site site, uint64_t want, uint64_t seen,
                      uint64_t waited_ns) {
  if (!call.may_mask) {
    raise(call.wait.fault, site, call.wait.self, peer, want, seen, waited_ns);
  } else if (waited_ns > call.wait.timeout_ns) {  // else another warp's fault has ended the wait
    store_relaxed(call.masked + peer, uint32_t{1});
  }
}

// Waits, in one thread, for a signal of a peer; what may follow is what load_signal() allows. False: the peer
// is masked, by now or before, or it is a fault. `scale` turns values into epochs for the report.
WEFT_DEVICE bool await(const LowLatencyCall& call, const uint64_t* signal, uint64_t want, uint32_t peer,
                       Site site, uint64_t scale, uint64_t& seen) {
  if (is_masked(call, peer)) {
    seen = load_signal(signal);
    return seen >= want;
  }
  uint64_t waited_ns = 0;
  const Span traced(call.wait.trace, site, peer);
  if (poll(call.wait, waited_ns, [&] { return (seen = load_signal(signal)) >= want; })) return true;
  lose(call, peer, site, want / scale, seen / scale, waited_ns);
  return false;
}

// What the first warp of a block asks for as it starts: it is on its way while the block gets ready.
struct Joined {
  uint64_t started;  // in its first lane: what the call's number is made of
  uint64_t even;     // each lane: the last call of either half that a peer has read
  uint64_t odd;
  uint32_t gave_up;  // not 0: nobody takes part any more
};

// One thread. Blocks share out kLaunchShare so that all of them read the same quotient: the last block adds
// what the others leave, and even all others together do not reach the next one.
template <class MeshT>
WEFT_DEVICE uint64_t join_launch(const LowLatencyCall& call, Block block, const MeshT& mesh) {
  LowLatencyState* state = state_of(call, mesh);
  if ((call.phases & kPhaseSend) == 0) return state->call_epoch[call.ticket];
  const bool is_last = block.index() + 1 == block.count();
  return add_local(&state->started, is_last ? kLaunchShare - (block.count() - 1) : 1);
}
WEFT_DEVICE uint64_t call_number(const LowLatencyCall& call, uint64_t started) {
  return (call.phases & kPhaseSend) == 0 ? started : started / kLaunchShare + 1;
}
template <class MeshT>
WEFT_DEVICE const uint64_t* consumed_calls(const LowLatencyCall& call, const MeshT& mesh) {
  return reinterpret_cast<const uint64_t*>(mesh.local() + call.region +
                                           low_latency_control(mesh.ranks()).consumed);
}

template <class MeshT>
WEFT_DEVICE Joined join(const LowLatencyCall& call, Block block, Warp warp, const MeshT& mesh) {
  Joined joined{};
  if (warp.index() != 0) return joined;
  if (warp.rank() == 0) joined.started = join_launch(call, block, mesh);
  joined.gave_up = load_gave_up(call.wait);
  // Mostly these acknowledgements came long ago.
  const uint64_t* consumed = consumed_calls(call, mesh);
  if (warp.rank() < mesh.ranks()) {
    joined.even = load_signal(consumed + warp.rank());
    joined.odd = load_signal(consumed + mesh.ranks() + warp.rank());
  }
  return joined;
}

// One warp of the launch: tells peers which calls this rank has read.
template <class MeshT>
WEFT_DEVICE void acknowledge(const LowLatencyCall& call, Warp warp, const MeshT& mesh) {
  LowLatencyState* state = state_of(call, mesh);
  const uint64_t consumed = low_latency_control(mesh.ranks()).consumed;
  WEFT_ROLLED
  for (uint32_t signal = warp.rank(); signal < 2 * mesh.ranks(); signal += warp.size()) {
    const uint32_t peer = signal / 2;
    const Epoch half{0, signal % 2};
    if (is_masked(call, peer)) continue;
    const uint64_t word = control_offset(call, consumed, mesh.ranks(), half, mesh.rank());
    if (is_port(mesh, peer))
      mesh.to(peer).put_value(word, state->received[half.parity]);
    else
      store_after_launch(reinterpret_cast<uint64_t*>(near_window(mesh, peer) + word),
                         state->received[half.parity]);
  }
  warp.sync();
}

// One thread, after that: notes what this launch is about.
template <class MeshT>
WEFT_DEVICE void note_call(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch) {
  LowLatencyState* state = state_of(call, mesh);
  if (call.phases & kPhaseSend) state->call_epoch[call.ticket] = epoch.number;
  if (call.phases & kPhaseReceive) state->received[epoch.parity] = epoch.number;
}

// Finds, in one warp, a launch's call number, and present[peer] for each peer that takes part. Before a send
// phase it waits until all of them have read this half's last call.
template <class MeshT>
WEFT_DEVICE void find_call(const LowLatencyCall& call, Warp warp, const MeshT& mesh, const Joined& joined,
                           uint64_t* shared_epoch, uint32_t* present, Site site) {
  const Span traced(call.wait.trace, Work::kLowLatencyBegin, warp.rank() == 0);
  const uint64_t number = call_number(call, warp.broadcast(joined.started));
  const uint64_t* consumed = consumed_calls(call, mesh);
  const Epoch epoch{number, static_cast<uint32_t>(number & 1)};
  const uint64_t want = (call.phases & kPhaseSend) != 0 && number > 2 ? number - 2 : 0;
  const bool all_left = is_void(call.wait, joined.gave_up);
  WEFT_ROLLED
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    bool takes_part = !all_left && !is_masked(call, peer);
    const bool has_read = peer == warp.rank() && (epoch.parity != 0 ? joined.odd : joined.even) >= want;
    uint64_t seen = 0;
    if (takes_part && !has_read)
      takes_part = await(call, consumed + epoch.parity * mesh.ranks() + peer, want, peer, site, 1, seen);
    present[peer] = takes_part ? 1 : 0;
  }
  if (warp.rank() == 0) *shared_epoch = number;
}

// Starts a launch, in the block, and returns its number. The first warp finds it while the others prepare().
// Meanwhile the last warp of all tells peers what was read before; they may be waiting for just that.
template <class MeshT, class Prepare>
WEFT_DEVICE Epoch begin_call(const LowLatencyCall& call, Block block, Warp warp, const MeshT& mesh,
                             const Joined& joined, uint64_t* shared_epoch, uint32_t* present, Site site,
                             Prepare prepare) {
  const bool is_last_warp = block.index() + 1 == block.count() && warp.index() + 1 == block.warps();
  if (is_last_warp) acknowledge(call, warp, mesh);
  if (warp.index() == 0) find_call(call, warp, mesh, joined, shared_epoch, present, site);
  prepare();
  block.sync();
  const Epoch epoch{*shared_epoch, static_cast<uint32_t>(*shared_epoch & 1)};
  if (is_last_warp && warp.rank() == 0) note_call(call, mesh, epoch);
  return epoch;
}

// ---- hello
// ---------------------------------------------------------------------------------------------------------

WEFT_DEVICE void write_hello(const LowLatencyCall& call, LowLatencyHello* hello, uint64_t dispatch_epoch) {
  for (uint32_t i = 0; i < LowLatencyHello::kWords; ++i) store_relaxed(&hello->words[i], call.hello.words[i]);
  store_relaxed(&hello->dispatch_epoch, dispatch_epoch);
}

// The same as greet(), through a port.
template <class MeshT>
WEFT_DEVICE void greet_port(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t peer,
                            uint64_t dispatch_epoch) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const uint64_t from = outbox_offset(call, mesh.ranks(), epoch) + peer * sizeof(LowLatencyHello);
  const uint64_t to =
      call.region + at.hello + (epoch.parity * mesh.ranks() + mesh.rank()) * sizeof(LowLatencyHello);
  write_hello(call, reinterpret_cast<LowLatencyHello*>(mesh.local() + from), dispatch_epoch);
  mesh.to(peer).put_with_signal(OneThread{}, to, from, sizeof(LowLatencyHello),
                                control_offset(call, at.ready, mesh.ranks(), epoch, mesh.rank()),
                                epoch.number);
}

// One thread: publishes what was written to the peer before, with what this rank was called with.
template <class MeshT>
WEFT_DEVICE void greet(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t peer,
                       uint64_t dispatch_epoch) {
  if (is_port(mesh, peer)) return greet_port(call, mesh, epoch, peer, dispatch_epoch);
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  std::byte* window = near_window(mesh, peer);
  auto* hello = reinterpret_cast<LowLatencyHello*>(window + call.region + at.hello) +
                epoch.parity * mesh.ranks() + mesh.rank();
  write_hello(call, hello, dispatch_epoch);
  const uint64_t ready = control_offset(call, at.ready, mesh.ranks(), epoch, mesh.rank());
  store_release(reinterpret_cast<uint64_t*>(window + ready), epoch.number);
}

// One thread: waits for a source's greeting. False: leave that source out.
template <class MeshT>
WEFT_DEVICE bool await_greeting(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t source,
                                Site site) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const auto* signal = reinterpret_cast<const uint64_t*>(
      mesh.local() + control_offset(call, at.ready, mesh.ranks(), epoch, source));
  uint64_t seen = 0;
  return await(call, signal, epoch.number, source, site, 1, seen);
}

// One thread, after that: whether the source means the same call; a fault if it does not.
template <class MeshT>
WEFT_DEVICE bool agrees(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t source,
                        uint64_t dispatch_epoch) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const auto* vecs = reinterpret_cast<const Vec16*>(mesh.local() + call.region + at.hello) +
                     (epoch.parity * mesh.ranks() + source) * (sizeof(LowLatencyHello) / sizeof(Vec16));
  const Vec16 held[2] = {load_vec_fresh(vecs), load_vec_fresh(vecs + 1)};  // both at once: memory is far
  static_assert(LowLatencyHello::kWords == 6 && sizeof(LowLatencyHello) == 2 * sizeof(Vec16));
  WEFT_UNROLL
  for (uint32_t i = 0; i < LowLatencyHello::kWords; ++i) {
    const uint32_t theirs = held[i / 4].words[i % 4];
    if (theirs == call.hello.words[i]) continue;
    raise(call.wait.fault, Site::kLowLatencyAgree, call.wait.self, source, call.hello.words[i], theirs, i);
    return false;
  }
  const uint64_t their_epoch = held[1].words[2] | uint64_t{held[1].words[3]} << 32;
  if (their_epoch == dispatch_epoch) return true;
  raise(call.wait.fault, Site::kCombineHandle, call.wait.self, source, dispatch_epoch, their_epoch, 0);
  return false;
}

// ---- lines
// ---------------------------------------------------------------------------------------------------------

// One thread: a peer was waited for in vain that sends lines. They do not say which call they were last
// written in; the peer's last greeting does.
template <class MeshT>
WEFT_DEVICE void lose_lines(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t peer,
                            Site site, uint64_t waited_ns) {
  const uint64_t ready = low_latency_control(mesh.ranks()).ready;
  const auto* greeted = mesh.local() + control_offset(call, ready, mesh.ranks(), epoch, peer);
  lose(call, peer, site, epoch.number, load_relaxed(reinterpret_cast<const uint64_t*>(greeted)), waited_ns);
}

// Waits, in the warp, for what a peer sends as lines: came() looks, and says the same in every lane. False:
// it did not come, and the peer is masked, by now or before, or it is a fault.
template <class MeshT, class Came>
WEFT_DEVICE bool await_lines(const LowLatencyCall& call, Warp warp, const MeshT& mesh, Epoch epoch,
                             uint32_t peer, Site site, Came came) {
  uint64_t waited_ns = 0;
  bool is_there = false;
  const Span traced(warp.rank() == 0 ? call.wait.trace : nullptr, site, peer);
  auto is_over = [&] { return (is_there = came()) || warp.any(is_masked(call, peer)); };
  if (poll_together(warp, call.wait, waited_ns, is_over)) return is_there;
  if (warp.rank() == 0) lose_lines(call, mesh, epoch, peer, site, waited_ns);
  return false;
}

// One look of the warp at lines that hold `vecs` vectors, which go to `to` as far as they came. Returns, in
// each lane, whether the lane's own did.
WEFT_DEVICE bool take_lines(Warp warp, const Vec16* lines, uint32_t vecs, uint64_t tag, Vec16* to) {
  bool came = true;
  for (uint32_t i = warp.rank(); i < parts_of(vecs); i += warp.size()) {
    const LinePart part{i};
    Vec16 vec;
    if (!load_part(lines, part, tag, vec))
      came = false;
    else if (part.holds(vecs))
      to[part.vec()] = vec;
  }
  return came;
}

// The warps of all blocks, dealt so that consecutive jobs go to different blocks.
struct WarpShare {
  uint32_t index;
  uint32_t total;
};
WEFT_DEVICE WarpShare warp_share(Block block, Warp warp) {
  return {warp.index() * block.count() + block.index(), block.count() * block.warps()};
}

// Part `part` of `parts` of `items`, as even as they come. All in 32 bits, like whatever is divided here: a
// GPU takes a good part of a microsecond to divide 64 bits.
struct Range {
  uint32_t first;
  uint32_t last;
};
WEFT_DEVICE constexpr Range part_of(uint32_t items, uint32_t part, Divisor parts) {
  return {items * part / parts, items * (part + 1) / parts};
}

// How vectors travel: one after the other, or as lines, whose parts are counted then.
struct Wire {
  bool lines;
  uint32_t vecs;
  uint64_t tag;

  WEFT_DEVICE bool holds(uint32_t index) const { return !lines || LinePart{index}.holds(vecs); }
  WEFT_DEVICE uint32_t vec(uint32_t index) const { return lines ? LinePart{index}.vec() : index; }
  WEFT_DEVICE Range range(uint32_t part, Divisor parts) const {
    if (!lines) return part_of(vecs, part, parts);
    const Range whole = part_of(lines_of(vecs), part, parts);
    return {whole.first * kLineParts, whole.last * kLineParts};
  }
  WEFT_DEVICE void store(Vec16* to, uint32_t index, Vec16 value) const {
    if (lines)
      store_part(to, {index}, value, tag);
    else
      store_vec(to + index, value);
  }
  // False: it has not come.
  WEFT_DEVICE bool load(const Vec16* from, uint32_t index, Vec16& value) const {
    if (lines) return load_part(from, {index}, tag, value);
    value = load_vec_fresh(from + index);
    return true;
  }
};

// A choice that names no expert counts as empty.
WEFT_DEVICE int64_t chosen_expert(const LowLatencyCall& call, uint64_t top_k, uint64_t token, uint64_t k) {
  const int64_t expert = expert_at(call.topk_idx, call.id_bytes, token * top_k + k);
  return expert >= 0 && expert < call.experts ? expert : -1;
}

}  // namespace low_latency
}  // namespace weft
