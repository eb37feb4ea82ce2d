// SPDX-License-Identifier: Apache-2.0
//
// weft._core.LowLatency: the low-latency calls of a MoeBuffer. A plan is made once for a signature; then a call is one
// trip into the core: low_latency_plans.cc makes its results as well.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "base/cuda_driver.h"
#include "bind/bind.h"
#include "bind/fields.h"
#include "bind/low_latency_calls.h"
#include "bind/tensors.h"
#include "moe/buffer.h"

namespace nb = nanobind;

namespace weft {
namespace {

// With the tensors of a call by position, None for one that is left out, then the stream.
template <class Calls, class Memory, class... Tensor>
void def_calls(nb::class_<Calls>& into, Memory (*memory)(Tensor...)) {
  into.def("send", [memory](const Calls& self, Tensor... at,
                            uint64_t stream) { return self.send(memory(at...), pointer<void>(stream)); })
      .def("receive_into", [memory](const Calls& self, Tensor... at, uint32_t call_slot, uint64_t stream) {
        self.receive_into(memory(at...), call_slot, pointer<void>(stream));
      });
}

// Formats of rows by name, as find_format() in weft/moe/low_latency_formats.py reads them.
nb::dict payloads() {
  nb::dict all;
  for (int64_t number = 0; number < kPayloads; ++number) {
    const Payload one = payload(number);
    nb::dict row;
    row["number"] = number;
    row["shrinks_by"] = one.shrinks_by;
    row["channels_per_scale"] = one.channels_per_scale;
    row["bytes_of_scale"] = bytes_of_scale(one.scale);
    row["row_type"] = one.row_type;
    row["scale_type"] = one.scale_type;
    row["tiled_scales"] = one.tiled_scales;
    all[one.name] = row;
  }
  return all;
}

// What Python names of a facts.
Fields<LowLatencyDispatchFacts> dispatch_fields() {
  using Facts = LowLatencyDispatchFacts;
  return Fields<Facts>()
      .required("max_tokens", &Facts::max_tokens)
      .required("tokens", &Facts::tokens)
      .required("top_k", &Facts::top_k)
      .required("experts", &Facts::experts)
      .required("id_bytes", &Facts::id_bytes)
      .required("payload", &Facts::payload)
      .required("row_bytes", &Facts::row_bytes)
      .required("scale_bytes", &Facts::scale_bytes)
      .required("has_weights", &Facts::has_weights)
      .required("scale_expert_stride", &Facts::scale_expert_stride)
      .required("scale_row_stride", &Facts::scale_row_stride)
      .required("scale_word_stride", &Facts::scale_word_stride)
      .required("tiled_scales", &Facts::tiled_scales)
      .optional("expert_rows", &Facts::expert_rows)
      .optional("padding", &Facts::padding)
      .optional("max_rows", &Facts::max_rows)
      .optional("grid_sms", &Facts::grid_sms);
}

Fields<LowLatencyCombineFacts> combine_fields() {
  using Facts = LowLatencyCombineFacts;
  return Fields<Facts>()
      .required("max_tokens", &Facts::max_tokens)
      .required("tokens", &Facts::tokens)
      .required("top_k", &Facts::top_k)
      .required("experts", &Facts::experts)
      .required("id_bytes", &Facts::id_bytes)
      .required("reply", &Facts::reply)
      .required("row_bytes", &Facts::row_bytes)
      .required("has_weights", &Facts::has_weights)
      .required("dispatch_had_weights", &Facts::dispatch_had_weights)
      .optional("saved_weights", &Facts::saved_weights)
      .optional("sent_id_bytes", &Facts::sent_id_bytes)
      .optional("signal_value", &Facts::signal_value)
      .optional("signals_per_expert", &Facts::signals_per_expert)
      .optional("signal_rows", &Facts::signal_rows)
      .optional("num_sms", &Facts::num_sms)
      .optional("element", &Facts::element)
      .optional("out_element", &Facts::out_element)
      .optional("accumulate", &Facts::accumulate)
      .optional("grid_sms", &Facts::grid_sms);
}

void bind_calls(nb::module_& module) {
  nb::class_<SentDispatch>(module, "SentDispatch")
      .def_ro("number", &SentDispatch::number)
      .def_ro("call_slot", &SentDispatch::call_slot);
  nb::class_<SentCombine>(module, "SentCombine")
      .def_ro("number", &SentCombine::number)
      .def_ro("call_slot", &SentCombine::call_slot);
  nb::class_<DispatchCalls> dispatch(module, "LowLatencyDispatchCalls");
  def_calls(dispatch, &dispatch_memory);
  nb::class_<CombineCalls> combine(module, "LowLatencyCombineCalls");
  def_calls(combine, &combine_memory);
}

}  // namespace

void bind_low_latency(nb::module_& module) {
  bind_calls(module);
  bind_low_latency_plans(module);
  module.def("cuda_loads_lazily", &cuda_loads_lazily);
  module.attr("PHASE_SEND") = kPhaseSend;
  module.attr("PHASE_RECEIVE") = kPhaseReceive;
  module.attr("PAYLOAD_COPY") = kPayloadCopy;
  module.attr("PAYLOADS") = payloads();
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

  OwnedClass<LowLatency>(module, "LowLatency")
      .def_static(
          "create",
          [](MoeBuffer& buffer, bool may_mask) {
            check(buffer.check_owner());
            const LowLatencyWaits waits{buffer.fault_box(), buffer.timeout_s(), may_mask,
                                        buffer.silent(),    buffer.trace(),     buffer.gave_up()};
            auto made = std::make_unique<LowLatency>(buffer.window(), buffer.low_latency_begin(),
                                                     buffer.low_latency_end(), buffer.limits(), waits,
                                                     buffer.low_latency_terms());
            if (may_mask) buffer.outlive_peers();
            return ended_by_owner(std::move(made));
          },
          nb::arg("buffer"), nb::arg("may_mask"), nb::keep_alive<0, 1>())
      .def(
          "sends_once_per_domain",
          [](const LowLatency& self, uint32_t max_tokens, uint32_t top_k, uint32_t experts,
             uint32_t row_bytes, uint32_t scale_bytes) {
            LowLatencyDispatchFacts facts;
            facts.max_tokens = max_tokens;
            facts.top_k = top_k;
            facts.experts = experts;
            facts.row_bytes = row_bytes;
            facts.scale_bytes = scale_bytes;
            return self.sends_once_per_domain(facts);
          },
          nb::arg("max_tokens"), nb::arg("top_k"), nb::arg("experts"), nb::arg("row_bytes"),
          nb::arg("scale_bytes"))
      // The first plan compiles its kernel.
      .def(
          "replies_once_per_domain",
          [](const LowLatency& self, uint32_t max_tokens, uint32_t top_k, uint32_t experts,
             uint32_t row_bytes) {
            LowLatencyCombineFacts facts;
            facts.max_tokens = max_tokens;
            facts.top_k = top_k;
            facts.experts = experts;
            facts.row_bytes = row_bytes;
            return self.replies_once_per_domain(facts);
          },
          nb::arg("max_tokens"), nb::arg("top_k"), nb::arg("experts"), nb::arg("row_bytes"))
      .def(
          "plan_dispatch",
          [fields = dispatch_fields()](LowLatency& self, const nb::kwargs& facts) {
            const LowLatencyDispatchFacts filled = fields.filled(facts);
            return DispatchCalls(self, value_or_throw(without_gil([&] { return self.plan(filled); })));
          },
          nb::arg("facts"), nb::keep_alive<0, 1>())
      .def(
          "plan_combine",
          [fields = combine_fields()](LowLatency& self, const nb::kwargs& facts) {
            const LowLatencyCombineFacts filled = fields.filled(facts);
            return CombineCalls(self, value_or_throw(without_gil([&] { return self.plan(filled); })));
          },
          nb::arg("facts"), nb::keep_alive<0, 1>())
      .def_fact("calls", &LowLatency::calls)
      .def("note_unreceived", &LowLatency::note_unreceived, nb::arg("number"), nb::arg("receive"))
      .def("note_received", &LowLatency::note_received, nb::arg("number"))
      .def_prop_ro("late_receive",
                   [](const LowLatency& self) -> nb::object {
                     const std::string* late = self.late_receive();
                     return late ? nb::object(nb::str(late->c_str())) : nb::none();
                   })
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
