// SPDX-License-Identifier: Apache-2.0
//
// weft._core.MoeBuffer: addresses and integers in; offsets, counts and views of the window out.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind/bind.h"
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

Status copy_out(const Window& window, uint64_t offset, void* to, uint64_t bytes) {
  if (!window.communicator()->device().is_host() || bytes > window.bytes() || offset > window.bytes() - bytes)
    return Status::invalid("copy_out: got {} bytes at {} of a window, allowed: within {}, on the CPU", bytes,
                           offset, window.bytes());
  if (bytes > 0) std::memcpy(to, window.local() + offset, bytes);  // a tensor of nothing has no address
  return {};
}

// A capsule for torch: [rows][columns] of a type by the code and bits of DLPack.
nb::ndarray<> rows_of(const Window& window, uint64_t offset, size_t rows, size_t columns, uint8_t code,
                      uint8_t bits, nb::object owner) {
  const Device device = window.communicator()->device();
  const int kind = device.is_host() ? nb::device::cpu::value : nb::device::cuda::value;
  const size_t shape[] = {rows, columns};
  return nb::ndarray<>(window.local() + offset, 2, shape, owner, nullptr, {code, bits, 1}, kind,
                       device.ordinal);
}

// Of weft.moe.device_context.
using Order = std::tuple<uint64_t, uint64_t, bool, bool>;
CallOrder order_of(const Order& order) {
  const auto& [stream, after, waits, joins] = order;
  return {pointer<void>(stream), pointer<void>(after), waits, joins};
}

DispatchTensors dispatch_tensors(TensorAddress x, TensorAddress scales, int64_t scale_token_stride,
                                 int64_t scale_word_stride, TensorAddress topk_idx,
                                 TensorAddress topk_weights) {
  return {pointer<std::byte>(x), pointer<uint32_t>(scales), scale_token_stride,
          scale_word_stride,     pointer<void>(topk_idx),   pointer<float>(topk_weights)};
}

// DeviceContext.reclaim_waiting.
MoreRoom more_room_by(nb::handle reclaim) {
  return [reclaim] {
    const nb::gil_scoped_acquire held;
    return nb::cast<bool>(reclaim());
  };
}

// new_records(words) -> a tensor, which the caller keeps.
std::function<int32_t*(uint64_t)> records_by(nb::handle new_records) {
  return [new_records](uint64_t words) {
    const nb::gil_scoped_acquire held;
    return pointer<int32_t>(nb::cast<TensorAddress>(new_records(words)));
  };
}

// The calls of each layer, by position: a call's tensors, then what it goes by. Tensors are None where they are left
// out.
template <class... Tensor>
void def_dispatches(nb::class_<MoeBuffer>& buffer, DispatchTensors (*tensors)(Tensor...)) {
  buffer
      .def("dispatch_new",
           [tensors](MoeBuffer& self, const RowFormat& format, Tensor... at, TensorAddress token_in_rank,
                     TensorAddress tokens_per_expert, uint32_t tokens, uint32_t experts,
                     const HandleMemory& memory, uint64_t worst_rows, uint64_t most_tokens, bool keep_weights,
                     uint32_t num_sms, const Order& order, nb::handle reclaim, nb::handle new_records) {
             const NewDispatchCall call{
                 {{pointer<uint8_t>(token_in_rank), pointer<int32_t>(tokens_per_expert)},
                  format,
                  memory,
                  tokens,
                  experts,
                  worst_rows,
                  order_of(order),
                  most_tokens},
                 tensors(at...),
                 keep_weights,
                 num_sms,
                 more_room_by(reclaim),
                 records_by(new_records)};
             return value_or_throw(without_gil([&] { return self.dispatch_new(call); }));
           })
      .def("dispatch", [tensors](MoeBuffer& self, const RowFormat& format, Tensor... at,
                                 const DispatchHandle& handle, bool keep_weights, bool is_one_piece,
                                 uint32_t num_sms, const Order& order, nb::handle reclaim) {
        const DispatchCall call{tensors(at...), format,  handle,          keep_weights,
                                is_one_piece,   num_sms, order_of(order), more_room_by(reclaim)};
        return value_or_throw(without_gil([&] { return self.dispatch(call); }));
      });
}

// What layouts of one form share. A call makes what it fills, and fills it, in one trip.
class LayoutForm {
 public:
  // new_outputs() -> [i32[R], i32[experts] behind it, u8[T][R]], for the stream that is current.
  LayoutForm(MoeBuffer& buffer, uint32_t id_bytes, uint32_t tokens, uint32_t top_k, uint32_t experts,
             nb::object new_outputs)
      : buffer_(&buffer),
        args_{nullptr, tokens, top_k, id_bytes, 0, experts, 0, 0, nullptr, nullptr, nullptr},
        new_outputs_(std::move(new_outputs)) {}

