// SPDX-License-Identifier: Apache-2.0
//
// The transfer engine for Python: handles, pointers and bytes. weft.transfer gives them their names and keeps
// tensors alive. Every call that posts, polls or waits releases the interpreter's lock.
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "jit/copy_pages.h"
#include "kernels/core/copy_pages.cuh"
#include "providers/cuda/cuda.h"
#include "providers/fabric/library.h"
#include "providers/loopback/loopback.h"
#include "transfer/engine.h"
#include "transfer/watcher.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft {
namespace {

using namespace transfer;
using provider::Loopback;
using provider::Nic;
using provider::Provider;

template <class Call>
auto released(Call call) {
  nb::gil_scoped_release release;
  return call();
}

std::string_view view(const nb::bytes& bytes) {
  return {bytes.c_str(), bytes.size()};
}
nb::bytes to_python(const std::string& bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

// A Python callable that may be dropped on any thread.
std::shared_ptr<nb::object> keep(nb::object callable) {
  return std::shared_ptr<nb::object>(new nb::object(std::move(callable)), [](nb::object* object) {
    nb::gil_scoped_acquire gil;
    delete object;
  });
}

// A completion callback: called with None, or with (code, message).
std::function<void(const Status&)> completion(nb::object callable) {
  if (callable.is_none()) return nullptr;
  return [callable = keep(std::move(callable))](const Status& status) {
    nb::gil_scoped_acquire gil;
    try {
      if (status.ok())
        (*callable)(nb::none());
      else
        (*callable)(nb::make_tuple(to_string(status.code()), status.message()));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("weft.transfer callback");
    }
  };
}

// How as Python gives it: (imm or None, is_each, rail or -1, timeout_s or 0, counter or None, callback or
// None).
using HowTuple =
    std::tuple<std::optional<uint32_t>, bool, int64_t, double, std::shared_ptr<Counter>, nb::object>;
How to_how(HowTuple& given) {
  How how;
  how.imm = std::get<0>(given);
  how.notify = std::get<1>(given) ? Notify::kEach : Notify::kOnce;
  how.rail = std::get<2>(given) < 0 ? kAnyRail : static_cast<uint32_t>(std::get<2>(given));
  how.timeout_s = std::get<3>(given);
  how.counter = std::get<4>(given);
  how.callback = completion(std::get<5>(given));
  return how;
}

// Pages as Python gives them: (offset, stride_bytes, indices, count).
using PagesTuple = std::tuple<uint64_t, uint64_t, std::vector<uint32_t>, uint64_t>;
Pages to_pages(PagesTuple& given) {
  return {std::get<0>(given), std::get<1>(given), std::move(std::get<2>(given)), std::get<3>(given)};
}

nb::object outcome(const Status& status) {
  if (status.ok()) return nb::none();
  return nb::make_tuple(to_string(status.code()), status.message());
}

// What ties an immediate to who sent it. "message": there are none, and messages are sealed.
const char* imm_proof(const provider::Caps& caps) {
  if (!caps.write_imm) return "message";
  if (caps.imm_bits >= 64) return "token";
  if (caps.source == provider::Source::kRoute) return "connection";
  return caps.source == provider::Source::kAddress ? "address key" : "none";
}

nb::dict nic_dict(const Nic& nic) {
  nb::dict out;
  out["provider"] = nic.provider;
  out["name"] = nic.name;
  out["pci"] = nic.pci;
  out["numa_node"] = nic.numa_node;
  out["gbit_per_s"] = nic.gbit_per_s;
  out["ordered_writes"] = nic.caps.ordered_writes;
  out["write_imm"] = nic.caps.write_imm;
  out["imm_proof"] = imm_proof(nic.caps);
  out["device_memory"] = nic.caps.device_memory;
  out["manual_progress"] = nic.caps.manual_progress;
  out["packs_small_pages"] = nic.caps.packs_small_pages;
  out["write_bytes_max"] = nic.caps.write_bytes_max;
  out["tx_depth"] = nic.caps.tx_depth;
  out["unusable_because"] = nic.unusable_because;
  return out;
}

void bind_handles(nb::module_& module) {
  OwnedClass<Memory>(module, "TransferMemory")
      .def_fact("id", &Memory::id)  // of its registration, unique in the engine
      .def_fact("address", [](const Memory& m) { return reinterpret_cast<uint64_t>(m.data()); })
      .def_fact("bytes", &Memory::bytes)
      .def_prop_ro("is_registered", &Memory::is_registered)
      .def_fact("path", [](const Memory& memory) { return to_string(memory.path().path); })
      .def_fact("path_reason", [](const Memory& memory) { return memory.path().reason; })
      .def_fact("access", &Memory::access)
      .def_fact("is_read_only", &Memory::is_read_only);
  OwnedClass<Peer>(module, "TransferPeer")
      .def_fact("name", &Peer::name)
      .def_fact("id", &Peer::id)
      .def_prop_ro("state", [](const Peer& p) { return to_string(p.state()); })
      .def_prop_ro("is_alive", &Peer::is_alive)
      .def_fact("rails", &Peer::rails)
      .def_prop_ro("why", [](const Peer& p) { return p.why().message(); });
  OwnedClass<Remote>(module, "TransferRemote")
      .def_fact("bytes", &Remote::bytes)
      .def_fact("access", &Remote::access)
      .def_fact("peer", &Remote::peer)
      .def_fact("is_staged", &Remote::is_staged)
      .def_prop_ro("is_revoked", &Remote::is_revoked);
  OwnedClass<Counter>(module, "TransferCounter")
      .def_new([] { return std::make_shared<Counter>(); })
      .def_prop_ro("finished", &Counter::finished)
      .def_prop_ro("failed", &Counter::failed)
      .def_prop_ro("first_failure", [](const Counter& c) { return outcome(c.first_failure()); });
  OwnedClass<ImmCounter>(module, "TransferImmCounter")
      .def_prop_ro("value", &ImmCounter::value)
      .def_fact("id", &ImmCounter::id);
  OwnedClass<Transfer>(module, "Transfer")
      .def_prop_ro("phase", [](const Transfer& t) { return to_string(t.phase()); })
      .def_fact("kind", [](const Transfer& t) { return to_string(t.kind()); })
      .def_prop_ro("is_finished", &Transfer::is_finished)
      .def_prop_ro("bytes", &Transfer::bytes)
      .def_prop_ro("bytes_done", &Transfer::bytes_done)
      .def_prop_ro("pieces", &Transfer::pieces_in_all)
      .def_prop_ro("pieces_done", &Transfer::pieces_done)
      .def_prop_ro("peer", &Transfer::peer)
      .def_prop_ro("outcome", [](const Transfer& t) { return outcome(t.status()); });
}

void bind_providers(nb::module_& module) {
  nb::class_<Provider>(module, "TransferProvider")
      .def_prop_ro("name", &Provider::name)
      .def("probe", [](Provider& p) {
        nb::list nics;
        for (const Nic& nic : released([&] { return p.probe(); })) nics.append(nic_dict(nic));
        return nics;
      });
  nb::class_<Loopback, Provider>(module, "TransferLoopback")
      .def(nb::new_([](uint32_t nics) {
             Loopback::Options options;
             options.nics = nics;
             return std::make_shared<Loopback>(options);
           }),
           "nics"_a)
      .def(
          "set_plan",
          [](Loopback& loopback, uint64_t seed, double drop, double duplicate, double reorder, double fail,
             double delay, uint64_t dies_after, bool spare_messages) {
            provider::FaultPlan plan;
            plan.seed = seed;
            plan.drop = drop;
            plan.duplicate = duplicate;
            plan.reorder = reorder;
            plan.fail = fail;
            plan.delay = delay;
            plan.dies_after = dies_after;
            plan.spare_messages = spare_messages;
            loopback.set_plan(plan);
          },
          "seed"_a, "drop"_a, "duplicate"_a, "reorder"_a, "fail"_a, "delay"_a, "dies_after"_a,
          "spare_messages"_a);
  // Of anything with a contiguous buffer, read-only ones too; whoever asks keeps it.
  module.def("buffer_address", [](nb::handle buffer) {
    Py_buffer view;
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    const auto address = reinterpret_cast<uint64_t>(view.buf);
    PyBuffer_Release(&view);
    return address;
  });
  module.def("transfer_provider_names", &provider::provider_names);
  module.def("offer_libfabric", &provider::fi::offer_library, "path"_a);
  // (path, release, whether it outlives the death of a peer)
  module.def("libfabric", [] {
    const provider::fi::Library& found = *value_or_throw(provider::fi::open_library());
    return nb::make_tuple(found.path, provider::fi::version_text(found), provider::fi::is_sound(found));
  });
  module.def("transfer_find_provider", [](const std::string& name) {
    return value_or_throw(released([&] { return provider::find_provider(name); }));
  });
}

std::shared_ptr<Engine> open_engine(std::shared_ptr<Provider> provider, const std::vector<std::string>& nics,
                                    const std::string& name, double timeout_s, double heartbeat_s,
                                    double peer_dead_s, bool has_worker, int worker_cpu,
                                    uint64_t shard_bytes_min, const std::optional<nb::bytes>& secret) {
  check(provider->check_owner());
  Options options;
  if (secret) options.secret.assign(secret->c_str(), secret->size());
  options.provider = provider;
  options.name = name;
  if (timeout_s > 0) options.timeout_s = timeout_s;
  if (heartbeat_s > 0) options.heartbeat_s = heartbeat_s;
  if (peer_dead_s > 0) options.peer_dead_s = peer_dead_s;
  options.has_worker = has_worker;
  options.worker_cpu = worker_cpu;
  options.shard_bytes_min = shard_bytes_min;
  return owned_or_throw(released([&]() -> Result<std::unique_ptr<Engine>> {
    const std::vector<Nic> all = provider->probe();
    for (const std::string& wanted : nics) {
      bool is_found = false;
      std::string known;
      for (const Nic& nic : all) {
        known += " " + nic.name + (nic.usable() ? "" : " (" + nic.unusable_because + ")");
        if (nic.name != wanted || !nic.usable()) continue;
        options.nics.push_back(nic);
        is_found = true;
        break;
      }
      if (!is_found)
        return Status::invalid("nics: got {}, allowed with {}:{}", wanted, provider->name(), known);
    }
    return Engine::open(std::move(options));
  }));
}

void bind_engine(nb::module_& module) {
  using Handle = std::shared_ptr<Transfer>;
  OwnedClass<Engine>(module, "TransferEngine")
      .def_fact("name", &Engine::name)
      .def_prop_ro("address", [](const Engine& e) { return to_python(e.address()); })
      .def_fact("nics",
                [](const Engine& e) {
                  nb::list nics;
                  for (const provider::Rail* rail : e.rails()) nics.append(nic_dict(rail->nic()));
                  return nics;
                })
      .def("expected_imms",
           [](const Engine& e, uint64_t pages, uint64_t bytes, uint32_t sender_rails) {
             RailPlan plan = e.rail_plan();
             if (sender_rails) plan.rails = sender_rails;
             return pages ? expected_page_imms(pages, bytes, plan) : expected_imms(bytes, plan);
           })
      .def("enroll",
           [](Engine& e, uint64_t address, uint64_t bytes, int device, uint32_t access) {
             provider::Range range{reinterpret_cast<void*>(address), bytes};
             range.device = device;
             if (device >= 0) range.kind = provider::MemoryKind::kCuda;
             return value_or_throw(released([&] { return e.enroll(range, access); }));
           })
      .def("describe",
           [](const Engine& e, const Memory& m) { return to_python(value_or_throw(e.describe(m))); })
      .def("unregister",
           [](Engine& e, const std::shared_ptr<Memory>& memory, double timeout_s) {
             check(released([&] { return e.unregister(memory, Deadline::after_s(timeout_s)); }));
           })
      .def("connect",
           [](Engine& e, const nb::bytes& address, double timeout_s) {
             const std::string bytes(view(address));
             return value_or_throw(released([&] { return e.connect(bytes, Deadline::after_s(timeout_s)); }));
           })
      .def("disconnect",
           [](Engine& e, const std::shared_ptr<Peer>& peer) {
             check(released([&] { return e.disconnect(peer); }));
           })
      .def("peers", [](Engine& e) { return released([&] { return e.peers(); }); })
      .def("attach",
           [](Engine& e, const nb::bytes& descriptor, double timeout_s) {
             const std::string bytes(view(descriptor));
             return value_or_throw(released([&] { return e.attach(bytes, Deadline::after_s(timeout_s)); }));
           })
      .def("write",
           [](Engine& e, std::shared_ptr<Memory> src, uint64_t src_offset, std::shared_ptr<Remote> dst,
              uint64_t dst_offset, uint64_t bytes, HowTuple how) {
             WriteRequest r{std::move(src), src_offset, std::move(dst), dst_offset, bytes, to_how(how)};
             return value_or_throw(released([&] { return e.write(std::move(r)); }));
           })
      .def("read",
           [](Engine& e, std::shared_ptr<Memory> dst, uint64_t dst_offset, std::shared_ptr<Remote> src,
              uint64_t src_offset, uint64_t bytes, HowTuple how) {
             ReadRequest r{std::move(dst), dst_offset, std::move(src), src_offset, bytes, to_how(how)};
             return value_or_throw(released([&] { return e.read(std::move(r)); }));
           })
      .def("paged",
           [](Engine& e, bool is_write, std::shared_ptr<Memory> local, PagesTuple local_pages,
              std::shared_ptr<Remote> remote, PagesTuple remote_pages, uint64_t page_bytes, HowTuple how) {
             PagedRequest r{std::move(local),  to_pages(local_pages),
                            std::move(remote), to_pages(remote_pages),
                            page_bytes,        to_how(how)};
             return value_or_throw(released(
                 [&] { return is_write ? e.write_pages(std::move(r)) : e.read_pages(std::move(r)); }));
           })
      .def("spread",
           [](Engine& e, bool is_write, std::shared_ptr<Memory> local,
              const std::vector<std::tuple<std::shared_ptr<Remote>, uint64_t, uint64_t, uint64_t>>& targets,
              HowTuple how) {
             ScatterRequest r{std::move(local), {}, to_how(how)};
             for (const auto& [remote, remote_offset, local_offset, bytes] : targets)
               r.targets.push_back({remote, remote_offset, local_offset, bytes});
             return value_or_throw(
                 released([&] { return is_write ? e.scatter(std::move(r)) : e.gather(std::move(r)); }));
           })
      .def("notify",
           [](Engine& e, const std::shared_ptr<Peer>& peer, HowTuple how) {
             How h = to_how(how);
             return value_or_throw(released([&] { return e.notify(peer, std::move(h)); }));
           })
      .def("send",
           [](Engine& e, const std::shared_ptr<Peer>& peer, std::shared_ptr<Memory> src, uint64_t offset,
              uint64_t bytes, HowTuple how) {
             How h = to_how(how);
             return value_or_throw(
                 released([&] { return e.send(peer, std::move(src), offset, bytes, std::move(h)); }));
           })
      .def(
          "recv",
          [](Engine& e, std::shared_ptr<Peer> peer, std::shared_ptr<Memory> dst, uint64_t offset,
             uint64_t bytes, HowTuple how) {
            How h = to_how(how);
            return value_or_throw(
                released([&] { return e.recv(peer, std::move(dst), offset, bytes, std::move(h)); }));
          },
          "peer"_a.none(), "dst"_a, "offset"_a, "bytes"_a, "how"_a)
      .def("imm_counter",
           [](Engine& e, const std::shared_ptr<Peer>& peer, uint32_t id) {
             return value_or_throw(released([&] { return e.imm_counter(peer, id); }));
           })
      .def("wait_imm",
           [](Engine& e, const std::shared_ptr<ImmCounter>& counter, uint64_t at_least, double timeout_s) {
             check(released([&] { return e.wait_imm(counter, at_least, Deadline::after_s(timeout_s)); }));
           })
      .def("on_imm",
           [](Engine& e, const std::shared_ptr<ImmCounter>& counter, uint64_t at_least, nb::object callback) {
             auto call = completion(std::move(callback));
             check(released([&] { return e.on_imm(counter, at_least, std::move(call)); }));
           })
      .def("barrier",
           [](Engine& e, const std::vector<std::shared_ptr<Peer>>& group, uint32_t id, double timeout_s) {
             check(released([&] { return e.barrier(group, id, Deadline::after_s(timeout_s)); }));
           })
      .def("wait",
           [](Engine& e, const Handle& transfer, double timeout_s) {
             check(released([&] { return e.wait(transfer, Deadline::after_s(timeout_s)); }));
           })
      .def("ends_within",  // whether it has ended, well or badly, when so many seconds have passed
           [](Engine& e, const Handle& transfer, double seconds) {
             static_cast<void>(released([&] { return e.wait(transfer, Deadline::after_s(seconds)); }));
             return transfer->is_finished();
           })
      .def("wait_counter",
           [](Engine& e, const std::shared_ptr<Counter>& counter, uint64_t finished, double timeout_s) {
             check(released([&] { return e.wait(*counter, finished, Deadline::after_s(timeout_s)); }));
           })
      .def("on_done",
           [](Engine& e, const Handle& transfer, nb::object callback) {
             auto call = completion(std::move(callback));
             released([&] { return e.on_done(transfer, std::move(call)), 0; });
           })
      .def("cancel",
           [](Engine& e, const Handle& transfer) {
             return to_string(released([&] { return e.cancel(transfer); }));
           })
      .def("progress", [](Engine& e) { released([&] { return e.progress(), 0; }); })
      .def("dump", [](const Engine& e) { return released([&] { return e.dump(); }); })
      .def("close", [](Engine& e) { released([&] { return e.close(), 0; }); });
  module.def("transfer_open", &open_engine, "provider"_a, "nics"_a, "name"_a, "timeout_s"_a, "heartbeat_s"_a,
             "peer_dead_s"_a, "has_worker"_a, "worker_cpu"_a, "shard_bytes_min"_a, "secret"_a = nb::none());
}

void bind_watcher(nb::module_& module) {
  OwnedClass<Watch>(module, "TransferWatch")
      .def_prop_ro("address", [](const Watch& w) { return reinterpret_cast<uint64_t>(w.address()); })
      .def_prop_ro("is_active", &Watch::is_active)
      .def("store", [](const Watch& w, uint64_t value) {  // what a kernel does, from the host
        std::atomic_ref<uint64_t>(*w.address()).store(value, std::memory_order_release);
      });
  OwnedClass<Watcher>(module, "TransferWatcher")
      .def_new(
          [](int device, int cpu) {
            return ended_by_owner(std::make_unique<Watcher>(Watcher::Options{device, cpu}));
          },
          "device"_a, "cpu"_a)
      .def("watch",
           [](Watcher& watcher, nb::object callback) {
             auto call = [callable = keep(std::move(callback))](uint64_t was, uint64_t is) {
               nb::gil_scoped_acquire gil;
               try {
                 return nb::cast<bool>((*callable)(was, is));
               } catch (nb::python_error& error) {
                 error.discard_as_unraisable("weft.transfer watch callback");
                 return false;
               }
             };
             return value_or_throw(released([&] { return watcher.watch(std::move(call)); }));
           })
      .def("release",
           [](Watcher& watcher, const std::shared_ptr<Watch>& watch) {
             released([&] { return watcher.release(watch), 0; });
           })
      .def("close", [](Watcher& watcher) { released([&] { return watcher.close(), 0; }); });
}

// Rails of GPUs know no compiler: this is where they get their kernel.
Status copy_stretches(int device, void* stream, const provider::Stretch* list, uint32_t count,
                      uint64_t longest_bytes) {
  static_assert(sizeof(provider::Stretch) == sizeof(PageCopy));
  return copy_pages(device, stream, reinterpret_cast<const PageCopy*>(list), count, longest_bytes);
}

}  // namespace

void bind_transfer(nb::module_& module) {
  provider::give_copy_kernel(prepare_copy_pages, copy_stretches);
  bind_handles(module);
  bind_providers(module);
  bind_engine(module);
  bind_watcher(module);
}

}  // namespace weft
