// SPDX-License-Identifier: Apache-2.0
//
// Every kernel, once. Adding a kernel: a row here. Its version for the CPU (one for each mesh), the compile tests for every
// GPU architecture and the checks of struct sizes follow from the row.
//   #define WEFT_ROW(needs, file, function, Args, Shape, threads, typical) ...
//   WEFT_KERNELS(WEFT_ROW)
// needs: kAny: runs with all peers. kMapped: all peers are mapped. kPorts: there are port peers.
// Shape: the host's struct of run-time fields. threads: per block on GPUs. typical: sets of compile-time constants that the
// tests compile it with.
// CMake reads the first five columns: it writes a file to compile for each row (host_kernel.cc.in), so that a change of
// one kernel compiles one kernel.
#pragma once

// clang-format off: one row a line, so that additions don't touch others
namespace weft::typical {

// DeepSeek-V3's in bf16 and in fp8 with scales; the smallest; one in float32 that takes several pieces.
inline constexpr const char* kRows =
  "row_bytes=14336 piece_bytes=14336 scale_words=0 top_k=8 element=0; "
  "row_bytes=7168 piece_bytes=7168 scale_words=56 top_k=8 element=0; "
  "row_bytes=16 piece_bytes=16 scale_words=0 top_k=1 element=0; "
  "row_bytes=32768 piece_bytes=16384 scale_words=0 top_k=32 element=1";

// Those that come back: in pieces as combine moves them.
inline constexpr const char* kSummedRows =
  "row_bytes=14336 piece_bytes=7168 scale_words=0 top_k=8 element=0; "
  "row_bytes=16 piece_bytes=16 scale_words=0 top_k=1 element=0; "
  "row_bytes=32768 piece_bytes=8192 scale_words=0 top_k=32 element=1";

// DeepSeek-V3 on 8 ranks in every format; the smallest row; 17 ranks, top-32, uneven experts.
inline constexpr const char* kLowLatencyRows =
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=7168 scale_bytes=224 payload=1 weights=0 padding=0; "
  "ranks=8 experts_per_rank=36 top_k=8 row_bytes=7168 scale_bytes=56 payload=3 weights=0 padding=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 scale_bytes=0 payload=0 weights=0 padding=0; "
  "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 scale_bytes=4 payload=0 weights=1 padding=0; "
  "ranks=17 experts_per_rank=4 top_k=32 row_bytes=4096 scale_bytes=128 payload=2 weights=1 padding=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=7168 scale_bytes=224 payload=4 weights=0 padding=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=3584 scale_bytes=448 payload=5 weights=0 padding=0; "
  "ranks=3 experts_per_rank=2 top_k=1 row_bytes=32 scale_bytes=4 payload=6 weights=1 padding=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=7168 scale_bytes=224 payload=0 weights=1 padding=16";

inline constexpr const char* kLowLatencyReplies =
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=0 weights=0 element=0 out_element=0 accumulate=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=1 weights=0 element=0 out_element=0 accumulate=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=2 weights=0 element=0 out_element=0 accumulate=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=3 weights=0 element=0 out_element=0 accumulate=0; "
  "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 reply=0 weights=1 element=0 out_element=0 accumulate=0; "
  "ranks=2 experts_per_rank=128 top_k=8 row_bytes=14336 reply=0 weights=0 element=0 out_element=0 accumulate=0; "
  "ranks=17 experts_per_rank=4 top_k=32 row_bytes=4096 reply=0 weights=1 element=0 out_element=0 accumulate=0; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=28672 reply=0 weights=1 element=1 out_element=0 accumulate=1; "
  "ranks=8 experts_per_rank=32 top_k=8 row_bytes=14336 reply=1 weights=1 element=2 out_element=2 accumulate=0";

// Of the split all-to-all on few SMs: DeepSeek-V3, the smallest row, top-32.
inline constexpr const char* kBulkRows =
  "ranks=4 experts_per_rank=64 top_k=8 row_bytes=7168 scale_bytes=224 payload=0 weights=1 padding=16; "
  "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 scale_bytes=4 payload=0 weights=1 padding=0; "
  "ranks=17 experts_per_rank=4 top_k=32 row_bytes=14336 scale_bytes=0 payload=0 weights=1 padding=0";

inline constexpr const char* kBulkReplies =
  "ranks=4 experts_per_rank=64 top_k=8 row_bytes=14336 reply=0 weights=1 element=0 out_element=0 accumulate=0; "
  "ranks=3 experts_per_rank=2 top_k=1 row_bytes=16 reply=0 weights=1 element=2 out_element=0 accumulate=0; "
  "ranks=17 experts_per_rank=4 top_k=32 row_bytes=28672 reply=0 weights=1 element=1 out_element=0 accumulate=1";

// float32 sum, bfloat16 maximum and average, and FP8 product, over every protocol.
inline constexpr const char* kPrograms =
  "element=0 reduction=0 protocol=0; "
  "element=0 reduction=0 protocol=1; "
  "element=2 reduction=3 protocol=1; "
  "element=3 reduction=1 protocol=0; "
  "element=2 reduction=4 protocol=2";

// Every exchange of float32 sums on 8 ranks; bfloat16 sums, FP8 products and averages, too.
inline constexpr const char* kExchanges =
  "exchange=0 element=0 reduction=0 ranks=8; "
  "exchange=1 element=0 reduction=0 ranks=8; "
  "exchange=2 element=0 reduction=0 ranks=8; "
  "exchange=3 element=0 reduction=0 ranks=8; "
  "exchange=0 element=2 reduction=0 ranks=4; "
  "exchange=0 element=3 reduction=1 ranks=17; "
  "exchange=0 element=2 reduction=4 ranks=8; "
  "exchange=2 element=3 reduction=4 ranks=8; "
  "exchange=4 element=0 reduction=0 ranks=8; "
  "exchange=5 element=0 reduction=0 ranks=8; "
  "exchange=6 element=0 reduction=0 ranks=8; "
  "exchange=7 element=0 reduction=0 ranks=8";

}  // namespace weft::typical

