// SPDX-License-Identifier: Apache-2.0
//
// The Python module weft._core.measure: the loops of `weft bench channel` and `weft bench transfer`, and the exchange of
// `weft bench floor`.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>

#include "bind/bind.h"
#include "extra/bind.h"
#include "measure/loops/bind_loops.h"
#include "measure/loops/channel_loop.h"
#include "measure/loops/exchange_floor.h"
#include "measure/loops/fifo_load.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft {
namespace {

ChannelCall channel_call(const std::string& name) {
  static const std::map<std::string, ChannelCall> known = {{"put", ChannelCall::kPut},
                                                           {"put_with_signal", ChannelCall::kPutWithSignal},
                                                           {"signal", ChannelCall::kSignal},
                                                           {"add", ChannelCall::kAdd},
                                                           {"put_flush", ChannelCall::kPutFlush}};
  const auto found = known.find(name);
  if (found == known.end())
    check(Status::invalid("call: got '{}', allowed: put, put_with_signal, signal, add, put_flush", name));
  return found->second;
}

FloorWay floor_way(const std::string& name) {
  if (name == "stores") return FloorWay::kStores;
  if (name == "bulk") return FloorWay::kBulk;
  if (name != "lines") check(Status::invalid("way: got '{}', allowed: stores, bulk, lines", name));
  return FloorWay::kLines;
}

// A part of the window by name: see ExchangeFloor::places().
WindowArray floor_part(nb::handle_t<ExchangeFloor> self, const std::string& name) {
  const auto& floor = nb::cast<ExchangeFloor&>(self);
  const ExchangeFloorArgs& at = floor.places();
  const auto ranks = static_cast<uint64_t>(floor.window().communicator()->size());
  auto view = [&](uint64_t offset, uint64_t bytes) {
    return view_of(floor.window(), offset, bytes, nb::borrow(self));
  };
  if (name == "launches") return view(at.launches_at, uint64_t{kFloorBlocks} * 8);
  if (name == "stamps") return view(at.stamps_at, uint64_t{kFloorKept} * kFloorBlocks * sizeof(FloorStamp));
  if (name == "sources") return view(at.src_at, (ranks - 1) * at.stride);
  if (name == "received") return view(at.dst_at, ranks * at.stride);
  if (name != "lines")
    check(Status::invalid("part: got '{}', allowed: launches, stamps, sources, received, lines", name));
  return view(at.lines_at, 2 * ranks * at.line_stride);
}

void bind_floor(nb::module_& module) {
  OwnedClass<ExchangeFloor>(module, "ExchangeFloor")
      .def_static(
          "create",
          [](std::shared_ptr<Communicator> comm, uint64_t bytes) {
            return without_gil([&] { return owned_or_throw(ExchangeFloor::create(std::move(comm), bytes)); });
          },
          "communicator"_a, "bytes"_a)
      .def(
          "run",
          [](ExchangeFloor& self, const std::string& way, bool waits, uint64_t bytes, uint32_t peers,
             uint32_t blocks, uint64_t stream) {
            const FloorLoad load{floor_way(way), waits, bytes, peers, blocks};
            without_gil([&] { return check(self.run(load, pointer<void>(stream))), 0; });
          },
          "way"_a, "waits"_a, "bytes"_a, "peers"_a, "blocks"_a, "stream"_a)
      .def("check", [](const ExchangeFloor& self) { check(self.check()); })
      .def("part", &floor_part, "name"_a)
      .def_prop_ro("most_bytes", &ExchangeFloor::most_bytes)
      .def_prop_ro("most_line_bytes", &ExchangeFloor::most_line_bytes)
      .def_prop_ro("most_blocks", &ExchangeFloor::most_blocks);
  module.attr("FLOOR_KEPT") = kFloorKept;
  module.attr("FLOOR_BLOCKS") = kFloorBlocks;
}

void bind_channel_loop(nb::module_& module) {
  OwnedClass<ChannelLoop>(module, "ChannelLoop")
      .def_static(
          "create",
          [](std::shared_ptr<Communicator> comm, uint64_t bytes) {
            return without_gil([&] { return owned_or_throw(ChannelLoop::create(std::move(comm), bytes)); });
          },
          "communicator"_a, "bytes"_a)
      .def_prop_ro("added", [](const ChannelLoop& loop) { return value_or_throw(loop.added()); })
      .def(
          "run",
          [](ChannelLoop& self, const std::string& call, bool is_round_trip, uint64_t bytes, uint32_t count,
             uint32_t repeats) {
            const ChannelLoad load{channel_call(call),
                                   is_round_trip ? ChannelWay::kRoundTrip : ChannelWay::kOneWay, bytes, count,
                                   repeats};
            return without_gil([&] { return value_or_throw(self.run(load)); });
          },
          "call"_a, "is_round_trip"_a, "bytes"_a, "count"_a, "repeats"_a)
      .def(
          "sent",
          [](nb::handle_t<ChannelLoop> self, uint64_t bytes) {
            const auto& loop = nb::cast<ChannelLoop&>(self);
            return view_of(loop.window(), loop.src_at(), std::min(bytes, loop.room()), nb::borrow(self));
          },
          "bytes"_a)
      .def(
          "received",
          [](nb::handle_t<ChannelLoop> self, uint64_t bytes) {
            const auto& loop = nb::cast<ChannelLoop&>(self);
            return view_of(loop.window(), loop.dst_at(), std::min(bytes, loop.room()), nb::borrow(self));
          },
          "bytes"_a);
}

void bind_fifo_load(nb::module_& module) {
  module.def(
      "fifo_seconds",
      [](const std::string& device, uint32_t producers, uint64_t count, uint64_t capacity) {
        const Device on = parse_device(device);
        return without_gil([&] { return value_or_throw(measure_fifo(on, producers, count, capacity)); });
      },
      "device"_a, "producers"_a, "count"_a, "capacity"_a);
  // round_trip_us, push_to_pop_us, look_us
  module.def(
      "fifo_trips",
      [](const std::string& device, uint64_t count, uint64_t capacity) {
        const Device on = parse_device(device);
        const FifoTrips trips =
            without_gil([&] { return value_or_throw(measure_fifo_trips(on, count, capacity)); });
        return nb::make_tuple(trips.round_trip_us, trips.push_to_pop_us, trips.look_us);
      },
      "device"_a, "count"_a, "capacity"_a);
}

}  // namespace

void bind_extra(nb::module_& core) {
  nb::module_ module = core.def_submodule("measure");
  bind_floor(module);
  bind_channel_loop(module);
  bind_fifo_load(module);
  bind_transfer_loops(module);
}

}  // namespace weft
