// SPDX-License-Identifier: Apache-2.0
//
// Planned low-latency calls: what weft._core.LowLatencyDispatchCalls and LowLatencyDispatchPlan
// (low_latency_plans.cc) have in common. The GIL is not held while they run.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "bind/bind.h"
#include "bind/tensors.h"
#include "moe/low_latency.h"

namespace weft {

void bind_low_latency_plans(nanobind::module_& module);

// A call whose rows were sent, until its hook runs.
template <class Planned, class Memory>
struct SentCall {
  std::shared_ptr<const Planned> plan;
  Memory memory;
  uint32_t call_slot;
  uint64_t number;  // among the calls of the buffer; 0 for one that a graph captured
  void* stream;
  bool is_late = false;  // sent with its receive
};

using SentDispatch = SentCall<PlannedDispatch, LowLatencyDispatchMemory>;
using SentCombine = SentCall<PlannedCombine, LowLatencyCombineMemory>;

template <class Planned, class Memory>
class PlannedCalls {
 public:
  using Sent = SentCall<Planned, Memory>;

  PlannedCalls(LowLatency& mode, Planned plan)
      : mode_(&mode), plan_(std::make_shared<const Planned>(std::move(plan))) {}

  LowLatency& mode() const { return *mode_; }

  // Both phases, after what `after` has got, on `stream` or, where they join `after`, there.
  void run(const Memory& memory, void* stream, void* after, bool joins) const {
    check(mode_->check_owner());
    nanobind::gil_scoped_release released;
    check(check_ids(memory));
    check(mode_->send_up_to());
    const LowLatencyRun run = value_or_throw(mode_->begin_run(stream, after, joins));
    check(mode_->launch(*plan_, memory, mode_->next_call_slot(), kPhaseSend | kPhaseReceive, run.stream));
    check(mode_->end_run(run));
  }

  Sent send(const Memory& memory, void* stream) const {
    check(mode_->check_owner());
    nanobind::gil_scoped_release released;
    check(check_ids(memory));
    check(mode_->send_up_to());
    const uint32_t call_slot = mode_->next_call_slot();
    const bool is_captured = value_or_throw(send_now(*mode_, *plan_, memory, call_slot, stream));
    return {plan_, memory, call_slot, mode_->count_call(is_captured), stream};
  }
  // The same, outside of graphs, but the send is launched together with the receive. Until one such call has run, every
  // call of the plan should use this.
  Sent send_later(const Memory& memory, void* stream) const {
    check(check_ids(memory));
    const uint32_t call_slot = mode_->next_call_slot();
    const uint64_t number = mode_->count_call(false);
    mode_->send_later(number, [mode = mode_, plan = plan_, memory, call_slot, stream]() -> Status {
      return send_now(*mode, *plan, memory, call_slot, stream).status();
    });
    return {plan_, memory, call_slot, number, stream, true};
  }
  bool was_late() const { return was_late_; }  // a late send of the plan was received

  void receive(const Sent& sent) const {
    nanobind::gil_scoped_release released;
    check(mode_->send_up_to(sent.number));
    receive(*sent.plan, sent.memory, sent.call_slot, sent.stream);
    was_late_ = was_late_ || sent.is_late;
  }
  // A call that another plan sent, perhaps: outputs may differ.
  void receive_into(const Memory& memory, uint32_t call_slot, void* stream) const {
    nanobind::gil_scoped_release released;
    receive(*plan_, memory, call_slot, stream);
  }

 private:
  // Returns whether a graph captures it.
  static Result<bool> send_now(LowLatency& mode, const Planned& plan, const Memory& memory,
                               uint32_t call_slot, void* stream) {
    WEFT_TRY_ASSIGN(const bool is_captured, mode.begin_phase(stream));
    WEFT_TRY(mode.launch(plan, memory, call_slot, kPhaseSend, stream));
    WEFT_TRY(mode.end_phase(stream, is_captured));
    return is_captured;
  }
  void receive(const Planned& plan, const Memory& memory, uint32_t call_slot, void* stream) const {
    check(mode_->check_owner());
    const bool is_captured = value_or_throw(mode_->begin_phase(stream));
    check(mode_->launch(plan, memory, call_slot, kPhaseReceive, stream));
    check(mode_->end_phase(stream, is_captured));
  }
  Status check_ids(const Memory& memory) const {
    const auto& facts = plan_->facts;
    const EmptyIds empty =
        std::is_same_v<Planned, PlannedCombine> ? EmptyIds::kBelowZero : EmptyIds::kMinusOne;
    return mode_->check_ids(memory.topk_idx, facts.id_bytes, uint64_t{facts.tokens} * facts.top_k,
                            facts.experts, empty);
  }

  LowLatency* mode_;
  std::shared_ptr<const Planned> plan_;
  mutable bool was_late_ = false;
};

using DispatchCalls = PlannedCalls<PlannedDispatch, LowLatencyDispatchMemory>;
using CombineCalls = PlannedCalls<PlannedCombine, LowLatencyCombineMemory>;

inline LowLatencyDispatchMemory dispatch_memory(TensorAddress x, TensorAddress x_scales,
                                                TensorAddress topk_idx, TensorAddress topk_weights,
                                                TensorAddress expert_stats, TensorAddress wait_cycles,
                                                TensorAddress out, TensorAddress out_scales,
                                                TensorAddress src_info, TensorAddress layout_range,
                                                TensorAddress counts, TensorAddress routes,
                                                TensorAddress out_weights, TensorAddress out_source) {
  return {pointer<std::byte>(x),          pointer<std::byte>(x_scales),   pointer<void>(topk_idx),
          pointer<float>(topk_weights),   pointer<int32_t>(expert_stats), pointer<uint64_t>(wait_cycles),
          pointer<std::byte>(out),        pointer<uint32_t>(out_scales),  pointer<int32_t>(src_info),
          pointer<int64_t>(layout_range), pointer<int32_t>(counts),       pointer<int32_t>(routes),
          pointer<float>(out_weights),    pointer<int32_t>(out_source)};
}

inline LowLatencyCombineMemory combine_memory(TensorAddress x, TensorAddress topk_idx,
                                              TensorAddress topk_weights, TensorAddress routes,
                                              TensorAddress combined, TensorAddress wait_cycles,
                                              TensorAddress signals, TensorAddress sent_idx) {
  return {pointer<std::byte>(x),      pointer<void>(topk_idx),      pointer<float>(topk_weights),
          pointer<int32_t>(routes),   pointer<std::byte>(combined), pointer<uint64_t>(wait_cycles),
          pointer<uint32_t>(signals), pointer<void>(sent_idx)};
}

}  // namespace weft
