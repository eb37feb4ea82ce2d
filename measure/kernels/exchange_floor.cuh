// SPDX-License-Identifier: Apache-2.0
//
// exchange_floor.cuh: what `weft bench floor` times: ranks that map each other exchange bytes, and nothing else.
// Steps of a block:
//   1 Its share of `bytes` goes to each of `peers` ranks, the successors of this one. It goes by stores through the channel,
//     by bulk copies through shared memory, or as lines (core/line.cuh).
//   2 A flag goes to the same block, or warp, of each. Lines need none.
//   3 It waits for the same from the predecessors of this rank.
//   4 It notes when it began and ended.
// A copy ends after step 1, when what the block has stored has arrived.
// Launches are counted by block, on the device, so a graph may be replayed; ranks launch the same ones in one order.
// Waits: step 3, for one peer each; bounded by the wait rule, which names it.
#pragma once

#include "kernels/core/line.cuh"
#include "kernels/core/wait.cuh"

namespace weft {

inline constexpr uint32_t kFloorBlocks = 256;  // at most
inline constexpr uint32_t kFloorPipes = 4;     // warps of a block that copy in bulk
inline constexpr uint32_t kFloorStages = 4;    // pieces of each of them that are on their way
inline constexpr uint32_t kFloorPieceBytes = 8192;
inline constexpr uint32_t kFloorKept = 64;  // launches whose times are kept

inline constexpr int64_t kFloorStores = 0;
inline constexpr int64_t kFloorBulk = 1;
inline constexpr int64_t kFloorLines = 2;

struct FloorStamp {
  uint64_t begin_ns;  // of this device's clock
  uint64_t end_ns;
};

// Offsets in the window.
struct ExchangeFloorArgs {
  WaitRule wait;
  uint64_t launches_at;  // u64[kFloorBlocks] of this rank: launches so far, for each block
  uint64_t stamps_at;    // FloorStamp[kFloorKept][kFloorBlocks] of this rank, by launch % kFloorKept
  uint64_t flags_at;     // u64[R][kFloorBlocks][kFloorPipes] by source: the last launch that has come
  uint64_t src_at;       // [R - 1][stride] by distance of the peer
  uint64_t dst_at;       // [R][stride] by source
  uint64_t lines_at;     // [2][R][line_stride] by parity of the launch, and source
  uint64_t stride;
  uint64_t line_stride;
  uint64_t bytes;  // to each peer; a multiple of 16
  uint32_t share;  // of each block, in vectors, or in lines
  uint32_t longer;
  uint32_t peers;  // 1 to R - 1; with lines R - 1, so that a rank two launches ahead has been read
  uint32_t waits;  // 0: a copy
};

struct ExchangeFloorShape {
  int64_t way;
};

namespace exchange_floor {

// One launch, as a block sees it.
template <class MeshT, class Shape>
struct Side {
  const ExchangeFloorArgs& a;
  const MeshT& mesh;
  const Shape& shape;
  uint64_t launch;
  Block block{};
  Warp warp{};

  WEFT_DEVICE uint32_t successor(uint32_t distance) const {
    return (mesh.rank() + 1 + distance) % mesh.ranks();
  }
  WEFT_DEVICE uint32_t predecessor(uint32_t distance) const {
    return (mesh.rank() + mesh.ranks() - 1 - distance) % mesh.ranks();
  }
  WEFT_DEVICE uint64_t flag_at(uint32_t source, uint32_t pipe) const {
    return a.flags_at + ((uint64_t{source} * kFloorBlocks + block.index()) * kFloorPipes + pipe) * 8;
  }
  // Where a block's share begins, in vectors or lines; the first `a.longer` shares are longer by one.
  WEFT_DEVICE uint32_t share_at(uint32_t index) const {
    return index * a.share + (index < a.longer ? index : a.longer);
  }
  WEFT_DEVICE uint32_t first() const { return share_at(block.index()); }
  WEFT_DEVICE uint32_t last() const { return share_at(block.index() + 1); }

  // The warp: waits for the flags of the same warp of all sources.
  WEFT_DEVICE void await(uint32_t pipe) const {
    for (uint32_t i = warp.rank(); i < a.peers; i += warp.size()) {
      const uint32_t peer = predecessor(i);
      const auto* flag = reinterpret_cast<const uint64_t*>(mesh.local() + flag_at(peer, pipe));
      uint64_t seen = 0, waited_ns = 0;
      if (!poll_signal(flag, launch, a.wait, seen, waited_ns))
        raise(a.wait.fault, Site::kLoop, a.wait.self, peer, launch, seen, waited_ns);
    }
  }
  // The first warp, after the block's stores: tells all peers, and waits to be told. Lanes share peers.
  WEFT_DEVICE void meet(uint32_t pipe) const {
    for (uint32_t i = warp.rank(); i < a.peers; i += warp.size())
      mesh.to(successor(i)).put_value(flag_at(mesh.rank(), pipe), launch);
    await(pipe);
  }

  WEFT_DEVICE void by_stores() const {
    const uint64_t begin = uint64_t{first()} * 16, bytes = uint64_t{last()} * 16 - begin;
    for (uint32_t i = 0; i < a.peers; ++i)
      mesh.to(successor(i))
          .put(block, a.dst_at + mesh.rank() * a.stride + begin, a.src_at + i * a.stride + begin, bytes);
    block.sync();
    if (warp.index() != 0) return;
    if (a.waits != 0) return meet(0);
    fence_system();
  }

