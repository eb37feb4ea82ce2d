// SPDX-License-Identifier: Apache-2.0
//
// weft._core.MoeBuffer: addresses and integers in; offsets, counts and views of the window out.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/receiving.h"
#include "bind/tensor_maker.h"
#include "bind/tensors.h"
#include "moe/buffer.h"
#include "moe/fault_text.h"

namespace nb = nanobind;

namespace weft {
static WindowArray view_of(Device device, std::byte* at, uint64_t bytes, nb::object owner) {
  const int kind = device.is_host() ? nb::device::cpu::value : nb::device::cuda::value;
  return WindowArray(at, {bytes}, owner, {}, nb::dtype<uint8_t>(), kind, device.ordinal);
}

WindowArray view_of(const Window& window, uint64_t offset, uint64_t bytes, nb::object owner) {
  return view_of(window.communicator()->device(), window.local() + offset, bytes, std::move(owner));
}

namespace {

// What layouts of one form share. A call makes what it fills, and fills it, in one trip.
class LayoutForm {
 public:
  // new_outputs() makes i32[R], i32[experts] behind it, and u8[T][R], for the stream that is current.
  LayoutForm(MoeBuffer& buffer, uint32_t id_bytes, uint32_t tokens, uint32_t top_k, uint32_t experts,
             nb::object new_outputs)
      : buffer_(&buffer),
        args_{nullptr, tokens, top_k, id_bytes, 0, experts, 0, 0, nullptr, nullptr, nullptr},
        outputs_(std::move(new_outputs)) {}

  nb::tuple run(TensorAddress topk_idx, TensorAddress sum_place, uint64_t stream) const {
    nb::object made[3];
    outputs_.make(made);
    LayoutArgs args = args_;
    args.topk_idx = pointer<void>(topk_idx);
    args.counts = pointer<int32_t>(address_of(made[0]));
    args.token_in_rank = pointer<uint8_t>(address_of(made[2]));
    args.sum_place = pointer<int32_t>(sum_place);
    check(buffer_->check_owner());
    check(without_gil([&] { return buffer_->layout(args, pointer<void>(stream)); }));
    return nb::make_tuple(made[0], made[1], made[2]);
  }

 private:
  MoeBuffer* buffer_;
  LayoutArgs args_;
  Outputs<3> outputs_;
};

// What combines of rows of one form share; as above.
class CombineForm {
 public:
  // new_sums(tokens) -> a function that returns [the sums], for the stream that is current.
  CombineForm(MoeBuffer& buffer, uint32_t row_bytes, int64_t element, nb::object new_sums, nb::object reclaim)
      : buffer_(&buffer),
        row_bytes_(row_bytes),
        element_(element),
        new_sums_(std::move(new_sums)),
        reclaim_(std::move(reclaim)) {}

  // Returns the sums.
  nb::object run(TensorAddress x, TensorAddress topk_weights, uint32_t top_k, TensorAddress slot,
                 TensorAddress bias0, TensorAddress bias1, TensorAddress combined_weights,
                 const DispatchHandle& handle, uint32_t num_sms, const Order& order) {
    check(buffer_->check_owner());
    nb::object combined = sums_of(handle.tokens)()[0];
    const CombineTensors tensors{pointer<std::byte>(x),
                                 pointer<float>(topk_weights),
                                 pointer<int32_t>(slot),
                                 {pointer<std::byte>(bias0), pointer<std::byte>(bias1)},
                                 pointer<std::byte>(nb::cast<TensorAddress>(combined)),
                                 pointer<float>(combined_weights)};
    const CombineCall call{tensors, row_bytes_, top_k,           element_,
                           handle,  num_sms,    order_of(order), more_room_by(reclaim_)};
    check(without_gil([&] { return buffer_->combine(call); }));
    return combined;
  }

 private:
  // Kept for calls of as many tokens as the one before.
  nb::object& sums_of(uint32_t tokens) {
    if (!sums_of_last_.is_valid() || tokens != last_tokens_) sums_of_last_ = new_sums_(tokens);
    last_tokens_ = tokens;
    return sums_of_last_;
  }

