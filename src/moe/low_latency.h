// SPDX-License-Identifier: Apache-2.0
//
// LowLatency is the host side of low-latency dispatch and combine: validate, plan, launch.
//   LowLatency mode(window, begin, end, limits, {fault, timeout_s, false}, line_tokens);
//   LowLatencyDispatchCall call{...};
//   call.ticket = mode.next_ticket();
//   WEFT_TRY(mode.dispatch(call, kPhaseSend));      // x may be reused when the stream has passed
//   WEFT_TRY(mode.dispatch(call, kPhaseReceive));   // outputs are there when the stream has passed
// [begin, end) is the same range of every rank's window, zero at first, and used by nobody else. Calls are
// collective and in the same order on all ranks, on one stream or on streams that the caller orders; two
// calls may be outstanding between their phases. Pointers are memory of this rank's device; what Python has
// checked is not checked again. On CUDA calls enqueue on `stream`, never wait, and can be captured in a
// graph; on the host they return when done. Threads: one caller at a time. Lifetime: must not outlive the
// window. Errors: kCapacity where the region is too small for the sizes, kInvalid for sizes out of range; on
// the host also what fault() says. Nothing is launched then.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "comm/window.h"
#include "kernels/moe/low_latency_args.h"
#include "moe/fault_text.h"
#include "plan/low_latency.h"

namespace weft {

struct LowLatencyWaits {
  FaultBox* fault;  // memory that host and device see
  double timeout_s;
  bool may_mask;  // a silent peer is masked and left out from then on, instead of a fault; the host logs it
  TraceLog* trace = nullptr;
};

// R ranks, T tokens, M = max_tokens, K = top_k, H channels, Le experts per rank (rounded up).
struct LowLatencyDispatchCall {
  uint32_t max_tokens = 0;
  uint32_t tokens = 0;
  uint32_t top_k = 0;
  uint32_t experts = 0;
  uint32_t id_bytes = 8;
  int64_t payload = kPayloadCopy;
  uint32_t row_bytes = 0;          // of a row on the wire and in `out`: a multiple of 16; with FP8, of 128
  uint32_t scale_bytes = 0;        // of its scales on the wire: a multiple of 4
  const void* topk_idx = nullptr;  // [T][K], -1 = none
  const float* topk_weights = nullptr;  // [T][K]; null: none travel. On all ranks or on none
  const void* x = nullptr;              // [T] rows: row_bytes with kPayloadCopy, else bf16[H]
  const void* x_scales = nullptr;       // [T] rows of scale_bytes, with kPayloadCopy; f32 with NVFP4
  void* out = nullptr;                  // [Le][R * M] rows
  void* out_scales = nullptr;           // 4-byte words, with these strides in words
  uint64_t scale_expert_stride = 0;
  uint64_t scale_row_stride = 0;
  uint64_t scale_word_stride = 0;
  bool tiled_scales = false;        // instead of the last two strides: see tiled_row()
  int32_t* src_info = nullptr;      // [Le][R * M]
  int64_t* layout_range = nullptr;  // [Le][R]
  int32_t* counts = nullptr;        // [Le]
  float* out_weights = nullptr;     // [Le][R * M], or null
  int32_t* out_source = nullptr;    // [Le][R * M], or null
  int32_t* expert_stats = nullptr;  // [Le], added to, or null
  uint64_t* wait_cycles = nullptr;  // [R], added to, or null
  int32_t* routes = nullptr;        // routes_words() words, 16-byte aligned: for the combine
  uint32_t ticket = 0;
  void* stream = nullptr;
};

struct LowLatencyCombineCall {
  uint32_t max_tokens = 0;
  uint32_t tokens = 0;
  uint32_t top_k = 0;
  uint32_t experts = 0;
  uint32_t id_bytes = 8;
  int64_t reply = kReplyReduced;
  uint32_t row_bytes = 0;               // 2 * H, a multiple of 16; with LogFMT, of 256
  const void* topk_idx = nullptr;       // as given to the dispatch
  const float* topk_weights = nullptr;  // [T][K]; null: those of the dispatch, with a reduced reply
  bool dispatch_had_weights = false;
  const void* x = nullptr;  // bf16[Le][R * M][H] with x_row_bytes between rows
  uint64_t x_row_bytes = 0;
  const int32_t* routes = nullptr;
  void* combined = nullptr;         // bf16[T][H]
  uint64_t* wait_cycles = nullptr;  // [R], added to, or null
  // u32[Le][signals_per_expert], or null: when rows of x are there; see LowLatencyCombineArgs.
  const void* signals = nullptr;
  uint32_t signal_value = 0;
  uint32_t signals_per_expert = 0;
  uint32_t signal_rows = 0;
  uint32_t num_sms = 0;  // that the send phase may take; 0: all
  uint32_t ticket = 0;
  void* stream = nullptr;
};

// How many tokens of a rank may travel as lines (core/line.cuh), 0 where links do not keep these whole. All
// ranks call it together. Errors: kInvalid where the setting is out of range or ranks differ.
Result<uint32_t> agree_on_line_tokens(Communicator& comm);

class LowLatency {
 public:
  // `line_tokens`: of agree_on_line_tokens(), the same on all ranks.
  LowLatency(Window& window, uint64_t begin, uint64_t end, const ComputeLimits& limits,
             const LowLatencyWaits& waits, uint32_t line_tokens);

