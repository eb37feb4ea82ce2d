// SPDX-License-Identifier: Apache-2.0
//
// low_latency_call.cuh: how a launch of low-latency mode starts, how ranks agree on the call, and how it waits: for words,
// handshakes and lines.
//
// Nothing runs at the end of a launch: no block waits for another. The next launch acknowledges the messages
// that this one has read, since the stream orders the two. Peers need that acknowledgement two calls later.
// The handshake is the last thing that a rank sends to a peer. It publishes everything written before, and carries the
// arguments that ranks must agree on; a difference is a fault.
#pragma once

#include "kernels/core/reach.cuh"
#include "kernels/moe/low_latency_ports.h"
#include "kernels/moe/routes.cuh"

namespace weft {
namespace low_latency {

// Every launch with a send phase adds this much to LowLatencyState::started, its blocks together.
inline constexpr uint64_t kLaunchShare = 1 << 16;

// The blocks of a launch that do its work. Where there is a control page, the first block watches for the others: it
// starts before them.
struct Workers : Block {
  uint32_t watching;
  WEFT_DEVICE uint32_t index() const { return Block::index() - watching; }
  WEFT_DEVICE uint32_t count() const { return Block::count() - watching; }
};
// The page of a kernel that has ports.
template <class MeshT>
WEFT_DEVICE LowLatencyPage board_of(const LowLatencyCall& call, const MeshT&) {
  return if_ports<MeshT>(call.page);
}
template <class MeshT>
WEFT_DEVICE Workers workers_of(const LowLatencyCall& call, const MeshT& mesh) {
  return {{}, board_of(call, mesh).control ? 1u : 0u};
}

// Whether a call's rows are more than the caches keep until they are read, and may be written past them.
WEFT_DEVICE bool is_past_caches(const LowLatencyCall& call, int64_t row_bytes) {
  return kWritesPastCaches && call.tokens * static_cast<uint64_t>(row_bytes) > kCachedBytes;
}

// Whether tokens and replies may travel as lines. Where some peers are behind ports the outbox has the room of lines.
template <class MeshT>
inline constexpr bool kHasLines = !kHasPorts<MeshT>;
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

// Where this rank's kernels look at what stands at `offset` of the window, in its control area.
template <class MeshT>
WEFT_DEVICE std::byte* control_at(const LowLatencyCall& call, const MeshT& mesh, uint64_t offset) {
  if (std::byte* control = board_of(call, mesh).control) return control + (offset - call.region);
  return mesh.local() + offset;
}
// The same of what a peer puts there. Where a block watches, it copies to the control page what ports put.
template <class MeshT>
WEFT_DEVICE std::byte* control_from(const LowLatencyCall& call, const MeshT& mesh, uint32_t peer,
                                    uint64_t offset) {
  std::byte* at = control_at(call, mesh, offset);
  return board_of(call, mesh).control ? at : at + records_of(mesh, peer);
}
// near_window() for what stands in the control area: this rank's own may be on the page.
template <class MeshT>
WEFT_DEVICE std::byte* near_control(const LowLatencyCall& call, const MeshT& mesh, uint32_t peer) {
  if (board_of(call, mesh).control && peer == mesh.rank()) return control_at(call, mesh, 0);
  return near_window(mesh, peer);
}
// What this rank has for a peer's control area at `to`: a port peer's is built at `from`.
template <class MeshT>
WEFT_DEVICE Outgoing<MeshT> outgoing_control(const LowLatencyCall& call, const MeshT& mesh, uint32_t peer,
                                             uint64_t to, uint64_t from) {
  return {mesh, peer, near_control(call, mesh, peer), to, from, port_places(mesh).records};
}
// One thread: a word of any peer's control area, this rank's included. `store` is how a near one is stored.
template <class MeshT, class Store>
WEFT_DEVICE void put_control(const LowLatencyCall& call, const MeshT& mesh, uint32_t peer, uint64_t offset,
                             uint64_t value, Store store) {
  const Outgoing<MeshT> word = outgoing_control(call, mesh, peer, offset, offset);
  if (word.is_near())
    store(reinterpret_cast<uint64_t*>(word.at()), value);
  else
    mesh.to(peer).put_value(in_part(offset, port_places(mesh).records), value);
}
template <class MeshT>
WEFT_DEVICE void put_control(const LowLatencyCall& call, const MeshT& mesh, uint32_t peer, uint64_t offset,
                             uint64_t value) {
  put_control(call, mesh, peer, offset, value, [](uint64_t* at, uint64_t v) { store_release(at, v); });
}

template <class MeshT>
WEFT_DEVICE LowLatencyState* state_of(const LowLatencyCall& call, const MeshT& mesh) {
  return reinterpret_cast<LowLatencyState*>(
      control_at(call, mesh, call.region + low_latency_control(mesh.ranks()).state));
}

// How a call waits, and where it looks for a fault.
struct CallRule : WaitRule {
  const LowLatencyState* state;  // null: in the fault box

