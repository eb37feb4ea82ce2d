// SPDX-License-Identifier: Apache-2.0
//
// The loops of `weft bench transfer` for Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "measure/loops/bind_loops.h"
#include "measure/loops/transfer_loop.h"

namespace nb = nanobind;

namespace weft {
namespace {

using namespace transfer;
using provider::Nic;
using provider::Provider;

Load to_load(const std::string& kind, uint64_t bytes, uint32_t count, uint32_t window, uint32_t pool,
             uint32_t repeats, int64_t rail = -1) {
  Load load{LoadKind::kWrite, bytes, count, window, pool, repeats};
  if (rail >= 0) load.rail = static_cast<uint32_t>(rail);
  if (kind == "read") load.kind = LoadKind::kRead;
  if (kind == "paged_write") load.kind = LoadKind::kPaged;
  if (kind == "scatter") load.kind = LoadKind::kScatter;
  if (kind == "write_imm_latency") load.kind = LoadKind::kLatency;
  return load;
}

nb::bytes address_of(const RawLoop& raw) {
  const std::string address = raw.address();
  return nb::bytes(address.data(), address.size());
}

}  // namespace

void bind_transfer_loops(nb::module_& module) {
  module.def("transfer_measure", [](Engine& e, const std::shared_ptr<Memory>& memory,
                                    const std::shared_ptr<Remote>& remote, const std::string& kind,
                                    uint64_t bytes, uint32_t count, uint32_t window, uint32_t pool,
                                    uint32_t repeats, int64_t rail, double timeout_s) {
    check(e.check_owner());
    const Load load = to_load(kind, bytes, count, window, pool, repeats, rail);
    return value_or_throw(
        without_gil([&] { return measure(e, memory, remote, load, Deadline::after_s(timeout_s)); }));
  });
  nb::class_<Answered>(module, "TransferAnswered").def(nb::init<>());
  module.def("transfer_serve",
             [](Engine& e, const std::shared_ptr<Peer>& peer, const std::shared_ptr<Memory>& memory,
                const std::shared_ptr<Remote>& remote, Answered& answered, double timeout_s) {
               check(e.check_owner());
               check(without_gil(
                   [&] { return serve(e, peer, memory, remote, answered, Deadline::after_s(timeout_s)); }));
             });
  module.def("transfer_stop_serving", [](Engine& e, const std::shared_ptr<Peer>& peer, double timeout_s) {
    check(e.check_owner());
    check(without_gil([&] { return stop_serving(e, peer, Deadline::after_s(timeout_s)); }));
  });
  OwnedClass<RawLoop>(module, "TransferRawLoop")
      .def_prop_ro("address", &address_of)
      .def("connect", [](RawLoop& raw,
                         const nb::bytes& address) { check(raw.connect({address.c_str(), address.size()})); })
      .def(
          "measure",
          [](RawLoop& raw, const std::string& kind, uint64_t bytes, uint32_t count, uint32_t window,
             uint32_t pool, uint32_t repeats, const std::shared_ptr<Peer>& beside, double timeout_s) {
            const Load load = to_load(kind, bytes, count, window, pool, repeats);
            return value_or_throw(
                without_gil([&] { return raw.measure(load, beside, Deadline::after_s(timeout_s)); }));
          },
          nb::arg("kind"), nb::arg("bytes"), nb::arg("count"), nb::arg("window"), nb::arg("pool"),
          nb::arg("repeats"), nb::arg("beside").none(), nb::arg("timeout_s"))
      .def("serve",
           [](RawLoop& raw, double timeout_s) {
             check(without_gil([&] { return raw.serve(Deadline::after_s(timeout_s)); }));
           })
      .def("stop_serving", [](RawLoop& raw, double timeout_s) {
        check(without_gil([&] { return raw.stop_serving(Deadline::after_s(timeout_s)); }));
      });
  module.def("transfer_raw_loop",
             [](Provider& provider, const std::string& nic_name, uint64_t address, uint64_t bytes) {
               check(provider.check_owner());
               return owned_or_throw(without_gil([&]() -> Result<std::unique_ptr<RawLoop>> {
                 for (const Nic& nic : provider.probe())
                   if (nic.name == nic_name && nic.usable())
                     return RawLoop::open(provider, nic, reinterpret_cast<void*>(address), bytes);
                 return Status::invalid("nic: got {}, which {} does not have", nic_name, provider.name());
               }));
             });
}

}  // namespace weft