  nb::object run(TensorAddress topk_idx, TensorAddress sum_place, uint64_t stream) const {
    nb::object outputs = new_outputs_();
    LayoutArgs args = args_;
    args.topk_idx = pointer<void>(topk_idx);
    args.counts = pointer<int32_t>(nb::cast<TensorAddress>(outputs[0]));
    args.token_in_rank = pointer<uint8_t>(nb::cast<TensorAddress>(outputs[2]));
    args.sum_place = pointer<int32_t>(sum_place);
    check(without_gil([&] { return buffer_->layout(args, pointer<void>(stream)); }));
    return outputs;
  }

 private:
  MoeBuffer* buffer_;
  LayoutArgs args_;
  nb::object new_outputs_;
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
  nb::class_<ReceiveLayout>(module, "ReceiveLayout")
      .def_ro("scales", &ReceiveLayout::scales)
      .def_ro("weights", &ReceiveLayout::weights)
      .def_ro("token", &ReceiveLayout::token)
      .def_ro("slot", &ReceiveLayout::slot)
      .def_ro("rows_bytes", &ReceiveLayout::rows_bytes)
      .def_ro("meta_bytes", &ReceiveLayout::meta_bytes);
  nb::class_<Received>(module, "Received")
      .def_ro("rows_at", &Received::rows_at)
      .def_ro("meta_at", &Received::meta_at)
      .def_ro("is_one_piece", &Received::is_one_piece)
      .def_ro("is_captured", &Received::is_captured)
      .def_ro("layout", &Received::layout);
  nb::class_<Dispatched>(module, "Dispatched")
      .def_ro("received", &Dispatched::received)
      .def_ro("handle", &Dispatched::handle)
      .def_ro("tokens_per_local_expert", &Dispatched::tokens_per_local_expert);

  bind_forms(module);
  nb::class_<MoeBuffer> buffer(module, "MoeBuffer");
  def_dispatches(buffer, &dispatch_tensors);
  buffer
      .def_static(
          "create",
          [](std::shared_ptr<Communicator> comm, uint64_t heap_bytes, uint64_t low_latency_bytes,
             double timeout_s, bool each_alone) {
            return value_or_throw(without_gil([&] {
              return MoeBuffer::create(comm, {heap_bytes, low_latency_bytes, timeout_s, each_alone});
            }));
          },
          nb::arg("communicator"), nb::arg("heap_bytes"), nb::arg("low_latency_bytes"), nb::arg("timeout_s"),
          nb::arg("each_alone") = false)
      .def_prop_ro("planned_sms", &MoeBuffer::planned_sms)
      .def_prop_ro("planned_combine_sms", &MoeBuffer::planned_combine_sms)
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
      .def("rows",
           [](MoeBuffer& self, uint64_t offset, size_t rows, size_t columns, uint8_t code, uint8_t bits,
              nb::object owner) {
             return rows_of(self.window(), offset, rows, columns, code, bits, std::move(owner));
           })
      .def("copy_out",  // of a window of the host
           [](MoeBuffer& self, uint64_t offset, uint64_t to, uint64_t bytes) {
             check(without_gil([&] { return copy_out(self.window(), offset, pointer<void>(to), bytes); }));
           })
      .def(
          "make_room_for",
          [](MoeBuffer& self, const RowFormat& format, uint64_t rows, uint64_t staging_rows) {
            check(without_gil([&] { return self.make_room_for(format, rows, staging_rows); }));
          },
          nb::kw_only(), nb::arg("format"), nb::arg("rows"), nb::arg("staging_rows"))
      .def_prop_ro("islands", &MoeBuffer::islands)
      .def("route_words", &MoeBuffer::route_words, nb::arg("tokens"), nb::arg("is_ordered"))
      .def_prop_ro("handle_buffer_key", &MoeBuffer::handle_buffer_key)
      .def("give_back", &MoeBuffer::give_back, nb::arg("offset"))
      .def_prop_ro("largest_piece_bytes", &MoeBuffer::largest_piece)
      .def_prop_ro("most_rows_bytes", &MoeBuffer::most_rows_bytes)
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
      .def_prop_ro("trace_bytes", &MoeBuffer::trace_bytes)
      .def_prop_ro("window_bytes", [](MoeBuffer& self) { return self.window().bytes(); })
      .def_prop_ro("low_latency_begin", &MoeBuffer::low_latency_begin)
      .def_prop_ro("low_latency_end", &MoeBuffer::low_latency_end);
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
