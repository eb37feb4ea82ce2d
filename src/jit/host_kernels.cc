// SPDX-License-Identifier: Apache-2.0
//
// Adding a kernel: include its file, and add its row. The host versions (one for each mesh), the compile
// tests for every GPU architecture and the checks of struct sizes follow from the row.
#include "jit/host_kernels.h"

#include <type_traits>
#include <vector>

#include "kernels/collective/exchange.cuh"
#include "kernels/collective/program.cuh"
#include "kernels/core/channel_loop.cuh"
#include "kernels/core/exchange_floor.cuh"
#include "kernels/core/fifo_load.cuh"
#include "kernels/core/hybrid.cuh"
#include "kernels/moe/engram.cuh"
#include "kernels/moe/high_throughput_combine.cuh"
#include "kernels/moe/high_throughput_dispatch.cuh"
#include "kernels/moe/high_throughput_layout.cuh"
#include "kernels/moe/low_latency_combine.cuh"
#include "kernels/moe/low_latency_dispatch.cuh"
#include "kernels/moe/ring.cuh"
#include "kernels/moe/two_level_combine.cuh"
#include "kernels/moe/two_level_dispatch.cuh"
#include "kernels/moe/two_level_notify.cuh"
#include "transports/list.h"

namespace weft {
namespace {

// What a kernel must be able to do with its peers: anything will do; it takes addresses of all of them; it is there for
// those that have none.
enum class Needs { kAny, kMapped, kPorts };

// DeepSeek-V3's rows in bf16 and in fp8 with scales; the smallest row; a row in float32 that takes several
// pieces.
constexpr const char* kRows =
    "row_bytes=14336 piece_bytes=14336 scale_words=0 top_k=8 element=0; "
    "row_bytes=7168 piece_bytes=7168 scale_words=56 top_k=8 element=0; "
    "row_bytes=16 piece_bytes=16 scale_words=0 top_k=1 element=0; "
    "row_bytes=32768 piece_bytes=16384 scale_words=0 top_k=32 element=1";

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

// float32 sum, bfloat16 maximum and average, and FP8 product, over every protocol.
constexpr const char* kPrograms =
    "element=0 reduction=0 protocol=0; element=0 reduction=0 protocol=1; element=2 reduction=3 protocol=1; "
    "element=3 reduction=1 protocol=0; element=2 reduction=4 protocol=2";

// Every exchange of float32 sums on 8 ranks; bfloat16 sums, FP8 products and averages, too.
constexpr const char* kExchangeShapes =
    "exchange=0 element=0 reduction=0 ranks=8; exchange=1 element=0 reduction=0 ranks=8; "
    "exchange=2 element=0 reduction=0 ranks=8; exchange=3 element=0 reduction=0 ranks=8; "
    "exchange=0 element=2 reduction=0 ranks=4; exchange=0 element=3 reduction=1 ranks=17; "
    "exchange=0 element=2 reduction=4 ranks=8; exchange=2 element=3 reduction=4 ranks=8";

// A mesh, as kernels are built for it.
template <class MeshT>
struct MeshKind {
  using type = MeshT;
  std::string_view name;
};

template <Needs needs, class MeshT, class AddRow>
void add_row(AddRow add) {
  // A kernel that takes peers' addresses does not compile for a mesh that has none.
  if constexpr (needs == Needs::kAny || needs == (MappedMeshOnly<MeshT> ? Needs::kMapped : Needs::kPorts))
    add();
}

// WEFT_HOST_KERNEL(what it needs, file, function, Args, Shape, threads per block on GPUs, typical constants)
#define WEFT_HOST_KERNEL(needs, file, function, Args, Shape, threads, typical)                            \
  add_row<Needs::needs, MeshT>([&]<class M = MeshT> {                                                     \
    rows.push_back({file, #function, #Args, mesh.name, #Shape, threads, typical, sizeof(Args), sizeof(M), \
                    [](const void* args, const void* device_mesh, const void* shape) {                    \
                      function<M, Shape>(*static_cast<const Args*>(args),                                 \
                                         *static_cast<const M*>(device_mesh),                             \
                                         *static_cast<const Shape*>(shape));                              \
                    }});                                                                                  \
  })

template <class MeshT>
void add_kernels(std::vector<KernelRow>& rows, MeshKind<MeshT> mesh) {
  WEFT_HOST_KERNEL(kAny, "kernels/moe/high_throughput_layout.cuh", dispatch_layout, LayoutArgs,
                   HighThroughputShape, 256, "");
  WEFT_HOST_KERNEL(kMapped, "kernels/moe/high_throughput_layout.cuh", dispatch_notify, NotifyArgs,
                   HighThroughputShape, 1024, "");
  WEFT_HOST_KERNEL(kMapped, "kernels/moe/high_throughput_dispatch.cuh", dispatch_rows, DispatchArgs,
                   HighThroughputShape, 256, kRows);
  WEFT_HOST_KERNEL(kMapped, "kernels/moe/high_throughput_combine.cuh", combine_rows, CombineArgs,
                   HighThroughputShape, 512, kRows);
  WEFT_HOST_KERNEL(kPorts, "kernels/moe/two_level_notify.cuh", two_level_notify, TwoLevelNotifyArgs,
                   HighThroughputShape, 512, "");
  WEFT_HOST_KERNEL(kPorts, "kernels/moe/two_level_dispatch.cuh", two_level_dispatch, TwoLevelDispatchArgs,
                   HighThroughputShape, 512, kRows);
  WEFT_HOST_KERNEL(kPorts, "kernels/moe/two_level_combine.cuh", two_level_combine, TwoLevelCombineArgs,
                   HighThroughputShape, 512, kRows);
  WEFT_HOST_KERNEL(kAny, "kernels/moe/low_latency_dispatch.cuh", low_latency_dispatch, LowLatencyDispatchArgs,
                   LowLatencyDispatchShape, 512, kLowLatencyRows);
  WEFT_HOST_KERNEL(kAny, "kernels/moe/low_latency_combine.cuh", low_latency_combine, LowLatencyCombineArgs,
                   LowLatencyCombineShape, 512, kLowLatencyReplies);
  WEFT_HOST_KERNEL(kAny, "kernels/moe/ring.cuh", ring_send, RingArgs, RingShape, 96,
                   "whole_vecs=1; whole_vecs=0");
  WEFT_HOST_KERNEL(kAny, "kernels/moe/ring.cuh", ring_receive, RingArgs, RingShape, 96,
                   "whole_vecs=1; whole_vecs=0");
  WEFT_HOST_KERNEL(kAny, "kernels/moe/engram.cuh", engram_fetch, EngramArgs, EngramShape, 512, "");
  WEFT_HOST_KERNEL(kAny, "kernels/collective/program.cuh", run_program, ProgramArgs, ProgramShape, 512,
                   kPrograms);
  WEFT_HOST_KERNEL(kMapped, "kernels/collective/exchange.cuh", run_exchange, ExchangeArgs, ExchangeShape, 256,
                   kExchangeShapes);
  WEFT_HOST_KERNEL(kAny, "kernels/core/channel_loop.cuh", channel_loop_run, ChannelLoopArgs, ChannelLoopShape,
                   32, "");
  WEFT_HOST_KERNEL(kMapped, "kernels/core/exchange_floor.cuh", exchange_floor_run, ExchangeFloorArgs,
                   ExchangeFloorShape, 512, "way=0; way=1; way=2");
  WEFT_HOST_KERNEL(kPorts, "kernels/core/fifo_load.cuh", fifo_load_run, FifoLoadArgs, FifoLoadShape, 128, "");
  WEFT_HOST_KERNEL(kAny, "kernels/collective/program.cuh", scale_buffer, ScaleArgs, ProgramShape, 512,
                   "element=0 reduction=0 protocol=0; element=2 reduction=0 protocol=0");
}

// Mapped peers beside ports.
template <class PortMesh>
void add_with_mapped(std::vector<KernelRow>& rows, std::string_view name) {
  if constexpr (!std::is_same_v<PortMesh, MappedMesh>)
    add_kernels(rows, MeshKind<HybridMesh<MappedMesh, PortMesh>>{name});
}

std::vector<KernelRow> make_table() {
  std::vector<KernelRow> rows;
#define WEFT_TRANSPORT(folder, MeshT)         \
  add_kernels(rows, MeshKind<MeshT>{#MeshT}); \
  add_with_mapped<MeshT>(rows, "HybridMesh<weft::MappedMesh, weft::" #MeshT ">");
  WEFT_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT
  return rows;
}

}  // namespace

std::span<const KernelRow> kernel_table() {
  static const std::vector<KernelRow> rows = make_table();
  return rows;
}

// A mesh of several parts names them all.
std::vector<std::string_view> mesh_headers(std::string_view mesh_type) {
  std::vector<std::string_view> headers;
#define WEFT_TRANSPORT(folder, MeshT)                   \
  if (mesh_type.find(#MeshT) != std::string_view::npos) \
    headers.push_back("transports/" #folder "/channel.cuh");
  WEFT_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT
  if (mesh_type.starts_with("HybridMesh<")) headers.push_back("kernels/core/hybrid.cuh");
  return headers;
}

const KernelRow* find_kernel(std::string_view name, std::string_view mesh_type) {
  for (const KernelRow& row : kernel_table())
    if (row.name == name && row.mesh_type == mesh_type) return &row;
  return nullptr;
}

}  // namespace weft
