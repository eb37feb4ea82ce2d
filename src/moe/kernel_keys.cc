// SPDX-License-Identifier: Apache-2.0
#include "moe/kernel_keys.h"

namespace weft {
namespace {

std::vector<std::pair<std::string, int64_t>> constants(const HighThroughputShape& shape) {
  return {{"row_bytes", shape.row_bytes},
          {"piece_bytes", shape.piece_bytes},
          {"scale_words", shape.scale_words},
          {"top_k", shape.top_k},
          {"element", shape.element}};
}

KernelKey high_throughput_key(const char* file, const char* name, const char* args_type,
                              const HighThroughputShape& shape) {
  KernelKey key{file, name, args_type};
  key.shape = constants(shape);
  return key;
}

KernelKey with_threads(KernelKey key, uint32_t threads_per_block) {
  key.threads_per_block = threads_per_block;
  return key;
}

}  // namespace

KernelKey layout_key() {
  return high_throughput_key("kernels/moe/high_throughput_layout.cuh", "dispatch_layout", "LayoutArgs", {});
}

KernelKey notify_key() {
  return high_throughput_key("kernels/moe/high_throughput_layout.cuh", "dispatch_notify", "NotifyArgs", {});
}

KernelKey dispatch_key(const HighThroughputShape& shape) {
  return high_throughput_key("kernels/moe/high_throughput_dispatch.cuh", "dispatch_rows", "DispatchArgs",
                             shape);
}

KernelKey combine_key(const HighThroughputShape& shape) {
  return high_throughput_key("kernels/moe/high_throughput_combine.cuh", "combine_rows", "CombineArgs", shape);
}

KernelKey two_level_notify_key() {
  return high_throughput_key("kernels/moe/two_level_notify.cuh", "two_level_notify", "TwoLevelNotifyArgs",
                             {});
}

KernelKey two_level_dispatch_key(const HighThroughputShape& shape) {
  return high_throughput_key("kernels/moe/two_level_dispatch.cuh", "two_level_dispatch",
                             "TwoLevelDispatchArgs", shape);
}

KernelKey two_level_combine_key(const HighThroughputShape& shape) {
  return high_throughput_key("kernels/moe/two_level_combine.cuh", "two_level_combine", "TwoLevelCombineArgs",
                             shape);
}

KernelKey low_latency_key(const LowLatencyDispatchShape& shape, bool in_bulk) {
  KernelKey key = in_bulk ? KernelKey{"kernels/moe/low_latency_dispatch_bulk.cuh",
                                      "low_latency_dispatch_bulk", "LowLatencyDispatchArgs"}
                          : KernelKey{"kernels/moe/low_latency_dispatch.cuh", "low_latency_dispatch",
                                      "LowLatencyDispatchArgs"};
  key.shape = {{"ranks", shape.ranks},
               {"experts_per_rank", shape.experts_per_rank},
               {"top_k", shape.top_k},
               {"row_bytes", shape.row_bytes},
               {"scale_bytes", shape.scale_bytes},
               {"payload", shape.payload},
               {"weights", shape.weights},
               {"padding", shape.padding}};
  return key;
}

KernelKey low_latency_key(const LowLatencyCombineShape& shape, bool in_bulk) {
  KernelKey key = in_bulk ? KernelKey{"kernels/moe/low_latency_combine_bulk.cuh", "low_latency_combine_bulk",
                                      "LowLatencyCombineArgs"}
                          : KernelKey{"kernels/moe/low_latency_combine.cuh", "low_latency_combine",
                                      "LowLatencyCombineArgs"};
  key.shape = {{"ranks", shape.ranks},          {"experts_per_rank", shape.experts_per_rank},
               {"top_k", shape.top_k},          {"row_bytes", shape.row_bytes},
               {"reply", shape.reply},          {"weights", shape.weights},
               {"element", shape.element},      {"out_element", shape.out_element},
               {"accumulate", shape.accumulate}};
  return key;
}

HighThroughputShape dispatch_shape(const RowFormat& format) {
  return {format.row_bytes, plan_piece_bytes(format.row_bytes), format.scale_words, format.top_k,
          kElementBf16};
}

HighThroughputShape combine_shape(uint32_t row_bytes, uint32_t top_k, int64_t element) {
  return {row_bytes, plan_combine_piece_bytes(row_bytes), 0, top_k, element};
}

std::vector<KernelKey> high_throughput_keys(const RowFormat& format, uint32_t ranks,
                                            const ComputeLimits& limits) {
  const HighThroughputShape there = dispatch_shape(format);
  const HighThroughputShape back =
      combine_shape(format.combine_row_bytes, format.top_k, format.element > 2 ? kElementFp32 : kElementBf16);
  auto threads = [](const GridPlan& grid) { return grid.threads_per_block; };
  const auto piece_bytes = [](const HighThroughputShape& shape) {
    return static_cast<uint32_t>(shape.piece_bytes);
  };
  return {with_threads(layout_key(), threads(plan_layout(1, ranks, 1, limits))),
          with_threads(notify_key(), threads(plan_notify(ranks, limits))),
          with_threads(dispatch_key(there), threads(plan_dispatch(ranks, piece_bytes(there), 1, limits))),
          with_threads(combine_key(back), threads(plan_combine(ranks, piece_bytes(back), 1, limits)))};
}

std::vector<KernelKey> low_latency_keys(const LowLatencySizes& sizes, const LowLatencyDispatchFacts& facts,
                                        int64_t reply, const ComputeLimits& limits) {
  const int64_t weights = facts.has_weights ? 1 : 0;
  const LowLatencyDispatchShape there{sizes.ranks,       sizes.experts_per_rank(),
                                      facts.top_k,       facts.row_bytes,
                                      facts.scale_bytes, facts.payload,
                                      weights,           facts.padding};
  const auto back_bytes = static_cast<int64_t>(facts.row_bytes * payload(facts.payload).shrinks_by);
  const LowLatencyCombineShape back{sizes.ranks,
                                    sizes.experts_per_rank(),
                                    facts.top_k,
                                    back_bytes,
                                    reply,
                                    weights,
                                    kElementBf16,
                                    kElementBf16,
                                    0};
  const LowLatencyPlan sends = plan_low_latency_dispatch(sizes, there, limits);
  const LowLatencyPlan replies = plan_low_latency_combine(sizes, back, facts.tokens, limits);
  return {with_threads(low_latency_key(there, sends.in_bulk), sends.threads_per_block),
          with_threads(low_latency_key(back, replies.in_bulk), replies.threads_per_block)};
}

// Sources: CUDA C++ Programming Guide, compute capabilities: shared memory per block, less 1 KiB that the
// system keeps. SMs play no part in what is compiled; these are of the largest of each.
ComputeLimits limits_of(std::string_view architecture) {
  const bool is_small = architecture.starts_with("sm_86") || architecture.starts_with("sm_89") ||
                        architecture.starts_with("sm_12");
  const bool is_ampere = architecture.starts_with("sm_80") || architecture.starts_with("sm_87");
  const uint32_t shared_bytes = (is_small ? 99 : is_ampere ? 163 : 227) * 1024;
  return {true, 148, 1, shared_bytes};
}

}  // namespace weft
