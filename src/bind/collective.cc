// SPDX-License-Identifier: Apache-2.0
//
// CollectiveRunner for weft.collectives.executor: numbers and pointers, checked in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "bind/bind.h"
#include "collective/compiled.h"
#include "collective/runner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft {
namespace {

std::byte* pointer(uint64_t address) {
  return reinterpret_cast<std::byte*>(address);
}

std::vector<ChunkSpan> spans(const std::vector<std::array<uint64_t, 2>>& chunks, uint32_t element) {
  std::vector<ChunkSpan> spans;
  for (const auto& [first, length] : chunks) spans.push_back({first, length, element, 0});
  return spans;
}

ProgramText program_text(std::string name, const std::vector<std::array<int64_t, 6>>& blocks,
                         const std::vector<std::array<int64_t, 14>>& steps,
                         const std::vector<std::array<int64_t, 2>>& waits, uint32_t scratch_chunks,
                         bool refers_only) {
  ProgramText text;
  text.refers_only = refers_only;
  text.name = std::move(name);
  text.scratch_chunks = scratch_chunks;
  for (const auto& b : blocks)
    text.blocks.push_back({static_cast<int32_t>(b[0]), static_cast<int32_t>(b[1]),
                           static_cast<uint32_t>(b[2]), static_cast<uint32_t>(b[3]),
                           static_cast<uint32_t>(b[4]), static_cast<uint32_t>(b[5])});
  auto number = [](int64_t value) { return static_cast<uint32_t>(value); };
  for (const auto& s : steps)
    text.steps.push_back({number(s[0]), number(s[1]), number(s[2]), number(s[3]), number(s[4]), number(s[5]),
                          number(s[6]), number(s[7]), number(s[8]), number(s[9]), number(s[10]),
                          number(s[11]), number(s[12]), number(s[13])});
  for (const auto& w : waits) text.waits.push_back({number(w[0]), number(w[1]), 0});
  return text;
}

// Calls that differ in addresses and stream only, as Python sees them.
template <class Planned>
struct PlannedCalls {
  CollectiveRunner* runner;
  Planned planned;

  void run(uint64_t input, uint64_t output, uint64_t stream) const {
    check(runner->check_owner());
    nb::gil_scoped_release no_gil;
    check(runner->run(planned, pointer(input), pointer(output), pointer(stream)));
  }
};

using RunCalls = PlannedCalls<CollectiveRunner::PlannedRun>;
using ExchangeCalls = PlannedCalls<CollectiveRunner::PlannedExchange>;

}  // namespace

