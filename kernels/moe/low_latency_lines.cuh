// SPDX-License-Identifier: Apache-2.0
//
// low_latency_lines.cuh: vectors that travel one after the other or as lines, and how a receiver waits for lines.
#pragma once

#include "kernels/moe/low_latency_call.cuh"

namespace weft {
namespace low_latency {

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
  WEFT_DEVICE bool is_alone() const { return kSumsAlone && !lines; }
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
    if (is_alone()) return load_row_alone(held, row, first, last);
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
    if (is_alone()) return load_row_alone(held, row(), first, last);
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
