// SPDX-License-Identifier: Apache-2.0
//
// weft._core.LowLatency: the low-latency calls of a MoeBuffer. Addresses and integers in; a call
// is filled in field by field.
#include <nanobind/nanobind.h>

#include "bind/bind.h"
#include "moe/buffer.h"
#include "moe/low_latency.h"

namespace nb = nanobind;

namespace weft {
namespace {

// An attribute that takes a pointer as an integer.
template <class Call, class T>
void def_address(nb::class_<Call>& into, const char* name, T* Call::* field) {
  into.def_prop_rw(
      name, [field](const Call& call) { return reinterpret_cast<uint64_t>(call.*field); },
      [field](Call& call, uint64_t address) { call.*field = pointer<T>(address); });
}

void bind_dispatch_call(nb::module_& module) {
  using Call = LowLatencyDispatchCall;
  nb::class_<Call> call(module, "LowLatencyDispatchCall");
  call.def(nb::init<>())
      .def_rw("max_tokens", &Call::max_tokens)
      .def_rw("tokens", &Call::tokens)
      .def_rw("top_k", &Call::top_k)
      .def_rw("experts", &Call::experts)
      .def_rw("id_bytes", &Call::id_bytes)
      .def_rw("payload", &Call::payload)
      .def_rw("row_bytes", &Call::row_bytes)
      .def_rw("scale_bytes", &Call::scale_bytes)
      .def_rw("scale_expert_stride", &Call::scale_expert_stride)
      .def_rw("scale_row_stride", &Call::scale_row_stride)
      .def_rw("scale_word_stride", &Call::scale_word_stride)
      .def_rw("tiled_scales", &Call::tiled_scales)
      .def_rw("ticket", &Call::ticket);
  def_address(call, "topk_idx", &Call::topk_idx);
  def_address(call, "topk_weights", &Call::topk_weights);
  def_address(call, "x", &Call::x);
  def_address(call, "x_scales", &Call::x_scales);
  def_address(call, "out", &Call::out);
  def_address(call, "out_scales", &Call::out_scales);
  def_address(call, "src_info", &Call::src_info);
  def_address(call, "layout_range", &Call::layout_range);
  def_address(call, "counts", &Call::counts);
  def_address(call, "out_weights", &Call::out_weights);
  def_address(call, "out_source", &Call::out_source);
  def_address(call, "expert_stats", &Call::expert_stats);
  def_address(call, "wait_cycles", &Call::wait_cycles);
  def_address(call, "routes", &Call::routes);
  def_address(call, "stream", &Call::stream);
}

void bind_combine_call(nb::module_& module) {
  using Call = LowLatencyCombineCall;
  nb::class_<Call> call(module, "LowLatencyCombineCall");
  call.def(nb::init<>())
      .def_rw("max_tokens", &Call::max_tokens)
      .def_rw("tokens", &Call::tokens)
      .def_rw("top_k", &Call::top_k)
      .def_rw("experts", &Call::experts)
      .def_rw("id_bytes", &Call::id_bytes)
      .def_rw("reply", &Call::reply)
      .def_rw("row_bytes", &Call::row_bytes)
      .def_rw("dispatch_had_weights", &Call::dispatch_had_weights)
      .def_rw("x_row_bytes", &Call::x_row_bytes)
      .def_rw("signal_value", &Call::signal_value)
      .def_rw("signals_per_expert", &Call::signals_per_expert)
      .def_rw("signal_rows", &Call::signal_rows)
      .def_rw("num_sms", &Call::num_sms)
      .def_rw("ticket", &Call::ticket);
  def_address(call, "topk_idx", &Call::topk_idx);
  def_address(call, "topk_weights", &Call::topk_weights);
  def_address(call, "x", &Call::x);
  def_address(call, "routes", &Call::routes);
  def_address(call, "combined", &Call::combined);
  def_address(call, "signals", &Call::signals);
  def_address(call, "wait_cycles", &Call::wait_cycles);
  def_address(call, "stream", &Call::stream);
}

}  // namespace

void bind_low_latency(nb::module_& module) {
  bind_dispatch_call(module);
  bind_combine_call(module);
  module.attr("PHASE_SEND") = kPhaseSend;
  module.attr("PHASE_RECEIVE") = kPhaseReceive;
  module.attr("PAYLOAD_COPY") = kPayloadCopy;
  module.attr("PAYLOAD_FP8") = kPayloadFp8;
  module.attr("PAYLOAD_FP8_ROUNDED") = kPayloadFp8Rounded;
  module.attr("PAYLOAD_FP8_EXPONENT") = kPayloadFp8Exponent;
  module.attr("PAYLOAD_MXFP8") = kPayloadMxfp8;
  module.attr("PAYLOAD_NVFP4") = kPayloadNvfp4;
  module.attr("PAYLOAD_NVFP4_EXPONENT") = kPayloadNvfp4Exponent;
  module.attr("REPLY_REDUCED") = kReplyReduced;
  module.attr("REPLY_EXACT") = kReplyExact;
  module.attr("REPLY_EXACT_LOG") = kReplyExactLog;
  module.def(
      "low_latency_hint_bytes",
      [](uint32_t ranks, uint32_t max_tokens, uint32_t top_k, uint32_t experts, uint64_t hidden) {
        return low_latency_hint_bytes({ranks, max_tokens, top_k, experts}, hidden);
      },
      nb::arg("ranks"), nb::arg("max_tokens"), nb::arg("top_k"), nb::arg("experts"), nb::arg("hidden"));

  module.def("low_latency_region_bytes", &low_latency_region_bytes, nb::arg("ranks"), nb::arg("word_bytes"));

  nb::class_<LowLatency>(module, "LowLatency")
      .def(
          "__init__",
          [](LowLatency* self, MoeBuffer& buffer, bool may_mask) {
            new (self) LowLatency(
                buffer.window(), buffer.low_latency_begin(), buffer.low_latency_end(), buffer.limits(),
                {buffer.fault_box(), buffer.timeout_s(), may_mask, buffer.trace()}, buffer.line_tokens());
            if (may_mask) buffer.outlive_peers();
          },
          nb::arg("buffer"), nb::arg("may_mask"), nb::keep_alive<1, 2>())
      .def(
          "check_dispatch",
          [](LowLatency& self, const LowLatencyDispatchCall& call) { check(self.check(call)); },
          nb::arg("call"))
      .def(
          "dispatch",
          [](LowLatency& self, const LowLatencyDispatchCall& call, uint32_t phases) {
            nb::gil_scoped_release released;
            check(self.dispatch(call, phases));
          },
          nb::arg("call"), nb::arg("phases"))
      .def(
          "combine",
          [](LowLatency& self, const LowLatencyCombineCall& call, uint32_t phases) {
            nb::gil_scoped_release released;
            check(self.combine(call, phases));
          },
          nb::arg("call"), nb::arg("phases"))
      .def("next_ticket", &LowLatency::next_ticket)
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
