// SPDX-License-Identifier: Apache-2.0
//
// weft._core.LayoutPlan, DispatchPlan, RepeatPlan and CombinePlan: high-throughput calls of one signature. A call is one
// trip into the core, which makes what the call fills, fills it, and makes what its caller gets.
// weft/moe/high_throughput.py plans them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/dispatch_state.h"
#include "bind/receiving.h"
#include "bind/tensor_maker.h"
#include "bind/tensors.h"
#include "moe/buffer.h"

namespace nb = nanobind;

namespace weft {
namespace {

// What plans of all kinds have: the device's calls, an object of Python's that is kept.
class OfDevice {
 public:
  // reclaim: DeviceContext.reclaim_waiting; None: of a call that takes no room.
  explicit OfDevice(nb::object device, nb::object reclaim = nb::none())
      : device_(std::move(device)), of_(&nb::cast<const HighThroughput&>(device_)), reclaim_(reclaim) {}

 protected:
  const HighThroughput& by() const { return *of_; }
  MoeBuffer& core() const {
    MoeBuffer& core = of_->core();
    check(core.check_owner());
    return core;
  }
  const nb::object& device() const { return device_; }
  MoreRoom more_room() const {
    return [this] {
      const nb::gil_scoped_acquire held;
      return nb::cast<bool>(reclaim_());
    };
  }

 private:
  nb::object device_;
  const HighThroughput* of_;
  nb::object reclaim_;
};

class LayoutPlan : OfDevice {
 public:
  // make: i32[R], i32[experts] behind it, and u8[T][R].
  LayoutPlan(nb::object device, uint32_t id_bytes, uint32_t tokens, uint32_t top_k, uint32_t experts,
             nb::object make)
      : OfDevice(std::move(device)),
        args_{nullptr, tokens, top_k, id_bytes, 0, experts, 0, 0, nullptr, nullptr, nullptr},
        outputs_(std::move(make)) {}

  // Returns what make() names. sum_place: i32[T, R] to fill, by right-most slot; None.
  nb::tuple run(TensorAddress topk_idx, TensorAddress sum_place, uint64_t stream) const {
    MoeBuffer& buffer = core();
    nb::object out[3];
    outputs_.make(out);
    LayoutArgs args = args_;
    args.topk_idx = pointer<void>(topk_idx);
    args.counts = pointer<int32_t>(address_of(out[0]));
    args.token_in_rank = pointer<uint8_t>(address_of(out[2]));
    args.sum_place = pointer<int32_t>(sum_place);
    check(without_gil([&] { return buffer.layout(args, pointer<void>(stream)); }));
    return nb::make_tuple(out[0], out[1], out[2]);
  }

 private:
  LayoutArgs args_;
  Outputs outputs_;
};

// The rows that dispatches of one signature send.
struct RowsOfPlan {
  RowFormat format;
  bool keep_weights;  // of a slot whose expert is elsewhere; else 0 arrives
  bool has_global_scale;
};

// Dispatches along the routes of earlier ones.
class RepeatPlan : OfDevice {
 public:
  RepeatPlan(nb::object device, nb::object reclaim, const RowsOfPlan& rows)
      : OfDevice(std::move(device), std::move(reclaim)), rows_(rows) {}

  ReceivedRows run(nb::object x, nb::object scales, nb::object topk_idx, nb::object topk_weights,
                   const DispatchState& state, uint32_t num_sms, const Order& order) const {
    MoeBuffer& buffer = core();
    SentRows sent{std::move(x), std::move(scales), std::move(topk_idx), std::move(topk_weights),
                  rows_.has_global_scale};
    const DispatchCall call{sent.tensors(), rows_.format, state.core(),    rows_.keep_weights,
                            true,           num_sms,      order_of(order), more_room()};
    const Received received = value_or_throw(without_gil([&] { return buffer.dispatch(call); }));
    return {device(), received, std::move(sent), call.routes.rows};
  }

