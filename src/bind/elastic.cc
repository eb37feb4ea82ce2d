// SPDX-License-Identifier: Apache-2.0
//
// weft._core.Ring and weft._core.Engram: messages between neighbours, and reads of a spread table, of a
// MoeBuffer.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind/bind.h"
#include "moe/engram.h"
#include "moe/ring.h"

namespace nb = nanobind;

namespace weft {
namespace {

void def_message(OwnedClass<Ring>& into, const char* name, Status (Ring::*move)(const RingCall&)) {
  into.def(
      name,
      [move](Ring& self, uint64_t data, uint64_t bytes, uint32_t peer, uint32_t num_sms, uint64_t stream) {
        check(without_gil([&] {
          return (self.*move)({pointer<std::byte>(data), bytes, peer, num_sms, pointer<void>(stream)});
        }));
      },
      nb::kw_only(), nb::arg("data"), nb::arg("bytes"), nb::arg("peer"), nb::arg("num_sms"),
      nb::arg("stream"));
}

}  // namespace

void bind_elastic(nb::module_& module) {
  OwnedClass<Ring> ring(module, "Ring");
  ring.def_static(
      "create",
      [](MoeBuffer& buffer, uint64_t max_bytes, uint32_t in_flight) {
        check(buffer.check_owner());
        return owned_or_throw(without_gil([&] { return Ring::create(buffer, max_bytes, in_flight); }));
      },
      nb::arg("buffer"), nb::arg("max_bytes"), nb::arg("in_flight"), nb::keep_alive<0, 1>());
  def_message(ring, "send", &Ring::send);
  def_message(ring, "receive", &Ring::receive);

  OwnedClass<Engram>(module, "Engram")
      .def_static(
          "create",
          [](MoeBuffer& buffer) {
            check(buffer.check_owner());
            return ended_by_owner(std::make_unique<Engram>(buffer));
          },
          nb::arg("buffer"), nb::keep_alive<0, 1>())
      .def(
          "resize",
          [](Engram& self, uint64_t entries_per_rank, uint64_t row_bytes, const std::string& type) {
            check(without_gil([&] { return self.resize(entries_per_rank, row_bytes, type); }));
          },
          nb::arg("entries_per_rank"), nb::arg("row_bytes"), nb::arg("type"))
      .def(
          "local",
          [](nb::handle self) {
            auto& engram = nb::cast<Engram&>(self);
            return view_of(engram.window(), engram.entries_at(),
                           engram.entries_per_rank() * engram.row_bytes(), nb::borrow(self));
          },
          "uint8[entries * bytes]: this rank's entries.")
      .def_fact("entries_per_rank", &Engram::entries_per_rank)
      .def_fact("row_bytes", &Engram::row_bytes)
      .def(
          "fetch",
          [](Engram& self, uint64_t indices, uint32_t id_bytes, uint64_t count, uint64_t out,
             uint64_t stream) {
            check(without_gil([&] {
              return self.fetch(
                  {pointer<void>(indices), id_bytes, count, pointer<std::byte>(out), pointer<void>(stream)});
            }));
          },
          nb::kw_only(), nb::arg("indices"), nb::arg("id_bytes"), nb::arg("count"), nb::arg("out"),
          nb::arg("stream"));
}

}  // namespace weft
