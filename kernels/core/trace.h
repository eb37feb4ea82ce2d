// SPDX-License-Identifier: Apache-2.0
//
// A TraceLog is where kernels note when they did what. Host and device share this header; Python reads the
// same layout (measure/python/weft/bench/moe/trace.py).
#pragma once

#include "kernels/core/fault.h"

namespace weft {

// The work of a span. Waits have their Site instead.
enum class Work : uint32_t {
  kNotify,           // dispatch: count, exchange counts, number rows
  kPushRows,         // dispatch: a warp's rows to all peers
  kPushMeta,         // dispatch: a warp's ids, weights, scales and origins
  kDispatch,         // dispatch: a block, start to end
  kPushBack,         // combine: a warp's rows to their owners
  kSum,              // combine: the rows of one token
  kCombine,          // combine: a block, start to end
  kSendBatch,        // low-latency dispatch: one batch's tokens to all peers
  kUnpack,           // low-latency dispatch: messages of `peer` that have come, to their places
  kLowLatencyBegin,  // low latency: from launch until the call's number is known
  kAnswer,           // low-latency combine: replies to a batch of `peer`
  kLowLatencySum,    // low-latency combine: a part of one token's sum
  kLowLatencyCall,   // low latency: a block, start to end
  kTellCounts,       // low-latency dispatch: a block that tells peers what all tokens choose
  kStoreLines,       // low-latency dispatch: a token's messages, from shared memory to all peers
  kSegments,         // low-latency dispatch: until a block knows where rows of each source begin
};
inline constexpr uint32_t kFirstWork = 256;  // below: the number of a Site
inline constexpr uint32_t kNoPeer = 0xffff;

struct TraceSpan {
  uint64_t begin_ns;  // of this device's clock
  uint64_t end_ns;
  uint16_t what;  // a Site, or kFirstWork + a Work
  uint16_t peer;  // or kNoPeer
  uint16_t block;
  uint16_t warp;
};
static_assert(sizeof(TraceSpan) == 24);

// `capacity` spans follow it.
struct TraceLog {
  uint32_t count;  // may pass capacity: so many were dropped
  uint32_t capacity;
  uint64_t reserved;

  WEFT_DEVICE TraceSpan* spans() { return reinterpret_cast<TraceSpan*>(this + 1); }
};
static_assert(sizeof(TraceLog) == 16);

}  // namespace weft