 private:
  RowsOfPlan rows_;
};

// What a dispatch along new routes is given.
struct NewRoutes {
  nb::object x, scales, topk_idx, topk_weights, token_in_rank, tokens_per_expert, tokens_per_rank, sum_place;
};

// Dispatches along new routes.
class DispatchPlan : OfDevice {
 public:
  struct What {
    RowsOfPlan rows;
    uint32_t tokens, experts;
    uint64_t worst_rows;  // above 0: so many rows come, and counts stay on the device
    int32_t alignment;    // counts are rounded up to multiples of it
  };
  struct Python {
    nb::object make_places;  // makes send_row, slot_base, prefix and routes of a DispatchState
    nb::object keep;         // (tensors): they stay until streams are done with the call
    nb::object handle_type;  // DispatchHandle
    int64_t handle_kind;     // the first of a handle's facts
    nb::object
        across_nodes;  // (state, sent, facts) -> a handle's entries where ranks do not all map each other
  };

  DispatchPlan(nb::object device, nb::object reclaim, const What& what, Python python)
      : OfDevice(std::move(device), std::move(reclaim)),
        what_(what),
        python_(std::move(python)),
        places_(python_.make_places) {}

  // most_tokens: no rank has more, the same on all ranks; 0: not known.
  // Returns: (ReceivedRows, DispatchState, slots of each local expert as multiples of the alignment: none with worst_rows).
  nb::tuple run(const NewRoutes& given, uint64_t most_tokens, uint32_t num_sms, const Order& order) const {
    Came came = dispatched(given, most_tokens, num_sms, order);
    return nb::make_tuple(std::move(came.rows), std::move(came.state), std::move(came.slots));
  }

  // Returns: (payload, ids, weights, slots as above, DispatchHandle).
  nb::tuple run_new(const NewRoutes& given, uint32_t num_sms, const Order& order) const {
    Came came = dispatched(given, 0, num_sms, order);
    const nb::object handle = handle_with(came.state, given.tokens_per_rank);
    return nb::make_tuple(came.rows.payload(), came.rows.ids(), came.rows.weights(), std::move(came.slots),
                          handle);
  }

 private:
  struct Came {
    ReceivedRows rows;
    nb::object state;
    std::vector<int32_t> slots;
  };

  Came dispatched(const NewRoutes& given, uint64_t most_tokens, uint32_t num_sms, const Order& order) const {
    MoeBuffer& buffer = core();
    nb::object places[4], records = nb::none();
    places_.make(places);
    const auto place = [&](size_t i) { return pointer<int32_t>(address_of(places[i])); };
    SentRows sent{given.x, given.scales, given.topk_idx, given.topk_weights, what_.rows.has_global_scale};
    const RoutePlaces routes{place(0), place(1), place(2), pointer<int32_t>(address_of(given.sum_place))};
    const NotifyTensors counts{pointer<uint8_t>(address_of(given.token_in_rank)),
                               pointer<int32_t>(address_of(given.tokens_per_expert))};
    const NewDispatchCall call{{counts,
                                what_.rows.format,
                                {routes, place(3), nullptr},
                                what_.tokens,
                                what_.experts,
                                what_.worst_rows,
                                order_of(order),
                                most_tokens},
                               sent.tensors(),
                               what_.rows.keep_weights,
                               num_sms,
                               more_room(),
                               [&](uint64_t words) {
                                 const nb::gil_scoped_acquire held;
                                 records = by().tensors().empty(std::array{words}, by().int32);
                                 return pointer<int32_t>(address_of(records));
                               }};
    Result<Dispatched> done = without_gil([&] { return buffer.dispatch_new(call); });
    // Counts are known, or awaited in vain, while the kernel still writes places.
    if (!done.ok())
      python_.keep(nb::make_tuple(given.x, given.scales, given.topk_idx, given.topk_weights,
                                  given.token_in_rank, given.tokens_per_expert, given.tokens_per_rank,
                                  given.sum_place, places[0], places[1], places[2], places[3], records));
    Dispatched came = value_or_throw(std::move(done));
    for (int32_t& slots : came.tokens_per_local_expert)
      slots = (slots + what_.alignment - 1) / what_.alignment * what_.alignment;
    ReceivedRows rows(device(), came.received, std::move(sent), came.routes.rows);
    DispatchState state({by().group_key, buffer.communicator()->rank(), came.routes.id, what_.experts,
                         what_.rows.format.top_k, what_.tokens, came.routes.rows, came.routes.staging_rows,
                         came.routes.counts_unknown},
                        {given.token_in_rank, places[0], places[1], places[2], rows.slot(), rows.token(),
                         given.sum_place, places[3], std::move(records)},
                        by().domains);
    return {std::move(rows), nb::cast(std::move(state)), std::move(came.tokens_per_local_expert)};
  }

