// SPDX-License-Identifier: Apache-2.0
//
// Bootstrap, Communicator, Window and what `weft info` asks. Calls that may wait release the interpreter's
// lock.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "base/config.h"
#include "bind/bind.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/interface.h"
#include "bootstrap/tcp_bootstrap.h"
#include "comm/communicator.h"
#include "comm/window.h"
#include "topology/gpus.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft {
namespace {

// What a Python exception says, as a Status: weft.Error keeps its code, everything else is kSystem.
Status to_status(const nb::python_error& error, int rank) {
  const nb::object value = nb::borrow(error.value());
  const std::string message = nb::str(value).c_str();
  if (!nb::hasattr(value, "code"))
    return Status::make(Code::kSystem, "rank {}, bootstrap.all_gather: {}: {}", rank,
                        nb::type_name(value.type()).c_str(), message);
  const std::string code = nb::str(value.attr("code")).c_str();
  for (Code known : {Code::kInvalid, Code::kCapacity, Code::kPeerLost, Code::kUnsupported, Code::kClosed})
    if (code == to_string(known)) return Status(known, message);
  return Status(Code::kSystem, message);
}

// A Bootstrap that a Python object implements: rank, size, all_gather(bytes, timeout_s) -> list[bytes].
class PythonBootstrap : public Bootstrap {
 public:
  explicit PythonBootstrap(nb::object object)
      : rank_(nb::cast<int>(object.attr("rank"))),
        size_(nb::cast<int>(object.attr("size"))),
        object_(object) {}
  ~PythonBootstrap() override {
    nb::gil_scoped_acquire gil;
    object_.reset();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) override {
    nb::gil_scoped_acquire gil;
    try {
      const nb::object answers =
          object_.attr("all_gather")(nb::bytes(mine.data(), mine.size()), until.left_s());
      std::vector<std::string> all;
      for (nb::handle answer : answers) {
        const nb::bytes bytes = nb::cast<nb::bytes>(answer);
        all.emplace_back(bytes.c_str(), bytes.size());
      }
      return all;
    } catch (const nb::python_error& error) {
      return to_status(error, rank_);
    } catch (const nb::cast_error&) {
      return Status::make(Code::kSystem, "rank {}: a bootstrap's all_gather must return a list of bytes",
                          rank_);
    }
  }

