// SPDX-License-Identifier: Apache-2.0
//
// What host and device share for messages between neighbours of a ring of ranks: where the slots stand in a
// window, and the kernels' arguments. Every rank has two sides; side 0 takes what the previous rank sends,
// side 1 what the next one does. Sends to a neighbour go to its side that faces this rank.
#pragma once

#include "kernels/core/carver.h"
#include "kernels/core/grid.cuh"
#include "kernels/core/wait.cuh"
#include "kernels/moe/high_throughput_args.h"

namespace weft {

inline constexpr uint32_t kRingSides = 2;
inline constexpr uint32_t kRingPieceBytes = 16 * 1024;  // of one bulk copy

// Offsets in every rank's window. Message n of a side, from 1 on, uses slot (n - 1) % in_flight. Signals only
// grow.
struct NeighbourLayout {
  uint64_t states;    // GridState[2][sides], local: of sends, of receives
  uint64_t arrived;   // u64[sides]: the last message that is there, by its sender
  uint64_t released;  // u64[sides]: the last message to that side of a neighbour which it has read
  uint64_t sizes;     // u64[sides][in_flight]: bytes of each message
  uint64_t slots;     // [sides][in_flight] of slot_bytes
  uint64_t outbox;  // as many, local: what goes to neighbours through their ports; none where all are mapped
  uint64_t end;
};

struct RingArgs {
  WaitRule wait;
  NeighbourLayout at;
  GridState* state;  // counts the messages of this direction and side
  std::byte* data;   // read by a send, written by a receive
  uint64_t bytes;
  uint64_t slot_bytes;
  uint32_t in_flight;
  uint32_t peer;
  uint32_t side;
  uint32_t reserved;
};

struct RingShape {
  int64_t vec_aligned;  // 1: `data` is 16-byte aligned and `bytes` a multiple of 16
};

}  // namespace weft
