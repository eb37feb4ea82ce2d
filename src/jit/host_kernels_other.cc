// SPDX-License-Identifier: Apache-2.0
//
// Kernels that stand alone: rings, sparse fetches, and those that measure.
#include "jit/host_kernel_rows.h"
#include "kernels/core/channel_loop.cuh"
#include "kernels/core/copy_pages.cuh"
#include "kernels/core/exchange_floor.cuh"
#include "kernels/core/fifo_load.cuh"
#include "kernels/moe/engram.cuh"
#include "kernels/moe/ring.cuh"

namespace weft {
void add_other_kernels(std::vector<KernelRow>& rows) {
  for_each_mesh([&]<class MeshT>(MeshKind<MeshT> mesh) {
    WEFT_HOST_KERNEL(kAny, "kernels/moe/ring.cuh", ring_send, RingArgs, RingShape, 96,
                     "whole_vecs=1; whole_vecs=0");
    WEFT_HOST_KERNEL(kAny, "kernels/moe/ring.cuh", ring_receive, RingArgs, RingShape, 96,
                     "whole_vecs=1; whole_vecs=0");
    WEFT_HOST_KERNEL(kAny, "kernels/moe/engram.cuh", engram_fetch, EngramArgs, EngramShape, 512, "");
    WEFT_HOST_KERNEL(kAny, "kernels/core/channel_loop.cuh", channel_loop_run, ChannelLoopArgs,
                     ChannelLoopShape, 32, "");
    WEFT_HOST_KERNEL(kMapped, "kernels/core/copy_pages.cuh", copy_pages, CopyPagesArgs, CopyPagesShape, 512,
                     "");
    WEFT_HOST_KERNEL(kMapped, "kernels/core/exchange_floor.cuh", exchange_floor_run, ExchangeFloorArgs,
                     ExchangeFloorShape, 512, "way=0; way=1; way=2");
    WEFT_HOST_KERNEL(kPorts, "kernels/core/fifo_load.cuh", fifo_load_run, FifoLoadArgs, FifoLoadShape, 128,
                     "");
  });
}

}  // namespace weft