 private:
  const int rank_, size_;
  nb::object object_;
};

std::shared_ptr<Communicator> create_communicator(nb::object bootstrap, const std::string& device,
                                                  double timeout_s, const std::string& transport) {
  const Device parsed = parse_device(device);
  std::shared_ptr<Bootstrap> given;
  if (nb::isinstance<Bootstrap>(bootstrap))
    given = nb::cast<std::shared_ptr<Bootstrap>>(bootstrap);
  else
    given = std::make_shared<PythonBootstrap>(bootstrap);
  nb::gil_scoped_release no_gil;
  return value_or_throw(Communicator::create(std::move(given), parsed, timeout_s, transport));
}

nb::dict to_dict(const RankFacts& facts) {
  nb::dict dict;
  dict["rank"] = facts.rank;
  dict["node"] = facts.node;
  dict["host"] = facts.host;
  dict["process"] = facts.process;
  dict["device"] = text("{}", facts.device);
  dict["gpu"] = facts.gpu;
  dict["numa_node"] = facts.numa_node;
  return dict;
}

nb::dict to_dict(const GpuFacts& gpu) {
  nb::dict dict;
  dict["ordinal"] = gpu.ordinal;
  dict["name"] = gpu.name;
  dict["pci_address"] = gpu.pci_address;
  dict["bytes"] = gpu.bytes;
  dict["sms"] = gpu.sms;
  dict["compute_capability"] = text("{}.{}", gpu.compute_major, gpu.compute_minor);
  dict["numa_node"] = gpu.numa_node;
  dict["nvlinks"] = gpu.nvlinks;
  dict["can_share_vmm"] = gpu.can_share_vmm;
  dict["can_share_fabric"] = gpu.can_share_fabric;
  dict["can_rdma"] = gpu.can_rdma;
  return dict;
}

nb::dict to_dict(const GpuLink& link) {
  nb::dict dict;
  dict["can_access"] = link.can_access;
  dict["has_atomics"] = link.has_atomics;
  dict["is_nvlink"] = link.is_nvlink;
  return dict;
}

void bind_topology(nb::module_& module) {
  module.def("host_id", &host_id);
  module.def("gpus", [] {
    nb::list list;
    for (const GpuFacts& gpu : value_or_throw(gpus())) list.append(to_dict(gpu));
    return list;
  });
  module.def(
      "gpu_link",
      [](int from, int to) {
        return to_dict(
            value_or_throw(gpu_link(value_or_throw(gpu_facts(from)), value_or_throw(gpu_facts(to)))));
      },
      "from"_a, "to"_a);
}

nb::dict to_dict(const Candidate& candidate) {
  const Caps& caps = candidate.caps;
  nb::dict dict;
  dict["name"] = candidate.transport->name();
  dict["carried_by"] = candidate.transport->carried_by();
  dict["reach"] = caps.reach == Reach::kMapped ? "mapped" : "port";
  dict["needs_registration"] = caps.needs_registration;
  dict["has_atomics"] = caps.has_atomics;
  dict["reaches_gpus"] = caps.reaches_gpus;
  dict["only_by_name"] = caps.only_by_name;
  dict["ordering"] = caps.ordering == Ordering::kSignals ? "signals after puts" : "none";
  dict["max_put_bytes"] = caps.max_put_bytes;
  dict["latency_us"] = caps.latency_us;
  dict["bandwidth_gb_s"] = caps.bandwidth_gb_s;
  dict["details"] = caps.details;
  dict["unusable_because"] = caps.unusable_because;
  return dict;
}

nb::dict to_dict(const Interface& interface) {
  nb::dict dict;
  dict["name"] = interface.name;
  dict["address"] = interface.address;
  dict["why"] = interface.why;
  return dict;
}

void bind_communicator(nb::module_& module) {
  module.def("rendezvous_interface",
             [] { return to_dict(value_or_throw(choose_interface(config().interface))); });
  OwnedClass<Bootstrap>(module, "Bootstrap")
      .def_fact("rank", &Bootstrap::rank)
      .def_fact("size", &Bootstrap::size)
      .def(
          "all_gather",
          [](Bootstrap& bootstrap, nb::bytes mine, double timeout_s) {
            const std::string given(mine.c_str(), mine.size());
            std::vector<std::string> all;
            {
              nb::gil_scoped_release no_gil;
              all = value_or_throw(bootstrap.all_gather(given, Deadline::after_s(timeout_s)));
            }
            nb::list list;
            for (const std::string& bytes : all) list.append(nb::bytes(bytes.data(), bytes.size()));
            return list;
          },
          "data"_a, "timeout_s"_a);
  nb::class_<AddressBootstrap, Bootstrap>(module, "AddressBootstrap")
      .def("close", [](AddressBootstrap& bootstrap) {
        nb::gil_scoped_release no_gil;
        bootstrap.close();
      });
  module.def("bootstrap_at",
             [](const std::string& host, uint16_t port, int rank, int size, nb::bytes secret) {
               return bootstrap_at({host, port, rank, size, std::string(secret.c_str(), secret.size())});
             });
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&PeerWatch::process_ends));
  module.def("thread_bootstraps", &thread_bootstraps, "ranks"_a);
  OwnedClass<Communicator>(module, "Communicator")
      .def_static("create", &create_communicator, "bootstrap"_a, "device"_a = "cpu", "timeout_s"_a = 0.0,
                  "transport"_a = "")
      .def_fact("rank", &Communicator::rank)
      .def_fact("size", &Communicator::size)
      .def_fact("timeout_s", &Communicator::timeout_s)
      .def_fact("why_not_all_mapped", &Communicator::why_not_all_mapped)
      .def_fact("device", [](const Communicator& comm) { return text("{}", comm.device()); })
      .def_fact("sharing", [](const Communicator& comm) { return text("{}", comm.sharing()); })
      .def_fact("port_placement", [](const Communicator& comm) { return comm.port_placement(); })
      .def_fact("facts",
                [](const Communicator& comm) {
                  nb::list list;
                  for (const RankFacts& facts : comm.facts()) list.append(to_dict(facts));
                  return list;
                })
      .def("transport_to",
           [](const Communicator& comm, int peer) -> nb::object {
             if (peer < 0 || peer >= comm.size())
               check(Status::invalid("peer: got {}, allowed: 0 to {}", peer, comm.size() - 1));
             const Transport* transport = comm.transport_to(peer);
             return transport ? nb::cast(transport->name()) : nb::none();
           })
      .def("barrier",
           [](Communicator& comm) {
             nb::gil_scoped_release no_gil;
             check(comm.barrier());
           })
      // Every rank's text, in rank order. Collective, and no faster than the bootstrap: for set-up.
      .def(
          "all_gather_text",
          [](Communicator& comm, const std::string& mine) {
            nb::gil_scoped_release no_gil;
            return value_or_throw(comm.bootstrap().all_gather(mine, comm.deadline()));
          },
          "mine"_a);
}

