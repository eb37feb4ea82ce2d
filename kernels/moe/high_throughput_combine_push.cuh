// SPDX-License-Identifier: Apache-2.0
//
// high_throughput_combine_push.cuh: rows go back to the ranks that own their tokens, burst by burst.
// A burst's signal leaves a few items after its last row, so that the release does not wait for the row.
#pragma once

#include "kernels/moe/rendezvous.cuh"

namespace weft {
namespace combine {

struct Staging {
  std::byte* rows;
  float* weights;
};

template <class MeshT>
WEFT_DEVICE Staging staging_of(const Rendezvous& x, const MeshT& mesh, uint64_t epoch, uint32_t owner) {
  const RendezvousRecord* theirs = rendezvous_record(x, mesh, epoch, owner);
  std::byte* window = mesh.to(owner).mapped();
  return {window + theirs->rows_at, reinterpret_cast<float*>(window + theirs->meta_at)};
}

// Rows of one owner that share a signal.
struct Burst {
  uint32_t owner;
  uint32_t number;
  uint64_t first_row;
  uint64_t rows;  // 0: the owner has no such burst
};

// Task 0 is burst 0 of the first owner, task 1 burst 0 of the next one, ...: owners start with this rank's
// successor, so links share the load.
template <class MeshT>
WEFT_DEVICE Burst burst_of(const CombineArgs& a, const MeshT& mesh, uint32_t task) {
  const uint32_t peers = mesh.ranks() - 1;
  const uint32_t owner = (mesh.rank() + 1 + task % peers) % mesh.ranks();
  const uint32_t number = task / peers;
  const RowSpan span = row_span(a.prefix, mesh.ranks(), owner, mesh.rank());
  const uint64_t size = burst_rows(span.count);
  if (number * size >= span.count) return {owner, number, 0, 0};
  const uint64_t left = span.count - number * size;
  return {owner, number, span.first + number * size, left < size ? left : size};
}

template <class MeshT>
WEFT_DEVICE uint64_t most_bursts(const CombineArgs& a, const MeshT& mesh) {
  uint32_t most_rows = 0;
  for (uint32_t owner = 0; owner < mesh.ranks(); ++owner) {
    const uint32_t rows = row_span(a.prefix, mesh.ranks(), owner, mesh.rank()).count;
    most_rows = rows > most_rows ? rows : most_rows;
  }
  return most_rows < kMaxBursts * kMinBurstRows ? (most_rows + kMinBurstRows - 1) / kMinBurstRows
                                                : kMaxBursts;
}

// Tells owners that bursts have come, each a few items later than its last row left: the release finds it
// arrived, and those items travel while it waits.
template <class MeshT>
class BurstSignals {
 public:
  WEFT_DEVICE BurstSignals(const CombineArgs& a, Warp warp, const MeshT& mesh, uint64_t epoch)
      : a_(a), warp_(warp), mesh_(mesh), epoch_(epoch) {}

  // After each item that is stored; `ends` with the last one of a burst.
  template <class Pipe>
  WEFT_DEVICE void stored(Pipe& pipe, bool ends, uint32_t owner, uint32_t burst) {
    if (is_owed_ && ++items_since_ > kItemsInFlight) {
      pipe.template drain_but<kItemsInFlight>();
      tell();
    }
    if (!ends) return;
    if (is_owed_) finish(pipe);  // bursts of a few rows
    is_owed_ = true;
    items_since_ = 0;
    owner_ = owner;
    burst_ = burst;
  }
  template <class Pipe>
  WEFT_DEVICE void finish(Pipe& pipe) {
    if (!is_owed_) return;
    pipe.drain();
    tell();
  }

 private:
  static constexpr uint32_t kItemsInFlight = 6;

  WEFT_DEVICE void tell() {
    is_owed_ = false;
    if (warp_.rank() != 0) return;
    const WindowOffset signal_at = a_.at.burst_signal + (uint64_t{mesh_.rank()} * kMaxBursts + burst_) * 8;
    mesh_.to(owner_).put_value(signal_at, epoch_);
  }

  const CombineArgs& a_;
  Warp warp_;
  const MeshT& mesh_;
  uint64_t epoch_;
  bool is_owed_ = false;
  uint32_t items_since_ = 0;
  uint32_t owner_ = 0;
  uint32_t burst_ = 0;
};

template <class Shape>
WEFT_DEVICE void push_weights(const CombineArgs& a, Warp warp, const Shape& shape, float* staging,
                              const Burst& burst) {
  for (uint64_t i = warp.rank(); i < burst.rows * shape.top_k; i += warp.size()) {
    const uint64_t row = burst.first_row + i / shape.top_k;
    staging[uint64_t{static_cast<uint32_t>(a.slot[row])} * shape.top_k + i % shape.top_k] =
        a.topk_weights[row * shape.top_k + i % shape.top_k];
  }
}

struct PushTag {
  std::byte* to;
  uint32_t owner;
  uint32_t burst;
  bool ends_burst;
};

template <class MeshT, class Shape>
WEFT_DEVICE void push_rows(const CombineArgs& a, const Rendezvous& x, Block block, Warp warp,
                           const MeshT& mesh, const Shape& shape, uint64_t epoch) {
  const Share share = share_of(block, warp, a.push_warps);
  if (!share.active || mesh.ranks() == 1) return;
  const Span traced(a.wait.trace, Work::kPushBack, warp.rank() == 0);
  std::byte* stages = block.shared() + pipes_at(mesh.ranks()) +
                      (warp.index() - a.push_warps.first) * pipe_bytes(shape.piece_bytes);
  RowPipe<kPipeStages> pipe(warp, stages, shape.piece_bytes);
  const Pieces pieces{static_cast<uint64_t>(shape.row_bytes), static_cast<uint64_t>(shape.piece_bytes)};
  const uint64_t num_tasks = most_bursts(a, mesh) * (mesh.ranks() - 1);
  Tasks tasks(warp, share, a.state);
  BurstSignals signals(a, warp, mesh, epoch);
  Burst burst{};
  Staging staging{};
  uint64_t item = 0;  // of the burst
  pipe.run(
      [&]() -> RowItem<PushTag> {
        while (item == burst.rows * pieces.per_row()) {
          const uint64_t task = tasks.take();
          if (task >= num_tasks) return {};
          burst = burst_of(a, mesh, static_cast<uint32_t>(task));  // at most kMaxBursts * ranks of them
          staging = staging_of(x, mesh, epoch, burst.owner);
          if (a.topk_weights) push_weights(a, warp, shape, staging.weights, burst);
          item = 0;
        }
        const uint64_t row = burst.first_row + pieces.row(item);
        const uint64_t at = pieces.offset(item);
        const uint64_t slot = static_cast<uint32_t>(a.slot[row]);
        const RowPiece piece{a.x + row * pieces.row_bytes + at, pieces.bytes(item)};
        const bool ends = ++item == burst.rows * pieces.per_row();
        return {piece, {staging.rows + slot * pieces.row_bytes + at, burst.owner, burst.number, ends}};
      },
      [&](const PushTag& tag, RowPiece stage) {
        pipe.store(warp.rank() == 0 ? tag.to : nullptr, stage);
        signals.stored(pipe, tag.ends_burst, tag.owner, tag.burst);
      });
  signals.finish(pipe);
}

}  // namespace combine
}  // namespace weft