  WEFT_DEVICE bool is_raised() const {
    return state ? load_relaxed(&state->raised) != 0 : WaitRule::is_raised();
  }
};
template <class MeshT>
WEFT_DEVICE CallRule wait_rule(const LowLatencyCall& call, const MeshT& mesh) {
  return {call.wait, board_of(call, mesh).control ? state_of(call, mesh) : nullptr};
}

WEFT_DEVICE bool is_masked(const LowLatencyCall& call, uint32_t peer) {
  return call.masked && load_relaxed(call.masked + peer) != 0;
}

// Call after a wait for a peer in vain: masks the peer, or raises a fault.
WEFT_DEVICE void lose(const LowLatencyCall& call, uint32_t peer, Site site, uint64_t want, uint64_t seen,
                      uint64_t waited_ns) {
  if (!call.may_mask) {
    raise(call.wait.fault, site, call.wait.self, peer, want, seen, waited_ns);
  } else if (waited_ns > call.wait.timeout_ns) {  // else another warp's fault has ended the wait
    store_relaxed(call.masked + peer, uint32_t{1});
    store_relaxed(call.silent + peer, uint32_t{1});
  }
}

// Waits, in one thread, for a signal of a peer; what may follow is what load_signal() allows. False: the peer
// is masked, by now or before, or it is a fault. `scale` turns values into epochs for the report.
template <class MeshT>
WEFT_DEVICE bool await(const LowLatencyCall& call, const MeshT& mesh, const uint64_t* signal, uint64_t want,
                       uint32_t peer, Site site, uint64_t scale, uint64_t& seen) {
  if (is_masked(call, peer)) {
    seen = load_signal(signal);
    return seen >= want;
  }
  uint64_t waited_ns = 0;
  const Span traced(call.wait.trace, site, peer);
  const auto& rule = wait_rule(call, mesh);
  if (poll(rule, waited_ns, [&] { return (seen = load_signal(signal)) >= want; })) return true;
  lose(call, peer, site, want / scale, seen / scale, waited_ns);
  return false;
}

// The values that the first warp of a block loads as it starts: they are on their way while the block gets ready.
struct Joined {
  uint64_t started;  // in its first lane: what the call's number is made of
  uint64_t even;     // each lane: the last call of either half that a peer has read
  uint64_t odd;
  uint32_t gave_up;  // not 0: an earlier launch gave up, so no rank takes part
};

// One thread. All blocks of the launch share out kLaunchShare so that they read the same quotient: the last block adds
// what the others leave, and even all others together do not reach the next one.
template <class MeshT>
WEFT_DEVICE uint64_t join_launch(const LowLatencyCall& call, Block block, const MeshT& mesh) {
  LowLatencyState* state = state_of(call, mesh);
  if ((call.phases & kPhaseSend) == 0) return state->call_epoch[call.call_slot];
  const bool is_last = block.index() + 1 == block.count();
  return add_local(&state->started, is_last ? kLaunchShare - (block.count() - 1) : 1);
}
WEFT_DEVICE uint64_t call_number(const LowLatencyCall& call, uint64_t started) {
  return (call.phases & kPhaseSend) == 0 ? started : started / kLaunchShare + 1;
}
// u64[2][ranks], of which a peer tells [half][peer]: the last call of the half that it has read.
template <class MeshT>
WEFT_DEVICE const uint64_t* consumed_calls(const LowLatencyCall& call, const MeshT& mesh, uint32_t peer) {
  return reinterpret_cast<const uint64_t*>(
      control_from(call, mesh, peer, call.region + low_latency_control(mesh.ranks()).consumed));
}

template <class MeshT>
WEFT_DEVICE Joined join(const LowLatencyCall& call, Block block, Warp warp, const MeshT& mesh) {
  Joined joined{};
  if (warp.index() != 0) return joined;
  if (warp.rank() == 0) joined.started = join_launch(call, block, mesh);
  joined.gave_up = load_gave_up(call.wait);
  // Mostly these acknowledgements came long ago.
  if (warp.rank() < mesh.ranks()) {
    const uint64_t* consumed = consumed_calls(call, mesh, warp.rank());
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
    put_control(call, mesh, peer, word, state->received[half.parity],
                [](uint64_t* at, uint64_t value) { store_after_launch(at, value); });
  }
  warp.sync();
}

// One thread, after that: notes what this launch is about.
template <class MeshT>
WEFT_DEVICE void note_call(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch) {
  LowLatencyState* state = state_of(call, mesh);
  if (call.phases & kPhaseSend) state->call_epoch[call.call_slot] = epoch.number;
  if (call.phases & kPhaseReceive) state->received[epoch.parity] = epoch.number;
}

// Finds, in one warp, a launch's call number, and present[peer] for each peer that takes part. Before a send
// phase it waits until all of them have read this half's last call.
template <class MeshT>
WEFT_DEVICE void find_call(const LowLatencyCall& call, Warp warp, const MeshT& mesh, const Joined& joined,
                           uint64_t* shared_epoch, uint32_t* present, Site site) {
  const Span traced(call.wait.trace, Work::kLowLatencyBegin, warp.rank() == 0);
  const uint64_t number = call_number(call, warp.broadcast(joined.started));
  const Epoch epoch{number, static_cast<uint32_t>(number & 1)};
  const uint64_t want = (call.phases & kPhaseSend) != 0 && number > 2 ? number - 2 : 0;
  const bool all_left = is_void(call.wait, joined.gave_up);
  WEFT_ROLLED
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    bool takes_part = !all_left && !is_masked(call, peer);
    const bool has_read = peer == warp.rank() && (epoch.parity != 0 ? joined.odd : joined.even) >= want;
    uint64_t seen = 0;
    if (takes_part && !has_read)
      takes_part = await(call, mesh, consumed_calls(call, mesh, peer) + epoch.parity * mesh.ranks() + peer,
                         want, peer, site, 1, seen);
    present[peer] = takes_part ? 1 : 0;
  }
  if (warp.rank() == 0) *shared_epoch = number;
}

// Starts a launch, in the block, and returns its number. The first warp finds it while the others prepare().
// Meanwhile the last warp of all tells peers what was read before; they may be waiting for just that.
template <class MeshT, class Prepare>
WEFT_DEVICE Epoch begin_call(const LowLatencyCall& call, Workers block, Warp warp, const MeshT& mesh,
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

// The warps of all blocks, dealt so that consecutive jobs go to different blocks.
struct WarpShare {
  uint32_t index;
  uint32_t total;
};
template <class Blocks>
WEFT_DEVICE WarpShare warp_share(Blocks block, Warp warp) {
  return {warp.index() * block.count() + block.index(), block.count() * block.warps()};
}

// A choice that names no expert counts as empty.
WEFT_DEVICE int64_t expert_or_none(const LowLatencyCall& call, int64_t id) {
  return id >= 0 && id < call.experts ? id : -1;
}
template <class Args>
WEFT_DEVICE int64_t chosen_expert(const Args& a, uint64_t top_k, uint64_t token, uint64_t k) {
  return expert_or_none(a.call, expert_at(a.topk_idx, a.call.id_bytes, token * top_k + k));
}

// ---- handshakes

WEFT_DEVICE void write_handshake(const LowLatencyCall& call, LowLatencyHandshake* handshake,
                                 uint64_t dispatch_epoch) {
  for (uint32_t i = 0; i < LowLatencyHandshake::kWords; ++i)
    store_relaxed(&handshake->words[i], call.handshake.words[i]);
  store_relaxed(&handshake->dispatch_epoch, dispatch_epoch);
}

// One thread: publishes all earlier writes to the peer, together with this rank's arguments.
template <class MeshT>
WEFT_DEVICE void send_handshake(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t peer,
                                uint64_t dispatch_epoch) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const uint64_t to =
      call.region + at.handshake + (epoch.parity * mesh.ranks() + mesh.rank()) * sizeof(LowLatencyHandshake);
  const Outgoing<MeshT> handshake = outgoing_control(
      call, mesh, peer, to, outbox_offset(call, mesh.ranks(), epoch) + peer * sizeof(LowLatencyHandshake));
  write_handshake(call, reinterpret_cast<LowLatencyHandshake*>(handshake.at()), dispatch_epoch);
  handshake.send(OneThread{}, sizeof(LowLatencyHandshake),
                 control_offset(call, at.arrived, mesh.ranks(), epoch, mesh.rank()), epoch.number);
}

// One thread: waits for a source's handshake. False: leave that source out.
template <class MeshT>
WEFT_DEVICE bool await_handshake(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t source,
                                 Site site) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const auto* signal = reinterpret_cast<const uint64_t*>(
      control_from(call, mesh, source, control_offset(call, at.arrived, mesh.ranks(), epoch, source)));
  uint64_t seen = 0;
  return await(call, mesh, signal, epoch.number, source, site, 1, seen);
}

