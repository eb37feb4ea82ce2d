// SPDX-License-Identifier: Apache-2.0
//
// weft._core.LowLatency: the low-latency calls of a MoeBuffer. A form is planned once; then a call is one
// trip into the core, with tensors by position.
#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "bind/bind.h"
#include "bind/fields.h"
#include "bind/tensors.h"
#include "moe/buffer.h"
#include "moe/low_latency.h"

namespace nb = nanobind;

namespace weft {
namespace {

// A call whose rows were sent, until its hook runs.
template <class Planned, class Memory>
struct SentCall {
  std::shared_ptr<const Planned> plan;
  Memory memory;
  uint32_t ticket;
  uint64_t number;  // among the calls of the buffer; 0 for one that a graph captured
  void* stream;
};

using SentDispatch = SentCall<PlannedDispatch, LowLatencyDispatchMemory>;
using SentCombine = SentCall<PlannedCombine, LowLatencyCombineMemory>;

// What Python sees of a form: calls of it, on the communicator's streams.
template <class Planned, class Memory>
class FormCalls {
 public:
  using Sent = SentCall<Planned, Memory>;

  FormCalls(LowLatency& mode, Planned plan)
      : mode_(&mode), plan_(std::make_shared<const Planned>(std::move(plan))) {}

  // Both phases, after what `after` has got, on `stream` or, where they join `after`, there.
  uint64_t run(const Memory& memory, void* stream, void* after, bool joins) {
    nb::gil_scoped_release released;
    check(check_ids(memory));
    const LowLatencyRun run = value_or_throw(mode_->begin_run(stream, after, joins));
    check(mode_->launch(*plan_, memory, mode_->next_ticket(), kPhaseSend | kPhaseReceive, run.stream));
    return value_or_throw(mode_->end_run(run));
  }

  Sent send(const Memory& memory, void* stream) {
    nb::gil_scoped_release released;
    check(check_ids(memory));
    const bool is_captured = value_or_throw(mode_->begin_phase(stream));
    const uint32_t ticket = mode_->next_ticket();
    check(mode_->launch(*plan_, memory, ticket, kPhaseSend, stream));
    check(mode_->end_phase(stream, is_captured));
    return {plan_, memory, ticket, mode_->count_call(is_captured), stream};
  }

  void receive(const Sent& sent) {
    nb::gil_scoped_release released;
    receive(*sent.plan, sent.memory, sent.ticket, sent.stream);
  }
  // A call that another form sent, perhaps: outputs may differ.
  void receive_into(const Memory& memory, uint32_t ticket, void* stream) {
    nb::gil_scoped_release released;
    receive(*plan_, memory, ticket, stream);
  }

 private:
  void receive(const Planned& plan, const Memory& memory, uint32_t ticket, void* stream) {
    const bool is_captured = value_or_throw(mode_->begin_phase(stream));
    check(mode_->launch(plan, memory, ticket, kPhaseReceive, stream));
    check(mode_->end_phase(stream, is_captured));
  }
  Status check_ids(const Memory& memory) const {
    const auto& form = plan_->form;
    return mode_->check_ids(memory.topk_idx, form.id_bytes, uint64_t{form.tokens} * form.top_k, form.experts);
  }