  // Whether a dispatch of these sizes fits the region; reads only sizes.
  Status check(const LowLatencyDispatchCall& call) const;
  // `phases`: kPhaseSend, then kPhaseReceive with the same call; or both at once.
  Status dispatch(const LowLatencyDispatchCall& call, uint32_t phases);
  Status combine(const LowLatencyCombineCall& call, uint32_t phases);
  // Ties the phases of one call. A call captured in a graph keeps its ticket in every replay.
  uint32_t next_ticket() { return ticket_++ % kTickets; }

  // Masks, in stream order. Errors: kInvalid for a rank that does not exist; kSystem from the driver.
  Status set_mask(uint32_t rank, bool masked, void* stream);
  Status clear_masks(void* stream);
  Status query_masks(int32_t* out, void* stream);  // i32[R], device memory

  // What a kernel gave up for since the last look: see take_fault().
  Status fault() { return take_fault(*waits_.fault, peers()); }

  LowLatencySizes sizes(uint32_t max_tokens, uint32_t top_k, uint32_t experts) const;
  uint64_t routes_words(uint32_t max_tokens, uint32_t top_k, uint32_t experts, bool has_weights) const {
    return low_latency_routes_words(sizes(max_tokens, top_k, experts), has_weights);
  }

 private:
  uint32_t ranks() const { return static_cast<uint32_t>(window_->communicator()->size()); }
  uint32_t rank() const { return static_cast<uint32_t>(window_->communicator()->rank()); }
  uint32_t* masks() const;
  uint64_t half_bytes() const { return low_latency_half_bytes(ranks(), end_ - begin_); }
  uint64_t lines_at() const { return lines_begin(ranks(), half_bytes()); }  // in a half
  LowLatencyDispatchShape shape_of(const LowLatencyDispatchCall& call) const;
  Status check(const LowLatencySizes& sizes, uint32_t tokens, const LowLatencyPlan& plan) const;
  LowLatencyCall common(const LowLatencySizes& sizes, const LowLatencyPlan& plan, uint32_t tokens,
                        uint32_t phases, uint32_t ticket) const;
  Status launch(KernelKey key, const LowLatencyPlan& plan, const void* args, size_t args_bytes,
                const void* shape, void* stream);
  PeerWatch& peers() { return window_->communicator()->peers(); }
  void warn_of_masked();
  Status write_words(uint32_t* at, uint32_t value, uint64_t words, void* stream);

  Window* window_;
  uint64_t begin_;
  uint64_t end_;
  ComputeLimits limits_;
  LowLatencyWaits waits_;
  uint32_t line_tokens_;
  uint32_t ticket_ = 0;
  std::vector<bool> known_masked_;  // on the host: by the caller, or told of
};

}  // namespace weft
