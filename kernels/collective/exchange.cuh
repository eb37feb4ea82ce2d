// SPDX-License-Identifier: Apache-2.0
//
// exchange.cuh: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather and scatter where
// every rank maps every other, each as one kernel without steps to decode. Three ways:
//   lines   every value travels beside its flag into the receiver's inbox, which needs no hand-shake and no
//           fence; on the critical path are one look at the block's counter and one trip to the peer
//           (all_reduce of larger buffers: two trips). The least latency; twice the bytes.
//   places  ranks tell each other where their buffers are; then what moves is pushed straight into the peers'
//           outputs by bulk copies (exchange_push.cuh). Calls that sum read the peers' inputs, add in
//           registers and write straight into the outputs. Every byte crosses a link once (all_reduce and, on
//           more than two ranks, broadcast and reduce: twice, but the root's link once). Two trips more than
//           lines. Where some rank's buffers are in no window, all ranks see it and take stages instead.
//   stages  the data goes in slices through staging areas of the receivers' windows, one signal for each
//           slice: every byte crosses links as often as with places, and is copied once more where it
//           arrives, while the next slice is under way. No byte of the buffers is touched by a peer, so they
//           may lie anywhere and have any alignment.
// Ranks add in the order of ranks, so all get the same bits. Waits: for lines, descriptors and signals of
// every peer; bounded by the wait rule. exchange_args.h says why slots may be reused without asking.
//
// A rank that gives up sends no results made from missing data. It takes back its descriptors, so that a
// late rank cannot use its buffers; the late rank then also waits until its deadline. Later launches of the
// rank send nothing.
#pragma once

#include "kernels/collective/exchange_places.cuh"

namespace weft {

template <class MeshT, class Shape>
WEFT_KERNEL void run_exchange(const ExchangeArgs& a, const MeshT& mesh, const Shape& shape) {
  const exchange::Run<MeshT, Shape> run{a,       mesh,        shape,
                                        Block{}, mesh.rank(), static_cast<uint32_t>(shape.ranks)};
  switch (a.way) {
    case ExchangeWay::kLines:
      return exchange::run_lines(run);
    case ExchangeWay::kPlaces:
      return exchange::run_places(run);
    case ExchangeWay::kStages:
      return exchange::run_stages(run);
  }
}

}  // namespace weft