  MoeBuffer* buffer_;
  uint32_t row_bytes_;
  int64_t element_;
  nb::object new_sums_, reclaim_;
  nb::object sums_of_last_;
  uint32_t last_tokens_ = 0;
};

void bind_forms(nb::module_& module) {
  nb::class_<LayoutForm>(module, "LayoutForm").def("run", &LayoutForm::run);
  nb::class_<CombineForm>(module, "CombineForm").def("run", &CombineForm::run);
}

}  // namespace

void bind_moe(nb::module_& module) {
  nb::class_<RowFormat>(module, "RowFormat")
      .def(nb::init<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(), nb::arg("row_bytes"),
           nb::arg("scale_words"), nb::arg("top_k"), nb::arg("id_bytes"), nb::arg("element"),
           nb::arg("combine_row_bytes"))
      .def_ro("row_bytes", &RowFormat::row_bytes)
      .def_ro("scale_words", &RowFormat::scale_words)
      .def_ro("top_k", &RowFormat::top_k)
      .def_ro("id_bytes", &RowFormat::id_bytes);
  nb::class_<HandleMemory>(module, "HandleMemory")
      .def(
          "__init__",
          [](HandleMemory* self, TensorAddress send_row, TensorAddress slot_base, TensorAddress prefix,
             TensorAddress sum_place, TensorAddress routes, TensorAddress records) {
            new (self) HandleMemory{{pointer<int32_t>(send_row), pointer<int32_t>(slot_base),
                                     pointer<int32_t>(prefix), pointer<int32_t>(sum_place)},
                                    pointer<int32_t>(routes),
                                    pointer<int32_t>(records)};
          },
          nb::arg("send_row"), nb::arg("slot_base"), nb::arg("prefix"), nb::arg("sum_place") = nb::none(),
          nb::arg("routes") = nb::none(), nb::arg("records") = nb::none());
  nb::class_<DispatchHandle>(module, "DispatchHandle")
      .def(nb::init<const HandleMemory&, uint64_t, uint32_t, uint32_t, uint64_t, uint64_t, bool>(),
           nb::arg("memory"), nb::arg("id"), nb::arg("tokens"), nb::arg("experts"), nb::arg("rows"),
           nb::arg("staging_rows"), nb::arg("counts_unknown"))
      .def_ro("id", &DispatchHandle::id)
      .def_ro("rows", &DispatchHandle::rows)
      .def_ro("staging_rows", &DispatchHandle::staging_rows);
  bind_forms(module);
  bind_received(module);
  bind_dispatch_form(module);
  OwnedClass<MoeBuffer> buffer(module, "MoeBuffer");
  buffer
      .def_static(
          "create",
          [](std::shared_ptr<Communicator> comm, uint64_t heap_bytes, uint64_t low_latency_bytes,
             double timeout_s, bool each_alone) {
            return owned_or_throw(without_gil([&] {
              return MoeBuffer::create(comm, {heap_bytes, low_latency_bytes, timeout_s, each_alone});
            }));
          },
          nb::arg("communicator"), nb::arg("heap_bytes"), nb::arg("low_latency_bytes"), nb::arg("timeout_s"),
          nb::arg("each_alone") = false)
      .def_fact("planned_sms", &MoeBuffer::planned_sms)
      .def_fact("planned_combine_sms", &MoeBuffer::planned_combine_sms)
      .def(
          "layout_form",
          [](MoeBuffer& self, uint32_t id_bytes, uint32_t tokens, uint32_t top_k, uint32_t experts,
             nb::object new_outputs) {
            return LayoutForm(self, id_bytes, tokens, top_k, experts, std::move(new_outputs));
          },
          nb::arg("id_bytes"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("experts"),
          nb::arg("new_outputs"), nb::keep_alive<0, 1>())
      .def(
          "combine_form",
          [](MoeBuffer& self, uint32_t row_bytes, int64_t element, nb::object new_sums, nb::object reclaim) {
            return CombineForm(self, row_bytes, element, std::move(new_sums), std::move(reclaim));
          },
          nb::arg("row_bytes"), nb::arg("element"), nb::arg("new_sums"), nb::arg("reclaim"),
          nb::keep_alive<0, 1>())
      .def("wait", [](MoeBuffer& self, uint64_t stream,
                      uint64_t first) { check(self.wait(pointer<void>(stream), pointer<void>(first))); })
      .def("barrier",
           [](MoeBuffer& self, const Order& order) {
             check(without_gil([&] { return self.barrier(order_of(order)); }));
           })
      .def(
          "view",
          [](MoeBuffer& self, uint64_t offset, uint64_t bytes, nb::object owner) {
            return view_of(self.window(), offset, bytes, std::move(owner));
          },
          nb::arg("offset"), nb::arg("bytes"), nb::arg("owner"))
      .def(
          "make_room_for",
          [](MoeBuffer& self, const RowFormat& format, uint64_t rows, uint64_t staging_rows) {
            check(without_gil([&] { return self.make_room_for(format, rows, staging_rows); }));
          },
          nb::kw_only(), nb::arg("format"), nb::arg("rows"), nb::arg("staging_rows"))
      .def_fact("islands", &MoeBuffer::islands)
      .def("route_words", &MoeBuffer::route_words, nb::arg("tokens"), nb::arg("is_ordered"))
      .def_fact("handle_buffer_key", &MoeBuffer::handle_buffer_key)
      .def("give_back", &MoeBuffer::give_back, nb::arg("offset"))
      .def_fact("largest_piece_bytes", &MoeBuffer::largest_piece)
      .def("give_back_after",
           [](MoeBuffer& self, uint64_t offset, uint64_t stream) {
             return value_or_throw(self.returned_pieces().give_back(offset, pointer<void>(stream)));
           })
      .def("reclaim", [](MoeBuffer& self, uint64_t stream) { check(self.reclaim(pointer<void>(stream))); })
      .def("follow", [](MoeBuffer& self, uint64_t stream) { check(self.follow(pointer<void>(stream))); })
      .def(
          "trace_view",
          [](MoeBuffer& self, nb::object owner) {
            return view_of(self.window().communicator()->device(), reinterpret_cast<std::byte*>(self.trace()),
                           self.trace_bytes(), std::move(owner));
          },
          nb::arg("owner"))
      .def_fact("trace_bytes", &MoeBuffer::trace_bytes)
      .def_fact("window_bytes", [](MoeBuffer& self) { return self.window().bytes(); })
      .def_fact("low_latency_begin", &MoeBuffer::low_latency_begin)
      .def_fact("low_latency_end", &MoeBuffer::low_latency_end);
  module.def(
      "worst_case_bytes",
      [](const RowFormat& format, uint64_t rows, uint64_t staging_rows) {
        return worst_case_bytes(format, rows, staging_rows);
      },
      nb::arg("format"), nb::arg("rows"), nb::arg("staging_rows"));
  module.attr("HANDLE_NUMBER_BITS") = kHandleNumberBits;
  module.def("span_name", &span_name, nb::arg("what"));
}

}  // namespace weft