Status check_range(const Window& window, int rank, uint64_t offset, uint64_t bytes) {
  const int ranks = window.communicator()->size();
  if (rank < 0 || rank >= ranks) return Status::invalid("rank: got {}, allowed: 0 to {}", rank, ranks - 1);
  if (!window.base(rank))
    return Status::make(Code::kUnsupported, "rank {}'s window is not mapped here", rank);
  if (offset <= window.bytes() && bytes <= window.bytes() - offset) return Status();
  return Status::invalid("offset, bytes: got {}, {}, allowed: within the window's {} bytes", offset, bytes,
                         window.bytes());
}

void bind_window(nb::module_& module) {
  OwnedClass<Window>(module, "Window")
      .def_static(
          "create",
          [](std::shared_ptr<Communicator> comm, uint64_t bytes) {
            nb::gil_scoped_release no_gil;
            return owned_or_throw(Window::create(std::move(comm), bytes));
          },
          "communicator"_a, "bytes"_a)
      .def_fact("bytes", &Window::bytes)
      .def("base",
           [](const Window& window, int rank) {
             check(check_range(window, rank, 0, 0));
             return reinterpret_cast<uintptr_t>(window.base(rank));
           })
      .def(
          "view",
          [](nb::handle_t<Window> self, int rank, uint64_t offset, uint64_t bytes) {
            Window& window = nb::cast<Window&>(self);
            check(check_range(window, rank, offset, bytes));
            const Device device = window.communicator()->device();
            const size_t shape[1] = {bytes};
            return nb::ndarray<uint8_t>(
                window.base(rank) + offset, 1, shape, self, nullptr, nb::dtype<uint8_t>(),
                device.is_host() ? nb::device::cpu::value : nb::device::cuda::value, device.ordinal);
          },
          "rank"_a, "offset"_a, "bytes"_a, nb::rv_policy::reference)
      .def_fact("table", [](const Window& window) { return reinterpret_cast<uintptr_t>(window.table()); })
      .def_fact("communicator", [](const Window& window) { return window.communicator(); })
      .def(
          "grow",
          [](Window& window, uint64_t at_least_bytes) {
            nb::gil_scoped_release no_gil;
            check(window.grow(at_least_bytes));
          },
          "at_least_bytes"_a);
}

}  // namespace

Device parse_device(const std::string& name) {
  if (name == "cpu") return Device{};
  if (name.rfind("cuda:", 0) == 0 && name.size() > 5 && name.size() < 9 &&
      name.find_first_not_of("0123456789", 5) == std::string::npos)
    return Device{Device::Kind::kCuda, std::stoi(name.substr(5))};
  check(Status::invalid("device: got '{}', allowed: cpu or cuda:N", name));
  return Device{};
}

void bind_runtime(nb::module_& module) {
  bind_communicator(module);
  bind_window(module);
  bind_topology(module);
  module.def(
      "transports",
      [](const std::string& device) {
        nb::list list;
        for (const Candidate& candidate : candidates(parse_device(device))) list.append(to_dict(candidate));
        return list;
      },
      "device"_a = "cpu");
}

}  // namespace weft
