// SPDX-License-Identifier: Apache-2.0
//
// Kernels of expert parallelism in its high-throughput form, inside of nodes and between them.
#include "jit/host_kernel_rows.h"
#include "kernels/moe/high_throughput_combine.cuh"
#include "kernels/moe/high_throughput_dispatch.cuh"
#include "kernels/moe/high_throughput_layout.cuh"
#include "kernels/moe/two_level_combine.cuh"
#include "kernels/moe/two_level_dispatch.cuh"
#include "kernels/moe/two_level_notify.cuh"

namespace weft {
namespace {

// DeepSeek-V3's rows in bf16 and in fp8 with scales; the smallest row; a row in float32 that takes several
// pieces.
constexpr const char* kRows =
    "row_bytes=14336 piece_bytes=14336 scale_words=0 top_k=8 element=0; "
    "row_bytes=7168 piece_bytes=7168 scale_words=56 top_k=8 element=0; "
    "row_bytes=16 piece_bytes=16 scale_words=0 top_k=1 element=0; "
    "row_bytes=32768 piece_bytes=16384 scale_words=0 top_k=32 element=1";
// Those that come back: in pieces as combine moves them.
constexpr const char* kSummedRows =
    "row_bytes=14336 piece_bytes=7168 scale_words=0 top_k=8 element=0; "
    "row_bytes=16 piece_bytes=16 scale_words=0 top_k=1 element=0; "
    "row_bytes=32768 piece_bytes=8192 scale_words=0 top_k=32 element=1";

}  // namespace

void add_high_throughput_kernels(std::vector<KernelRow>& rows) {
  for_each_mesh([&]<class MeshT>(MeshKind<MeshT> mesh) {
    WEFT_HOST_KERNEL(kAny, "kernels/moe/high_throughput_layout.cuh", dispatch_layout, LayoutArgs,
                     HighThroughputShape, 256, "");
    WEFT_HOST_KERNEL(kMapped, "kernels/moe/high_throughput_layout.cuh", dispatch_notify, NotifyArgs,
                     HighThroughputShape, 1024, "");
    WEFT_HOST_KERNEL(kMapped, "kernels/moe/high_throughput_dispatch.cuh", dispatch_rows, DispatchArgs,
                     HighThroughputShape, 256, kRows);
    WEFT_HOST_KERNEL(kMapped, "kernels/moe/high_throughput_combine.cuh", combine_rows, CombineArgs,
                     HighThroughputShape, 512, kSummedRows);
    WEFT_HOST_KERNEL(kPorts, "kernels/moe/two_level_notify.cuh", two_level_notify, TwoLevelNotifyArgs,
                     HighThroughputShape, 512, "");
    WEFT_HOST_KERNEL(kPorts, "kernels/moe/two_level_dispatch.cuh", two_level_dispatch, TwoLevelDispatchArgs,
                     HighThroughputShape, 512, kRows);
    WEFT_HOST_KERNEL(kPorts, "kernels/moe/two_level_combine.cuh", two_level_combine, TwoLevelCombineArgs,
                     HighThroughputShape, 512, kRows);
  });
}

}  // namespace weft