  LowLatency* mode_;
  std::shared_ptr<const Planned> plan_;
};

using DispatchCalls = FormCalls<PlannedDispatch, LowLatencyDispatchMemory>;
using CombineCalls = FormCalls<PlannedCombine, LowLatencyCombineMemory>;

LowLatencyDispatchMemory dispatch_memory(TensorAddress x, TensorAddress x_scales, TensorAddress topk_idx,
                                         TensorAddress topk_weights, TensorAddress expert_stats,
                                         TensorAddress wait_cycles, TensorAddress out,
                                         TensorAddress out_scales, TensorAddress src_info,
                                         TensorAddress layout_range, TensorAddress counts,
                                         TensorAddress routes, TensorAddress out_weights,
                                         TensorAddress out_source) {
  return {pointer<std::byte>(x),          pointer<std::byte>(x_scales),   pointer<void>(topk_idx),
          pointer<float>(topk_weights),   pointer<int32_t>(expert_stats), pointer<uint64_t>(wait_cycles),
          pointer<std::byte>(out),        pointer<uint32_t>(out_scales),  pointer<int32_t>(src_info),
          pointer<int64_t>(layout_range), pointer<int32_t>(counts),       pointer<int32_t>(routes),
          pointer<float>(out_weights),    pointer<int32_t>(out_source)};
}

LowLatencyCombineMemory combine_memory(TensorAddress x, TensorAddress topk_idx, TensorAddress topk_weights,
                                       TensorAddress routes, TensorAddress combined,
                                       TensorAddress wait_cycles, TensorAddress signals) {
  return {pointer<std::byte>(x),     pointer<void>(topk_idx),      pointer<float>(topk_weights),
          pointer<int32_t>(routes),  pointer<std::byte>(combined), pointer<uint64_t>(wait_cycles),
          pointer<uint32_t>(signals)};
}

// run() and send() with the tensors of a call by position, None for one that is left out, then the streams.
template <class Calls, class Memory, class... Tensor>
void def_calls(nb::class_<Calls>& into, Memory (*memory)(Tensor...)) {
  into.def("run",
           [memory](Calls& self, Tensor... at, uint64_t stream, uint64_t after, bool joins) {
             return self.run(memory(at...), pointer<void>(stream), pointer<void>(after), joins);
           })
      .def("send", [memory](Calls& self, Tensor... at,
                            uint64_t stream) { return self.send(memory(at...), pointer<void>(stream)); })
      .def("receive_into",
           [memory](Calls& self, Tensor... at, uint32_t ticket, uint64_t stream) {
             self.receive_into(memory(at...), ticket, pointer<void>(stream));
           })
      .def(
          "receive", [](Calls& self, const typename Calls::Sent& sent) { self.receive(sent); },
          nb::arg("sent"));
}

// What Python names of a form.
Fields<LowLatencyDispatchForm> dispatch_fields() {
  using Form = LowLatencyDispatchForm;
  return Fields<Form>()
      .required("max_tokens", &Form::max_tokens)
      .required("tokens", &Form::tokens)
      .required("top_k", &Form::top_k)
      .required("experts", &Form::experts)
      .required("id_bytes", &Form::id_bytes)
      .required("payload", &Form::payload)
      .required("row_bytes", &Form::row_bytes)
      .required("scale_bytes", &Form::scale_bytes)
      .required("has_weights", &Form::has_weights)
      .required("scale_expert_stride", &Form::scale_expert_stride)
      .required("scale_row_stride", &Form::scale_row_stride)
      .required("scale_word_stride", &Form::scale_word_stride)
      .required("tiled_scales", &Form::tiled_scales)
      .optional("expert_rows", &Form::expert_rows)
      .optional("padding", &Form::padding)
      .optional("max_rows", &Form::max_rows)
      .optional("grid_sms", &Form::grid_sms);
}

Fields<LowLatencyCombineForm> combine_fields() {
  using Form = LowLatencyCombineForm;
  return Fields<Form>()
      .required("max_tokens", &Form::max_tokens)
      .required("tokens", &Form::tokens)
      .required("top_k", &Form::top_k)
      .required("experts", &Form::experts)
      .required("id_bytes", &Form::id_bytes)
      .required("reply", &Form::reply)
      .required("row_bytes", &Form::row_bytes)
      .required("has_weights", &Form::has_weights)
      .required("dispatch_had_weights", &Form::dispatch_had_weights)
      .optional("signal_value", &Form::signal_value)
      .optional("signals_per_expert", &Form::signals_per_expert)
      .optional("signal_rows", &Form::signal_rows)
      .optional("num_sms", &Form::num_sms)
      .optional("element", &Form::element)
      .optional("out_element", &Form::out_element)
      .optional("accumulate", &Form::accumulate)
      .optional("grid_sms", &Form::grid_sms);
}

void bind_calls(nb::module_& module) {
  nb::class_<SentDispatch>(module, "SentDispatch")
      .def_ro("number", &SentDispatch::number)
      .def_ro("ticket", &SentDispatch::ticket);
  nb::class_<SentCombine>(module, "SentCombine")
      .def_ro("number", &SentCombine::number)
      .def_ro("ticket", &SentCombine::ticket);
  nb::class_<DispatchCalls> dispatch(module, "LowLatencyDispatchCalls");
  def_calls(dispatch, &dispatch_memory);
  nb::class_<CombineCalls> combine(module, "LowLatencyCombineCalls");
  def_calls(combine, &combine_memory);
}

}  // namespace

void bind_low_latency(nb::module_& module) {
  bind_calls(module);
  module.attr("PHASE_SEND") = kPhaseSend;
  module.attr("PHASE_RECEIVE") = kPhaseReceive;
  module.attr("PAYLOAD_COPY") = kPayloadCopy;
  module.attr("PAYLOAD_FP8") = kPayloadFp8;
  module.attr("PAYLOAD_FP8_ROUNDED") = kPayloadFp8Rounded;
  module.attr("PAYLOAD_FP8_EXPONENT") = kPayloadFp8Exponent;
  module.attr("PAYLOAD_MXFP8") = kPayloadMxfp8;
  module.attr("PAYLOAD_NVFP4") = kPayloadNvfp4;
  module.attr("PAYLOAD_NVFP4_EXPONENT") = kPayloadNvfp4Exponent;
  module.attr("ELEMENT_BF16") = kElementBf16;
  module.attr("ELEMENT_FP32") = kElementFp32;
  module.attr("ELEMENT_FP16") = kElementFp16;
  module.attr("REPLY_REDUCED") = kReplyReduced;
  module.attr("REPLY_EXACT") = kReplyExact;
  module.attr("REPLY_EXACT_LOG") = kReplyExactLog;
  module.def(
      "low_latency_hint_bytes",
      [](uint32_t ranks, uint32_t max_tokens, uint32_t top_k, uint32_t experts, uint64_t hidden) {
        return low_latency_hint_bytes({ranks, max_tokens, top_k, experts}, hidden);
      },
      nb::arg("ranks"), nb::arg("max_tokens"), nb::arg("top_k"), nb::arg("experts"), nb::arg("hidden"));

  module.def("check_expert_ids", [](uint64_t ids, uint32_t id_bytes, uint64_t count, uint32_t experts) {
    check(check_expert_ids(pointer<void>(ids), id_bytes, count, experts));
  });

  module.def("low_latency_region_bytes", &low_latency_region_bytes, nb::arg("ranks"), nb::arg("word_bytes"),
             nb::arg("has_ports") = false);

  nb::class_<LowLatency>(module, "LowLatency")
      .def(
          "__init__",
          [](LowLatency* self, MoeBuffer& buffer, bool may_mask) {
            new (self) LowLatency(buffer.window(), buffer.low_latency_begin(), buffer.low_latency_end(),
                                  buffer.limits(),
                                  {buffer.fault_box(), buffer.timeout_s(), may_mask, buffer.silent(),
                                   buffer.trace(), buffer.gave_up()},
                                  buffer.low_latency_terms());
            if (may_mask) buffer.outlive_peers();
          },
          nb::arg("buffer"), nb::arg("may_mask"), nb::keep_alive<1, 2>())
      .def(
          "sends_once_per_node",
          [](const LowLatency& self, uint32_t max_tokens, uint32_t top_k, uint32_t experts,
             uint32_t row_bytes, uint32_t scale_bytes) {
            LowLatencyDispatchForm form;
            form.max_tokens = max_tokens;
            form.top_k = top_k;
            form.experts = experts;
            form.row_bytes = row_bytes;
            form.scale_bytes = scale_bytes;
            return self.sends_once_per_node(form);
          },
          nb::arg("max_tokens"), nb::arg("top_k"), nb::arg("experts"), nb::arg("row_bytes"),
          nb::arg("scale_bytes"))
      // The first of a form compiles its kernel.
      .def(
          "replies_once_per_node",
          [](const LowLatency& self, uint32_t max_tokens, uint32_t top_k, uint32_t experts,
             uint32_t row_bytes) {
            LowLatencyCombineForm form;
            form.max_tokens = max_tokens;
            form.top_k = top_k;
            form.experts = experts;
            form.row_bytes = row_bytes;
            return self.replies_once_per_node(form);
          },
          nb::arg("max_tokens"), nb::arg("top_k"), nb::arg("experts"), nb::arg("row_bytes"))
      .def(
          "plan_dispatch",
          [fields = dispatch_fields()](LowLatency& self, const nb::kwargs& form) {
            const LowLatencyDispatchForm filled = fields.filled(form);
            return DispatchCalls(self, value_or_throw(without_gil([&] { return self.plan(filled); })));
          },
          nb::arg("form"), nb::keep_alive<0, 1>())
      .def(
          "plan_combine",
          [fields = combine_fields()](LowLatency& self, const nb::kwargs& form) {
            const LowLatencyCombineForm filled = fields.filled(form);
            return CombineCalls(self, value_or_throw(without_gil([&] { return self.plan(filled); })));
          },
          nb::arg("form"), nb::keep_alive<0, 1>())
      .def("routes_words", &LowLatency::routes_words, nb::arg("max_tokens"), nb::arg("top_k"),
           nb::arg("experts"), nb::arg("has_weights"))
      .def(
          "set_mask",
          [](LowLatency& self, uint32_t rank, bool masked, uint64_t stream) {
            check(self.set_mask(rank, masked, pointer<void>(stream)));
          },
          nb::arg("rank"), nb::arg("masked"), nb::arg("stream"))
      .def(
          "clear_masks",
          [](LowLatency& self, uint64_t stream) { check(self.clear_masks(pointer<void>(stream))); },
          nb::arg("stream"))
      .def(
          "query_masks",
          [](LowLatency& self, uint64_t out, uint64_t stream) {
            check(self.query_masks(pointer<int32_t>(out), pointer<void>(stream)));
          },
          nb::arg("out"), nb::arg("stream"));
}

}  // namespace weft