#define WEFT_KERNELS(WEFT_ROW) \
  WEFT_ROW(kAny, "kernels/moe/high_throughput_layout.cuh", dispatch_layout, LayoutArgs, HighThroughputShape, 256, "") \
  WEFT_ROW(kMapped, "kernels/moe/high_throughput_layout.cuh", dispatch_notify, NotifyArgs, HighThroughputShape, 1024, "") \
  WEFT_ROW(kMapped, "kernels/moe/high_throughput_dispatch.cuh", dispatch_rows, DispatchArgs, HighThroughputShape, 256, typical::kRows) \
  WEFT_ROW(kMapped, "kernels/moe/high_throughput_combine.cuh", combine_rows, CombineArgs, HighThroughputShape, 512, typical::kSummedRows) \
  WEFT_ROW(kPorts, "kernels/moe/two_level_notify.cuh", two_level_notify, TwoLevelNotifyArgs, HighThroughputShape, 512, "") \
  WEFT_ROW(kPorts, "kernels/moe/two_level_dispatch.cuh", two_level_dispatch, TwoLevelDispatchArgs, HighThroughputShape, 512, typical::kRows) \
  WEFT_ROW(kPorts, "kernels/moe/two_level_combine.cuh", two_level_combine, TwoLevelCombineArgs, HighThroughputShape, 512, typical::kRows) \
  WEFT_ROW(kAny, "kernels/moe/low_latency_dispatch.cuh", low_latency_dispatch, LowLatencyDispatchArgs, LowLatencyDispatchShape, 512, typical::kLowLatencyRows) \
  WEFT_ROW(kAny, "kernels/moe/low_latency_combine.cuh", low_latency_combine, LowLatencyCombineArgs, LowLatencyCombineShape, 512, typical::kLowLatencyReplies) \
  WEFT_ROW(kMapped, "kernels/moe/low_latency_dispatch_bulk.cuh", low_latency_dispatch_bulk, LowLatencyDispatchArgs, LowLatencyDispatchShape, 512, typical::kBulkRows) \
  WEFT_ROW(kMapped, "kernels/moe/low_latency_combine_bulk.cuh", low_latency_combine_bulk, LowLatencyCombineArgs, LowLatencyCombineShape, 512, typical::kBulkReplies) \
  WEFT_ROW(kAny, "kernels/collective/program.cuh", run_program, ProgramArgs, ProgramShape, 512, typical::kPrograms) \
  WEFT_ROW(kMapped, "kernels/collective/exchange.cuh", run_exchange, ExchangeArgs, ExchangeShape, 256, typical::kExchanges) \
  WEFT_ROW(kAny, "kernels/collective/program.cuh", scale_buffer, ScaleArgs, ProgramShape, 512, "element=0 reduction=0 protocol=0; element=2 reduction=0 protocol=0") \
  WEFT_ROW(kAny, "kernels/moe/ring.cuh", ring_send, RingArgs, RingShape, 96, "vec_aligned=1; vec_aligned=0") \
  WEFT_ROW(kAny, "kernels/moe/ring.cuh", ring_receive, RingArgs, RingShape, 96, "vec_aligned=1; vec_aligned=0") \
  WEFT_ROW(kAny, "kernels/moe/engram.cuh", engram_fetch, EngramArgs, EngramShape, 512, "") \
  WEFT_ROW(kAny, "kernels/core/channel_loop.cuh", channel_loop_run, ChannelLoopArgs, ChannelLoopShape, 32, "") \
  WEFT_ROW(kMapped, "kernels/core/copy_pages.cuh", copy_pages, CopyPagesArgs, CopyPagesShape, 512, "") \
  WEFT_ROW(kMapped, "kernels/core/exchange_floor.cuh", exchange_floor_run, ExchangeFloorArgs, ExchangeFloorShape, 512, "way=0; way=1; way=2") \
  WEFT_ROW(kPorts, "kernels/core/fifo_load.cuh", fifo_load_run, FifoLoadArgs, FifoLoadShape, 128, "")

// clang-format on