void bind_collective(nb::module_& module) {
  nb::class_<RunCalls>(module, "CollectiveRunCalls").def("run", &RunCalls::run);
  nb::class_<ExchangeCalls>(module, "CollectiveExchangeCalls").def("run", &ExchangeCalls::run);
  module.def(
      "program_source",
      [](const std::vector<std::array<int64_t, 6>>& blocks, const std::vector<std::array<int64_t, 14>>& steps,
         const std::vector<std::array<int64_t, 2>>& waits) {
        ProgramText text = program_text("", blocks, steps, waits, 0, false);
        for (ProgramWait& wait : text.waits) wait.steps = text.blocks.at(wait.block).steps;
        return program_source(text);
      },
      "blocks"_a, "steps"_a, "waits"_a, "The source of a program's own kernel: a KernelKey's prelude.");
  OwnedClass<CollectiveRunner>(module, "CollectiveRunner")
      .def_static(
          "create",
          [](std::shared_ptr<Communicator> comm, uint32_t channels, uint64_t simple_slot_bytes,
             uint64_t ll_slot_bytes, double timeout_s, uint64_t direct_bytes) {
            nb::gil_scoped_release no_gil;
            return owned_or_throw(CollectiveRunner::create(
                std::move(comm), {channels, simple_slot_bytes, ll_slot_bytes, timeout_s, direct_bytes}));
          },
          "communicator"_a, "channels"_a, "simple_slot_bytes"_a = 0, "ll_slot_bytes"_a = 0,
          "timeout_s"_a = 0.0, "direct_bytes"_a = 0)
      .def_fact("channels", &CollectiveRunner::channels)
      .def_fact("ring_slots", [](const CollectiveRunner&) { return kRingSlots; })
      .def(
          "payload_bytes",
          [](const CollectiveRunner& self, uint32_t protocol) {
            return self.payload_bytes(static_cast<Protocol>(protocol));
          },
          "protocol"_a)
      .def(
          "load",
          [](CollectiveRunner& self, std::string name, const std::vector<std::array<int64_t, 6>>& blocks,
             const std::vector<std::array<int64_t, 14>>& steps,
             const std::vector<std::array<int64_t, 2>>& waits, uint32_t scratch_chunks, bool refers_only,
             std::string call, int32_t root, bool is_reduction, uint64_t fingerprint, bool is_of_pairs) {
            ProgramText text =
                program_text(std::move(name), blocks, steps, waits, scratch_chunks, refers_only);
            text.call = std::move(call);
            text.root = root;
            text.is_reduction = is_reduction;
            text.fingerprint = fingerprint;
            text.is_of_pairs = is_of_pairs;
            return value_or_throw(self.load(std::move(text)));
          },
          "name"_a, "blocks"_a, "steps"_a, "waits"_a, "scratch_chunks"_a, "refers_only"_a, "call"_a, "root"_a,
          "is_reduction"_a, "fingerprint"_a, "is_of_pairs"_a)
      .def(
          "plan",
          [](CollectiveRunner& self, uint32_t program, uint32_t element, uint32_t reduction,
             uint32_t protocol, uint64_t part_elems, uint32_t per_part, bool has_exact_chunks,
             uint32_t slice_bytes, uint32_t num_sms, bool is_compiled, int32_t tag) {
            RunCall call{};
            call.program = program;
            call.element = static_cast<Element>(element);
            call.reduction = static_cast<Reduction>(reduction);
            call.protocol = static_cast<Protocol>(protocol);
            call.part_elems = part_elems;
            call.per_part = per_part;
            call.has_exact_chunks = has_exact_chunks;
            call.slice_bytes = slice_bytes;
            call.num_sms = num_sms;
            call.is_compiled = is_compiled;
            call.tag = tag;
            nb::gil_scoped_release no_gil;
            return RunCalls{&self, value_or_throw(self.plan(call))};
          },
          nb::keep_alive<0, 1>(), "program"_a, "element"_a, "reduction"_a, "protocol"_a, "part_elems"_a,
          "per_part"_a, "has_exact_chunks"_a, "slice_bytes"_a, "num_sms"_a, "is_compiled"_a = false,
          "tag"_a = 0)
      .def(
          "run_with_sizes",
          [](CollectiveRunner& self, uint32_t program, uint32_t element, uint32_t protocol, uint64_t input,
             uint64_t output, uint32_t per_part, const std::vector<std::array<uint64_t, 2>>& input_table,
             const std::vector<std::array<uint64_t, 2>>& output_table, uint64_t stream) {
            nb::gil_scoped_release no_gil;
            check(self.run({program, static_cast<Element>(element), Reduction::kSum,
                            static_cast<Protocol>(protocol), pointer(input), pointer(output), 0, per_part,
                            false, spans(input_table, element), spans(output_table, element), 0, 0,
                            pointer(stream)}));
          },
          "program"_a, "element"_a, "protocol"_a, "input"_a, "output"_a, "per_part"_a, "input_table"_a,
          "output_table"_a, "stream"_a)
      .def(
          "plan_exchange",
          [](CollectiveRunner& self, uint32_t kind, uint32_t element, uint32_t reduction, uint64_t part_elems,
             bool is_one_shot, uint32_t way, uint32_t num_sms, int32_t root) {
            nb::gil_scoped_release no_gil;
            return ExchangeCalls{
                &self, value_or_throw(self.plan(ExchangeCall{
                           static_cast<Exchange>(kind), static_cast<Element>(element),
                           static_cast<Reduction>(reduction), nullptr, nullptr, part_elems, is_one_shot,
                           static_cast<ExchangeWay>(way), num_sms, nullptr, root}))};
          },
          nb::keep_alive<0, 1>(), "kind"_a, "element"_a, "reduction"_a, "part_elems"_a, "is_one_shot"_a,
          "way"_a, "num_sms"_a, "root"_a = 0)
      .def(
          "delay_links",
          [](CollectiveRunner& self, const std::vector<std::array<double, 2>>& links) {
            std::vector<LinkDelay> delays;
            for (const auto& [latency_ns, ns_per_byte] : links)
              delays.push_back({static_cast<uint64_t>(latency_ns), ns_per_byte, 0});
            check(self.delay_links(std::move(delays)));
          },
          "links"_a)
      .def(
          "wait_for_sender",
          [](CollectiveRunner& self, int first) {
            nb::gil_scoped_release no_gil;
            return value_or_throw(self.wait_for_sender(first));
          },
          "first"_a)
      .def_prop_rw("timeout_s", &CollectiveRunner::timeout_s, &CollectiveRunner::set_timeout_s);
}

}  // namespace weft