  nb::object handle_with(const nb::object& state, const nb::object& tokens_per_rank) const {
    const auto& of = nb::cast<const DispatchState&>(state);
    const DispatchState::Sizes& sizes = of.sizes();
    std::vector<int64_t> facts{python_.handle_kind,
                               sizes.group_key,
                               sizes.rank,
                               static_cast<int64_t>(sizes.handle_id),
                               sizes.num_experts,
                               sizes.top_k,
                               static_cast<int64_t>(sizes.staging_rows),
                               sizes.counts_unknown ? 1 : 0};
    const auto ranks = static_cast<uint64_t>(by().core().communicator()->size());
    const std::array column{ranks, uint64_t{1}};
    const Allocator& tensors = by().tensors();
    const nb::object sent = tensors.part(tokens_per_rank, column, std::array<uint64_t, 2>{1, 1}, 0);
    if (of.records.is_none()) {
      const nb::object received = tensors.part(of.prefix, column, column, static_cast<uint64_t>(sizes.rank));
      const nb::object numbers = int64s(facts);
      const std::array<nb::handle, 9> entries{
          of.prefix,   sent,         received, of.token, of.is_token_in_rank,
          of.send_row, of.slot_base, of.slot,  numbers};
      return handle_of(python_.handle_type, state, entries);
    }
    for (const nb::object& each : {of.routes, of.records})
      facts.push_back(nb::cast<int64_t>(each.attr("numel")()));
    const nb::tuple made = nb::tuple(python_.across_nodes(state, sent, int64s(facts)));
    const std::vector<nb::handle> entries(made.begin(), made.end());
    return handle_of(python_.handle_type, state, entries);
  }

  nb::object int64s(const std::vector<int64_t>& words) const {
    const auto& host = nb::cast<const Allocator&>(by().host_allocator);
    const nb::object tensor = host.empty(std::array{uint64_t{words.size()}}, by().int64);
    std::copy(words.begin(), words.end(), pointer<int64_t>(address_of(tensor)));
    return tensor;
  }

  What what_;
  Python python_;
  Outputs places_;
};

class CombinePlan : OfDevice {
 public:
  // dtype: of x, of which a row has so many columns; element: the core's number of it.
  CombinePlan(nb::object device, nb::object reclaim, nb::object dtype, uint32_t columns, uint32_t row_bytes,
              int64_t element)
      : OfDevice(std::move(device), std::move(reclaim)),
        dtype_(std::move(dtype)),
        columns_(columns),
        row_bytes_(row_bytes),
        element_(element) {}

  // Returns: (sums [T, columns], f32[T, K] or None).
  nb::tuple run(TensorAddress x, nb::handle topk_weights, TensorAddress bias0, TensorAddress bias1,
                const DispatchState& state, uint32_t num_sms, const Order& order) const {
    MoeBuffer& buffer = core();
    const uint64_t tokens = state.sizes().num_tokens;
    const nb::object sums = by().tensors().empty(std::array{tokens, uint64_t{columns_}}, dtype_);
    nb::object weights = nb::none();
    uint32_t top_k = 0;
    if (!topk_weights.is_none()) {
      top_k = nb::cast<uint32_t>(topk_weights.attr("size")(1));
      weights = by().tensors().empty(std::array{tokens, uint64_t{top_k}}, topk_weights.attr("dtype"));
    }
    const CombineTensors tensors{pointer<std::byte>(x),
                                 pointer<float>(address_of(topk_weights)),
                                 pointer<int32_t>(state.slot_at()),
                                 {pointer<std::byte>(bias0), pointer<std::byte>(bias1)},
                                 pointer<std::byte>(address_of(sums)),
                                 pointer<float>(address_of(weights))};
    const CombineCall call{tensors,      row_bytes_, top_k,           element_,
                           state.core(), num_sms,    order_of(order), more_room()};
    check(without_gil([&] { return buffer.combine(call); }));
    return nb::make_tuple(sums, weights);
  }

