// SPDX-License-Identifier: Apache-2.0
//
// Kernels of expert parallelism in its low-latency form.
#include "jit/host_kernel_rows.h"
#include "kernels/moe/low_latency_combine.cuh"
#include "kernels/moe/low_latency_combine_bulk.cuh"
#include "kernels/moe/low_latency_dispatch.cuh"
#include "kernels/moe/low_latency_dispatch_bulk.cuh"

namespace weft {
namespace {

// DeepSeek-V3 on 8 ranks in every format; the smallest row; 17 ranks, top-32, uneven experts.
constexpr const char* kLowLatencyRows =
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=7168 scale_bytes=224 payload=1 weights=0 padding=0; "
    "ranks=8 experts_per_rank=36 top_k=8 row_bytes=7168 scale_bytes=56 payload=3 weights=0 padding=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 scale_bytes=0 payload=0 weights=0 padding=0; "
    "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 scale_bytes=4 payload=0 weights=1 padding=0; "
    "ranks=17 experts_per_rank=4 top_k=32 row_bytes=4096 scale_bytes=128 payload=2 weights=1 padding=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=7168 scale_bytes=224 payload=4 weights=0 padding=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=3584 scale_bytes=448 payload=5 weights=0 padding=0; "
    "ranks=3 experts_per_rank=2 top_k=1 row_bytes=32 scale_bytes=4 payload=6 weights=1 padding=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=7168 scale_bytes=224 payload=0 weights=1 padding=16";
constexpr const char* kLowLatencyReplies =
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=0 weights=0 element=0 out_element=0 "
    "accumulate=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=1 weights=0 element=0 out_element=0 "
    "accumulate=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=2 weights=0 element=0 out_element=0 "
    "accumulate=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=3 weights=0 element=0 out_element=0 "
    "accumulate=0; "
    "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 reply=0 weights=1 element=0 out_element=0 accumulate=0; "
    "ranks=2 experts_per_rank=128 top_k=8 row_bytes=14336 reply=0 weights=0 element=0 out_element=0 "
    "accumulate=0; "
    "ranks=17 experts_per_rank=4 top_k=32 row_bytes=4096 reply=0 weights=1 element=0 out_element=0 "
    "accumulate=0; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=28672 reply=0 weights=1 element=1 out_element=0 "
    "accumulate=1; "
    "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=1 weights=1 element=2 out_element=2 "
    "accumulate=0";

// Of the split all-to-all on few SMs: DeepSeek-V3, the smallest row, top-32.
constexpr const char* kBulkRows =
    "ranks=4 experts_per_rank=64 top_k=8 row_bytes=7168 scale_bytes=224 payload=0 weights=1 padding=16; "
    "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 scale_bytes=4 payload=0 weights=1 padding=0; "
    "ranks=17 experts_per_rank=4 top_k=32 row_bytes=14336 scale_bytes=0 payload=0 weights=1 padding=0";
constexpr const char* kBulkReplies =
    "ranks=4 experts_per_rank=64 top_k=8 row_bytes=14336 reply=0 weights=1 element=0 out_element=0 "
    "accumulate=0; "
    "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 reply=0 weights=1 element=2 out_element=0 accumulate=0; "
    "ranks=17 experts_per_rank=4 top_k=32 row_bytes=28672 reply=0 weights=1 element=1 out_element=0 "
    "accumulate=1";

}  // namespace

void add_low_latency_kernels(std::vector<KernelRow>& rows) {
  for_each_mesh([&]<class MeshT>(MeshKind<MeshT> mesh) {
    WEFT_HOST_KERNEL(kAny, "kernels/moe/low_latency_dispatch.cuh", low_latency_dispatch,
                     LowLatencyDispatchArgs, LowLatencyDispatchShape, 512, kLowLatencyRows);
    WEFT_HOST_KERNEL(kAny, "kernels/moe/low_latency_combine.cuh", low_latency_combine, LowLatencyCombineArgs,
                     LowLatencyCombineShape, 512, kLowLatencyReplies);
    WEFT_HOST_KERNEL(kMapped, "kernels/moe/low_latency_dispatch_bulk.cuh", low_latency_dispatch_bulk,
                     LowLatencyDispatchArgs, LowLatencyDispatchShape, 512, kBulkRows);
    WEFT_HOST_KERNEL(kMapped, "kernels/moe/low_latency_combine_bulk.cuh", low_latency_combine_bulk,
                     LowLatencyCombineArgs, LowLatencyCombineShape, 512, kBulkReplies);
  });
}

}  // namespace weft
