// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch_bulk_call.cuh: what a warp knows that has a token, or a message, of its own: Dispatch with the
// warp's part of shared memory in place of the block's; and rows that go through the warp's pipe piece by piece.
#pragma once

#include "kernels/moe/low_latency_bulk_layout.h"
#include "kernels/moe/low_latency_dispatch_deliver.cuh"
#include "kernels/moe/low_latency_dispatch_receive.cuh"

namespace weft {
namespace low_latency {

template <class MeshT, class Shape>
struct BulkDispatch : Dispatch<MeshT, Shape> {
  using Base = Dispatch<MeshT, Shape>;
  uint32_t current = 0;  // which of the batches that are sent together

  // The same with what the block has: its prefix() counts for all warps.
  WEFT_DEVICE const Base& of_block() const { return *this; }

  WEFT_DEVICE DispatchBulkShared bulk() const {
    return dispatch_bulk_shared(this->shared().bytes, this->shape.ranks, this->shape.experts_per_rank,
                                this->shape.top_k, this->block.warps(), this->shape.row_bytes);
  }
  template <class T>
  WEFT_DEVICE T* own(uint64_t offset) const {
    return this->template at<T>(bulk().parts + this->warp.index() * bulk().part_bytes + offset);
  }
  WEFT_DEVICE int32_t* slot_choice() const { return own<int32_t>(bulk().slot); }
  WEFT_DEVICE uint32_t* slot_rank() const { return own<uint32_t>(bulk().slot) + this->top_k(); }
  WEFT_DEVICE uint32_t* slot_expert() const { return slot_rank() + this->top_k(); }
  WEFT_DEVICE uint32_t* slot_place() const { return slot_expert() + this->top_k(); }
  WEFT_DEVICE uint32_t* targets() const { return own<uint32_t>(bulk().targets); }
  WEFT_DEVICE uint32_t* target() const { return own<uint32_t>(bulk().target); }
  WEFT_DEVICE std::byte** place() const { return own<std::byte*>(bulk().place); }
  WEFT_DEVICE uint32_t* sent() const { return own<uint32_t>(bulk().sent) + current * this->ranks(); }
  WEFT_DEVICE uint32_t* prefix() const { return own<uint32_t>(bulk().prefix); }

  WEFT_DEVICE uint32_t piece_bytes() const { return bulk_piece_bytes(this->shape.row_bytes); }
  WEFT_DEVICE std::byte* pipe() const {
    return this->template at<std::byte>(bulk().pipes + this->warp.index() * pipe_bytes(piece_bytes()));
  }
};

// Where a row goes: its places are dealt out to the lanes.
inline constexpr uint32_t kPlacesOfLane = (kMostBulkTopK + Warp::kMaxSize - 1) / Warp::kMaxSize;
struct RowPlaces {
  std::byte* at[kPlacesOfLane];
};
template <class PlaceOf>
WEFT_DEVICE RowPlaces row_places(Warp warp, uint32_t count, PlaceOf place_of) {
  RowPlaces places{};
  WEFT_UNROLL
  for (uint32_t i = 0; i < kPlacesOfLane; ++i) {
    const uint32_t number = warp.rank() + i * warp.size();
    if (number < count) places.at[i] = place_of(number);
  }
  return places;
}

// A row on its way through a pipe.
struct RowInPieces {
  const std::byte* src = nullptr;
  RowPlaces to{};
  uint32_t bytes = 0;
  uint32_t next = 0;

  WEFT_DEVICE bool is_over() const { return next >= bytes; }
  WEFT_DEVICE RowItem<RowPlaces> take(uint32_t piece_bytes) {
    const uint32_t left = bytes - next;
    RowItem<RowPlaces> item{{src + next, left < piece_bytes ? left : piece_bytes}, {}};
    WEFT_UNROLL
    for (uint32_t i = 0; i < kPlacesOfLane; ++i) item.tag.at[i] = to.at[i] ? to.at[i] + next : nullptr;
    next += piece_bytes;
    return item;
  }
};

// Sends the rows that find(row) brings, until it returns false, through the pipe. The warp.
template <class Pipe, class Find>
WEFT_DEVICE void stream_rows(Pipe& pipe, uint32_t piece_bytes, Find find) {
  RowInPieces row;
  auto next = [&]() -> RowItem<RowPlaces> {
    while (row.is_over())
      if (!find(row)) return {};
    return row.take(piece_bytes);
  };
  pipe.run(next, [&](const RowPlaces& to, RowPiece piece) {
    WEFT_UNROLL
    for (uint32_t i = 0; i < kPlacesOfLane; ++i) pipe.store(to.at[i], piece);
  });
}

}  // namespace low_latency
}  // namespace weft