  // A block's pieces go round: one to each peer, then the next ones.
  WEFT_DEVICE void by_bulk_copies() const {
    if (warp.index() >= kFloorPipes) return;
    constexpr uint32_t kPipeBytes = pipe_bytes(kFloorPieceBytes, kFloorStages);
    RowPipe<kFloorStages> pipe(warp, block.shared() + warp.index() * kPipeBytes, kFloorPieceBytes);
    const uint64_t end = uint64_t{last()} * 16;
    const uint32_t pipes = block.warps() < kFloorPipes ? block.warps() : kFloorPipes;
    uint64_t at = uint64_t{first()} * 16;
    uint32_t distance = 0;
    auto go_on = [&](uint32_t pieces) {
      for (distance += pieces; distance >= a.peers; distance -= a.peers) at += kFloorPieceBytes;
    };
    go_on(warp.index());
    pipe.run(
        [&]() -> RowItem<std::byte*> {
          if (at >= end) return {};
          const uint64_t bytes = end - at < kFloorPieceBytes ? end - at : kFloorPieceBytes;
          const std::byte* from = mesh.local() + a.src_at + distance * a.stride + at;
          std::byte* to = mesh.to(successor(distance)).mapped() + a.dst_at + mesh.rank() * a.stride + at;
          go_on(pipes);
          return {{from, static_cast<uint32_t>(bytes)}, to};
        },
        [&](std::byte* to, RowPiece stage) { pipe.store(warp.rank() == 0 ? to : nullptr, stage); });
    pipe.drain();
    if (a.waits == 0) return;
    // Its own lane 0 must release what a warp has copied.
    if (warp.rank() == 0)
      for (uint32_t i = 0; i < a.peers; ++i)
        mesh.to(successor(i)).put_value(flag_at(mesh.rank(), warp.index()), launch);
    await(warp.index());
  }

  WEFT_DEVICE uint64_t lines_of_source(uint32_t source) const {
    return a.lines_at + ((launch & 1) * mesh.ranks() + source) * a.line_stride;
  }
  // A lane has the same part of each line of a warp's turn, and all of a line's lanes take part in a turn.
  WEFT_DEVICE void by_lines() const {
    const auto vecs = static_cast<uint32_t>(a.bytes / 16);
    const uint32_t begin = first() * kLineParts, end = last() * kLineParts;
    const uint64_t tag = line_tag(launch);
    for (uint32_t i = 0; i < a.peers; ++i) {
      const auto* from = reinterpret_cast<const Vec16*>(mesh.local() + a.src_at + i * a.stride);
      auto* to = reinterpret_cast<Vec16*>(mesh.to(successor(i)).mapped() + lines_of_source(mesh.rank()));
      for (uint32_t at = begin + block.rank(); at < end; at += block.size()) {
        const LinePart part{at};
        store_part(to, part, part.holds(vecs) ? load_vec(from + part.vec()) : Vec16{}, tag);
      }
    }
    for (uint32_t i = 0; a.waits != 0 && i < a.peers; ++i) await_lines(predecessor(i), begin, end, tag);
  }
  WEFT_DEVICE void await_lines(uint32_t peer, uint32_t begin, uint32_t end, uint64_t tag) const {
    const auto* from = reinterpret_cast<const Vec16*>(mesh.local() + lines_of_source(peer));
    uint64_t waited_ns = 0;
    auto came = [&] {
      bool all = true;
      Vec16 vec;
      for (uint32_t at = begin + block.rank(); at < end; at += block.size())
        all = load_part(from, {at}, tag, vec) && all;
      return !warp.any(!all);
    };
    if (!poll_together(warp, a.wait, waited_ns, came) && warp.rank() == 0)
      raise(a.wait.fault, Site::kLoop, a.wait.self, peer, launch, 0, waited_ns);
  }
};

}  // namespace exchange_floor

template <class MeshT, class Shape>
WEFT_KERNEL void exchange_floor_run(const ExchangeFloorArgs& a, const MeshT& mesh, const Shape& shape) {
  const uint64_t begin_ns = now_ns();
  const Block block;
  auto* launches = reinterpret_cast<uint64_t*>(mesh.local() + a.launches_at) + block.index();
  const uint64_t launch = *launches + 1;
  const exchange_floor::Side<MeshT, Shape> side{a, mesh, shape, launch};
  if (shape.way == kFloorStores)
    side.by_stores();
  else if (shape.way == kFloorBulk)
    side.by_bulk_copies();
  else
    side.by_lines();
  block.sync();
  // Blocks that are not of this launch count it too: all have the same number.
  auto* all = reinterpret_cast<uint64_t*>(mesh.local() + a.launches_at);
  for (uint32_t i = block.index() + block.rank() * block.count(); i < kFloorBlocks;
       i += block.size() * block.count())
    all[i] = launch;
  if (block.rank() != 0) return;
  auto* stamps = reinterpret_cast<FloorStamp*>(mesh.local() + a.stamps_at);
  stamps[launch % kFloorKept * kFloorBlocks + block.index()] = {begin_ns, now_ns()};
}

}  // namespace weft
