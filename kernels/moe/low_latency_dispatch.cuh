// SPDX-License-Identifier: Apache-2.0
//
// low_latency_dispatch.cuh: every token once to each rank that owns one of its experts, into a fixed slot
// there; the receiver copies it to the places of its experts.
// Send:    1 some blocks count this rank's tokens per expert and tell each peer
//          2 every block takes batches of tokens: quantises a row and stores it to all its ranks at once, then
//            moves the batch's word at every peer. Few tokens, one to a batch, leave as lines instead: put
//            together in shared memory, stored with tags, no word after them
// Receive: 3 one warp of every block waits for all counts and finds where segments begin, while another
//            still publishes the block's stores
//          4 every warp takes (source, batch) pairs and copies messages out as their word moves or their
//            lines come
// Order:   rows of an expert by source, then by token, then by slot: the same in every run.
// Waits:   for the peers' reading of the call before last; step 3 for every peer's counts; step 4 for a
//          batch's word or lines.
// Cost:    per (token, rank): row, scales and 16 + 8 * K bytes, as lines 8/7 of that; per (batch, rank)
//          one word; per rank 8 * Le bytes.
#pragma once

#include "kernels/moe/low_latency_dispatch_receive.cuh"
#include "kernels/moe/low_latency_dispatch_send.cuh"
#include "kernels/moe/low_latency_watch.cuh"

namespace weft {

template <class MeshT, class Shape>
WEFT_KERNEL void low_latency_dispatch(const LowLatencyDispatchArgs& a, const MeshT& mesh,
                                      const Shape& shape) {
  low_latency::Dispatch<MeshT, Shape> d{a,      mesh, shape, low_latency::workers_of(a.call, mesh),
                                        Warp{}, {},   {}};
  d.keep_layouts();
  auto* shared_epoch = d.template at<uint64_t>(0);
  if (low_latency::is_watching(d))
    return low_latency::watch(d, low_latency::join(a.call, Block{}, d.warp, mesh), shared_epoch);
  const BlockSpan traced(a.call.wait.trace, Work::kLowLatencyCall);
  const low_latency::Joined joined = low_latency::join(a.call, Block{}, d.warp, mesh);
  const bool sends = (a.call.phases & kPhaseSend) != 0;
  if (sends) low_latency::clear_choices(d);
  if (d.block.rank() == 0) *d.found() = 0;
  d.block.sync();
  // Asked for at once; used when it is known where it goes.
  const low_latency::FirstVecs first =
      low_latency::load_first_vecs(d, sends ? low_latency::first_token(d) : a.call.tokens);
  bool is_prepared = false;
  d.epoch = low_latency::begin_call(a.call, d.block, d.warp, mesh, joined, shared_epoch, d.present(),
                                    Site::kLowLatencyDispatchSlot,
                                    [&] { is_prepared = sends && low_latency::prepare_send(d); });
  if (sends) {
    low_latency::send_counts(d, is_prepared);
    low_latency::send_batches(d, is_prepared, first);
  }
  if (a.call.phases & kPhaseReceive) {
    if (d.warp.index() == (d.block.warps() > 1 ? 1 : 0)) low_latency::find_segments(d);
    low_latency::receive_batches(d);
  }
  low_latency::leave_watched(d);
}

}  // namespace weft
