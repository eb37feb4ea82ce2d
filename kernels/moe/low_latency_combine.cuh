// SPDX-License-Identifier: Apache-2.0
//
// low_latency_combine.cuh: the experts' rows return to their tokens and are summed there.
// Send:    1 every rank tells its peers the weights of its tokens (exact: only that it has come)
//          2 every warp takes a piece of the messages of one (owner, batch), in the dispatch's terms: sums a
//            message's rows with their weights and stores one reply per token (exact: one per row, as it
//            is), then moves the batch's word. Tokens that came as lines are answered as lines, without a
//            word
// Receive: 3 every warp takes a part of one token, waits for the batches that bring its replies, or for
//            lines, and sums them. Where one launch does both phases, of up to 128 tokens a rank, the rank's own
//            rows are summed here, while others' replies are on their way, and it sends itself none
// Sums:    float32. Reduced: slots of one rank in order, rounded to bf16, then ranks in the order of their
//          first slots, one rounding. Exact: slots in order, one rounding.
// Ports:   low_latency_combine_ports.cuh has steps 1 and 2 for ranks with port peers. Where windows are memory of the host and
//          this is a GPU, the first block watches for the others (low_latency_watch.cuh), here and in dispatch.
// Waits:   for the peers' reading of the call before last; step 2 for an owner's weights, and, where other
//          kernels of this rank raise signals, for those of the rows it sends; step 3 for words or lines.
// Cost:    per (token, rank) (exact: per slot) one row, as lines 8/7 of it; per rank and token 4 * K bytes
//          of weights, or a line; per (batch, piece, rank) a word.
#pragma once

#include "kernels/moe/low_latency_combine_ports.cuh"
#include "kernels/moe/low_latency_combine_receive.cuh"
#include "kernels/moe/low_latency_watch.cuh"

namespace weft {

template <class MeshT, class Shape>
WEFT_KERNEL void low_latency_combine(const LowLatencyCombineArgs& a, const MeshT& mesh, const Shape& shape) {
  low_latency::Combine<MeshT, Shape> c{a, mesh, shape, low_latency::workers_of(a.call, mesh), Warp{}, {}, {}};
  c.keep_layouts();
  auto* shared_epoch = c.template at<uint64_t>(0);
  if (low_latency::is_watching(c))
    return low_latency::watch(c, low_latency::join(a.call, Block{}, c.warp, mesh), shared_epoch);
  const BlockSpan traced(a.call.wait.trace, Work::kLowLatencyCall);
  const low_latency::Joined joined = low_latency::join(a.call, Block{}, c.warp, mesh);
  c.epoch = low_latency::begin_call(a.call, c.block, c.warp, mesh, joined, shared_epoch, c.present(),
                                    Site::kLowLatencyCombineSlot, [] {});
  if (a.call.phases & kPhaseSend) decltype(c)::Delivery::send(c);
  if (a.call.phases & kPhaseReceive) {
    low_latency::check_peers(c);
    low_latency::sum_tokens(c);
  }
  low_latency::leave_watched(c);
}

}  // namespace weft