// One thread, after that: whether the source makes the same call; a fault if it does not.
template <class MeshT>
WEFT_DEVICE bool agrees(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t source,
                        uint64_t dispatch_epoch) {
  const LowLatencyControl at = low_latency_control(mesh.ranks());
  const auto* vecs =
      reinterpret_cast<const Vec16*>(control_from(call, mesh, source, call.region + at.handshake)) +
      (epoch.parity * mesh.ranks() + source) * (sizeof(LowLatencyHandshake) / sizeof(Vec16));
  const Vec16 held[2] = {load_vec_fresh(vecs), load_vec_fresh(vecs + 1)};  // both at once: memory is far
  static_assert(LowLatencyHandshake::kWords == 6 && sizeof(LowLatencyHandshake) == 2 * sizeof(Vec16));
  WEFT_UNROLL
  for (uint32_t i = 0; i < LowLatencyHandshake::kWords; ++i) {
    const uint32_t theirs = held[i / 4].words[i % 4];
    if (theirs == call.handshake.words[i]) continue;
    raise(call.wait.fault, Site::kLowLatencyAgree, call.wait.self, source, call.handshake.words[i], theirs,
          i);
    return false;
  }
  const uint64_t their_epoch = held[1].words[2] | uint64_t{held[1].words[3]} << 32;
  if (their_epoch == dispatch_epoch) return true;
  raise(call.wait.fault, Site::kCombineHandle, call.wait.self, source, dispatch_epoch, their_epoch, 0);
  return false;
}

