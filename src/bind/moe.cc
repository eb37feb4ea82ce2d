// SPDX-License-Identifier: Apache-2.0
//
// weft._core.MoeBuffer: addresses and integers in; offsets, counts and views of the window out.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/dispatch_state.h"
#include "bind/receiving.h"
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

void bind_moe(nb::module_& module) {
  nb::class_<RowFormat>(module, "RowFormat")
      .def(nb::init<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>(), nb::arg("row_bytes"),
           nb::arg("scale_words"), nb::arg("top_k"), nb::arg("id_bytes"), nb::arg("element"),
           nb::arg("combine_row_bytes"))
      .def_ro("row_bytes", &RowFormat::row_bytes)
      .def_ro("scale_words", &RowFormat::scale_words)
      .def_ro("top_k", &RowFormat::top_k)
      .def_ro("id_bytes", &RowFormat::id_bytes);
  bind_dispatch_state(module);
  bind_received(module);
  bind_high_throughput(module);
  OwnedClass<MoeBuffer> buffer(module, "MoeBuffer");
  buffer
      .def_static(
          "create",
          [](std::shared_ptr<Communicator> comm, uint64_t heap_bytes, uint64_t low_latency_bytes,
             double timeout_s, bool single_rank_domains) {
            return owned_or_throw(without_gil([&] {
              return MoeBuffer::create(comm, {heap_bytes, low_latency_bytes, timeout_s, single_rank_domains});
            }));
          },
          nb::arg("communicator"), nb::arg("heap_bytes"), nb::arg("low_latency_bytes"), nb::arg("timeout_s"),
          nb::arg("single_rank_domains") = false)
      .def_fact("planned_sms", &MoeBuffer::planned_sms)
      .def_fact("planned_combine_sms", &MoeBuffer::planned_combine_sms)
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
      .def_fact("domains", &MoeBuffer::domains)
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
