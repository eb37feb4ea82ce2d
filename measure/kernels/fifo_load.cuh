// SPDX-License-Identifier: Apache-2.0
//
// fifo_load.cuh: times the queue between kernels and the host threads that serve their ports.
// kRate: each producer, a thread of its own warp, asks for values as fast as it can, on a channel of its own.
// kTrips: one producer asks to be answered (a flush), and notes when it asked and when it was.
// Waits: for answers; bounded by the mesh.
#pragma once

#include "kernels/core/wait.cuh"

namespace weft {

enum class FifoLoadKind : uint32_t { kRate, kTrips };

struct FifoLoadArgs {
  uint64_t count;      // of each producer
  uint64_t* asked_ns;  // [count] of trips, by this device's clock; memory that the host reads
  uint64_t* came_ns;   // [count]
  uint64_t* looks_ns;  // [count]: how long it takes to look once
  uint32_t producers;
  uint32_t kind;
};

struct FifoLoadShape {};

template <class MeshT>
WEFT_DEVICE void make_trips(const FifoLoadArgs& a, const MeshT& mesh) {
  auto channel = mesh.to(0);
  const auto* word = reinterpret_cast<const uint64_t*>(mesh.local());
  for (uint64_t i = 0; i < a.count; ++i) {
    const uint64_t start = now_ns();
    const uint64_t seen = load_relaxed(word);
    const uint64_t asked = now_ns() + seen;  // the word is 0; the clock is read after it has come
    channel.flush();
    a.came_ns[i] = now_ns();
    a.asked_ns[i] = asked;
    a.looks_ns[i] = asked - start;
  }
}

template <class MeshT, class Shape>
WEFT_KERNEL void fifo_load_run(const FifoLoadArgs& a, const MeshT& mesh, const Shape&) {
  const Block block;
  const Warp warp;
  const uint32_t producer = block.index() * block.warps() + warp.index();
  if (warp.rank() != 0 || producer >= a.producers) return;
  if (static_cast<FifoLoadKind>(a.kind) == FifoLoadKind::kTrips) return make_trips(a, mesh);
  auto channel = mesh.to(producer);
  for (uint64_t i = 0; i < a.count; ++i) channel.put_value(0, i);
}

}  // namespace weft