// ---- lines: vectors that travel one after the other or as lines

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
struct VecLayout {
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
  // Whether one thread takes a row as a whole.
  WEFT_DEVICE bool is_only_one() const { return kSumsByThread && !lines; }
  WEFT_INNER void store(Vec16* to, uint32_t index, Vec16 value) const {
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
  // Vectors of a row of this rank, a warp's size apart from `first` on: as many before `last` as there is room for.
  template <uint32_t kVecs>
  WEFT_DEVICE void load_row(Warp warp, Vec16 (&held)[kVecs], const Vec16* row, uint32_t first,
                            uint32_t last) const {
    if (is_only_one()) return load_row_alone(held, row, first, last);
    WEFT_UNROLL
    for (uint32_t v = 0; v < kVecs; ++v) {
      const uint32_t index = first + v * warp.size();
      if (index < last && holds(index)) held[v] = load_vec(row + vec(index));
    }
  }
  // The same of a row that a peer has written, or writes as lines. Each lane sets `bit` of `missing` if its part has not
  // all come. A lane without a part does not ask where the row is.
  template <uint32_t kVecs, class Row>
  WEFT_DEVICE void load_arrived(Warp warp, Vec16 (&held)[kVecs], Row row, uint32_t first, uint32_t last,
                                uint32_t& missing, uint32_t bit) const {
    if (is_only_one()) return load_row_alone(held, row(), first, last);
    WEFT_UNROLL
    for (uint32_t v = 0; v < kVecs; ++v) {
      const uint32_t index = first + v * warp.size();
      if (index < last && !load(row(), index, held[v])) missing |= 1u << bit;
    }
  }
};

// One thread: a peer was waited for in vain that sends lines. They do not say which call they were last
// written in; the peer's last handshake does.
template <class MeshT>
WEFT_DEVICE void lose_lines(const LowLatencyCall& call, const MeshT& mesh, Epoch epoch, uint32_t peer,
                            Site site, uint64_t waited_ns) {
  const uint64_t arrived_at = low_latency_control(mesh.ranks()).arrived;
  const auto* arrived = mesh.local() + control_offset(call, arrived_at, mesh.ranks(), epoch, peer);
  lose(call, peer, site, epoch.number, load_relaxed(reinterpret_cast<const uint64_t*>(arrived)), waited_ns);
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

}  // namespace low_latency
}  // namespace weft
