// SPDX-License-Identifier: Apache-2.0
//
// Kernels of collectives.
#include "jit/host_kernel_rows.h"
#include "kernels/collective/exchange.cuh"
#include "kernels/collective/program.cuh"

namespace weft {
namespace {

// float32 sum, bfloat16 maximum and average, and FP8 product, over every protocol.
constexpr const char* kPrograms =
    "element=0 reduction=0 protocol=0; element=0 reduction=0 protocol=1; element=2 reduction=3 protocol=1; "
    "element=3 reduction=1 protocol=0; element=2 reduction=4 protocol=2";

// Every exchange of float32 sums on 8 ranks; bfloat16 sums, FP8 products and averages, too.
constexpr const char* kExchangeShapes =
    "exchange=0 element=0 reduction=0 ranks=8; exchange=1 element=0 reduction=0 ranks=8; "
    "exchange=2 element=0 reduction=0 ranks=8; exchange=3 element=0 reduction=0 ranks=8; "
    "exchange=0 element=2 reduction=0 ranks=4; exchange=0 element=3 reduction=1 ranks=17; "
    "exchange=0 element=2 reduction=4 ranks=8; exchange=2 element=3 reduction=4 ranks=8; "
    "exchange=4 element=0 reduction=0 ranks=8; exchange=5 element=0 reduction=0 ranks=8; "
    "exchange=6 element=0 reduction=0 ranks=8; exchange=7 element=0 reduction=0 ranks=8";

}  // namespace

void add_collective_kernels(std::vector<KernelRow>& rows) {
  for_each_mesh([&]<class MeshT>(MeshKind<MeshT> mesh) {
    WEFT_HOST_KERNEL(kAny, "kernels/collective/program.cuh", run_program, ProgramArgs, ProgramShape, 512,
                     kPrograms);
    WEFT_HOST_KERNEL(kMapped, "kernels/collective/exchange.cuh", run_exchange, ExchangeArgs, ExchangeShape,
                     256, kExchangeShapes);
    WEFT_HOST_KERNEL(kAny, "kernels/collective/program.cuh", scale_buffer, ScaleArgs, ProgramShape, 512,
                     "element=0 reduction=0 protocol=0; element=2 reduction=0 protocol=0");
  });
}

}  // namespace weft
