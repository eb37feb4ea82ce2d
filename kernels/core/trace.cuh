// SPDX-License-Identifier: Apache-2.0
//
// trace.cuh: where a kernel's time goes. A Span notes when its scope began and ended, in a log of this rank;
// one that is full drops what comes after. On GPUs kernels hold this code only when they are compiled with
// tracing (WEFT_TRACE_SPANS above 0), or to note whole blocks alone, which costs a launch next to nothing; on the host a
// null log turns it off.
//   const Span span(a.wait.trace, Work::kPush, warp.rank() == 0, owner);   // until the end of this scope
//   const BlockSpan span(a.wait.trace, Work::kCombine);                    // until all of the block have reached it
#pragma once

#include "kernels/core/trace.h"

namespace weft {

#ifdef WEFT_TRACE
inline constexpr bool kMayTrace = true;
#else
inline constexpr bool kMayTrace = Warp::kMaxSize == 1;  // the host
#endif
#ifdef WEFT_TRACE_BLOCKS
inline constexpr bool kMayTraceBlocks = true;
#else
inline constexpr bool kMayTraceBlocks = kMayTrace;
#endif

WEFT_DEVICE TraceSpan begin_span(uint32_t what, uint32_t peer) {
  return {now_ns(),
          0,
          static_cast<uint16_t>(what),
          static_cast<uint16_t>(peer),
          static_cast<uint16_t>(Block{}.index()),
          static_cast<uint16_t>(Warp{}.index())};
}
WEFT_DEVICE void end_span(TraceLog* log, TraceSpan& span) {
  span.end_ns = now_ns();  // before the count is asked for, which takes longer than some spans
  const uint32_t at = add_local(&log->count, uint32_t{1});
  if (at < log->capacity) log->spans()[at] = span;
}

class Span {
 public:
  // Of the threads that make one, those with `notes` set write; mostly one per warp.
  WEFT_DEVICE Span(TraceLog* log, Work work, bool notes, uint32_t peer = kNoPeer)
      : Span(log, kFirstWork + static_cast<uint32_t>(work), notes, peer) {}
  // A wait for `peer`, in the thread that waits.
  WEFT_DEVICE Span(TraceLog* log, Site site, uint32_t peer)
      : Span(log, static_cast<uint32_t>(site), true, peer) {}

  WEFT_DEVICE ~Span() {
    if constexpr (kMayTrace)
      if (log_) end_span(log_, span_);
  }
  Span(const Span&) = delete;
  // Sets the peer, where it is known only at the end.
  WEFT_DEVICE void set_peer(uint32_t peer) {
    if constexpr (kMayTrace) span_.peer = static_cast<uint16_t>(peer);
  }

 private:
  WEFT_DEVICE Span(TraceLog* log, uint32_t what, bool notes, uint32_t peer) {
    if constexpr (!kMayTrace) return;
    log_ = notes ? log : nullptr;
    if (log_) span_ = begin_span(what, peer);
  }

  TraceLog* log_ = nullptr;
  TraceSpan span_{};
};

// A kernel, as a block sees it: one that all its threads make at its start. Nobody may return before.
class BlockSpan {
 public:
  WEFT_DEVICE BlockSpan(TraceLog* log, Work work) {
    if constexpr (!kMayTraceBlocks) return;
    log_ = log;
    if (log_) span_ = begin_span(kFirstWork + static_cast<uint32_t>(work), kNoPeer);
  }
  WEFT_DEVICE ~BlockSpan() {
    if constexpr (kMayTraceBlocks) {
      if (!log_) return;
      Block{}.sync();
      if (Block{}.rank() == 0) end_span(log_, span_);
    }
  }
  BlockSpan(const BlockSpan&) = delete;

 private:
  TraceLog* log_ = nullptr;
  TraceSpan span_{};
};

}  // namespace weft
