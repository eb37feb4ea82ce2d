// SPDX-License-Identifier: Apache-2.0
//
// The keys of the kernels that the calls of a model launch. Launches use them, and so does compilation ahead of time.
//   std::vector<KernelKey> keys = high_throughput_keys(format, ranks, limits_of("sm_90a"));
// Pure functions: no device, no environment. Keys lack their mesh: see launch_on_mesh() and prepare_on_mesh().
#pragma once

#include <string_view>
#include <vector>

#include "jit/jit.h"
#include "kernels/moe/high_throughput_args.h"
#include "kernels/moe/low_latency_args.h"
#include "moe/low_latency.h"
#include "plan/high_throughput.h"
#include "plan/low_latency.h"

namespace weft {

struct RowFormat {
  uint32_t row_bytes;          // multiple of 16
  uint32_t scale_words;        // 4-byte words of scales per row
  uint32_t top_k;              // 0 when no ids travel
  uint32_t id_bytes;           // 4 or 8
  uint32_t element;            // bytes of one element of x: ranks must agree
  uint32_t combine_row_bytes;  // of the rows that combine will send back

  bool operator==(const RowFormat&) const = default;
};

// Without threads, which the plan of a launch has. Of the layout and the notify, shapes are all zero.
KernelKey layout_key();
KernelKey notify_key();
KernelKey dispatch_key(const HighThroughputShape& shape);
KernelKey combine_key(const HighThroughputShape& shape);
KernelKey two_level_notify_key();
KernelKey two_level_dispatch_key(const HighThroughputShape& shape);
KernelKey two_level_combine_key(const HighThroughputShape& shape);
KernelKey low_latency_key(const LowLatencyDispatchShape& shape, bool in_bulk);
KernelKey low_latency_key(const LowLatencyCombineShape& shape, bool in_bulk);

HighThroughputShape dispatch_shape(const RowFormat& format);
HighThroughputShape combine_shape(uint32_t row_bytes, uint32_t top_k, int64_t element);

// Of a dispatch of such rows and its combine, with threads.
std::vector<KernelKey> high_throughput_keys(const RowFormat& format, uint32_t ranks,
                                            const ComputeLimits& limits);
std::vector<KernelKey> low_latency_keys(const LowLatencySizes& sizes, const LowLatencyDispatchFacts& facts,
                                        int64_t reply, const ComputeLimits& limits);

// Of a GPU of an architecture ("sm_90a"), as far as kernels depend on them, where there is none to ask.
ComputeLimits limits_of(std::string_view architecture);

}  // namespace weft