 private:
  nb::object dtype_;
  uint32_t columns_, row_bytes_;
  int64_t element_;
};

void bind_dispatches(nb::module_& module) {
  nb::class_<RepeatPlan>(module, "RepeatPlan")
      .def(
          "__init__",
          [](RepeatPlan* self, nb::object device, nb::object reclaim, const RowFormat& format,
             bool keep_weights, bool has_global_scale) {
            new (self) RepeatPlan(device, reclaim, {format, keep_weights, has_global_scale});
          },
          nb::kw_only(), nb::arg("device"), nb::arg("reclaim"), nb::arg("format"), nb::arg("keep_weights"),
          nb::arg("has_global_scale"))
      .def("run", &RepeatPlan::run, nb::arg("x"), nb::arg("scales").none(), nb::arg("topk_idx").none(),
           nb::arg("topk_weights").none(), nb::arg("state"), nb::arg("num_sms"), nb::arg("order"));
  nb::class_<DispatchPlan>(module, "DispatchPlan")
      .def(
          "__init__",
          [](DispatchPlan* self, nb::object device, nb::object reclaim, const RowFormat& format,
             bool keep_weights, bool has_global_scale, uint32_t tokens, uint32_t experts, uint64_t worst_rows,
             int32_t alignment, nb::object make_places, nb::object keep, nb::object handle_type,
             int64_t handle_kind, nb::object across_nodes) {
            new (self) DispatchPlan(
                device, reclaim,
                {{format, keep_weights, has_global_scale}, tokens, experts, worst_rows, alignment},
                {make_places, keep, handle_type, handle_kind, across_nodes});
          },
          nb::kw_only(), nb::arg("device"), nb::arg("reclaim"), nb::arg("format"), nb::arg("keep_weights"),
          nb::arg("has_global_scale"), nb::arg("tokens"), nb::arg("experts"), nb::arg("worst_rows"),
          nb::arg("alignment"), nb::arg("make_places"), nb::arg("keep"), nb::arg("handle_type"),
          nb::arg("handle_kind"), nb::arg("across_nodes"))
      .def(
          "run",
          [](const DispatchPlan& self, nb::object x, nb::object scales, nb::object topk_idx,
             nb::object topk_weights, nb::object token_in_rank, nb::object tokens_per_expert,
             nb::object sum_place, uint64_t most_tokens, uint32_t num_sms, const Order& order) {
            return self.run(
                {x, scales, topk_idx, topk_weights, token_in_rank, tokens_per_expert, nb::none(), sum_place},
                most_tokens, num_sms, order);
          },
          nb::arg("x"), nb::arg("scales").none(), nb::arg("topk_idx").none(), nb::arg("topk_weights").none(),
          nb::arg("is_token_in_rank"), nb::arg("num_tokens_per_expert"), nb::arg("sum_place").none(),
          nb::arg("most_tokens"), nb::arg("num_sms"), nb::arg("order"))
      .def(
          "run_new",
          [](const DispatchPlan& self, nb::object x, nb::object scales, nb::object topk_idx,
             nb::object topk_weights, nb::object token_in_rank, nb::object tokens_per_expert,
             nb::object tokens_per_rank, uint32_t num_sms, const Order& order) {
            return self.run_new({x, scales, topk_idx, topk_weights, token_in_rank, tokens_per_expert,
                                 tokens_per_rank, nb::none()},
                                num_sms, order);
          },
          nb::arg("x"), nb::arg("scales").none(), nb::arg("topk_idx").none(), nb::arg("topk_weights").none(),
          nb::arg("is_token_in_rank"), nb::arg("num_tokens_per_expert"), nb::arg("num_tokens_per_rank"),
          nb::arg("num_sms"), nb::arg("order"));
}

}  // namespace

void bind_high_throughput(nb::module_& module) {
  nb::class_<LayoutPlan>(module, "LayoutPlan")
      .def(nb::init<nb::object, uint32_t, uint32_t, uint32_t, uint32_t, nb::object>(), nb::kw_only(),
           nb::arg("device"), nb::arg("id_bytes"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("experts"),
           nb::arg("make"))
      .def("run", &LayoutPlan::run, nb::arg("topk_idx"), nb::arg("sum_place"), nb::arg("stream"));
  bind_dispatches(module);
  nb::class_<CombinePlan>(module, "CombinePlan")
      .def(nb::init<nb::object, nb::object, nb::object, uint32_t, uint32_t, int64_t>(), nb::kw_only(),
           nb::arg("device"), nb::arg("reclaim"), nb::arg("dtype"), nb::arg("columns"), nb::arg("row_bytes"),
           nb::arg("element"))
      .def("run", &CombinePlan::run, nb::arg("x"), nb::arg("topk_weights").none(), nb::arg("bias0"),
           nb::arg("bias1"), nb::arg("state"), nb::arg("num_sms"), nb::arg("order"));
}

}  // namespace weft
