// SPDX-License-Identifier: Apache-2.0
//
// weft._core.DispatchForm: high-throughput dispatches along new routes, each in one trip into the core, with what its
// caller gets. weft/moe/high_throughput.py and handle.py say what that is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/receiving.h"
#include "bind/tensors.h"

namespace nb = nanobind;

namespace weft {
namespace {

// Names of DispatchState's fields, and of what it works out of them.
struct StateNames {
  static nb::object interned(const char* name) { return made(PyUnicode_InternFromString(name)); }

  nb::object handle_id = interned("handle_id"), num_rows = interned("num_rows"),
             staging_rows = interned("staging_rows"), counts_unknown = interned("counts_unknown"),
             is_token_in_rank = interned("is_token_in_rank"), send_row = interned("send_row"),
             slot_base = interned("slot_base"), prefix = interned("prefix"), slot = interned("slot"),
             token = interned("token"), sum_place = interned("sum_place"), routes = interned("routes"),
             records = interned("records"), core = interned("core"), kept = interned("kept"),
             places = interned("places"), dict = interned("__dict__"), state = interned("state");

  static const StateNames& get() {
    static const auto* const once = new StateNames;
    return *once;
  }
};

void set(const nb::dict& into, const nb::object& name, nb::handle value) {
  if (PyDict_SetItem(into.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
}

void set_attribute(const nb::object& of, const nb::object& name, nb::handle value) {
  if (PyObject_SetAttr(of.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
}

// A tuple of what is not None.
nb::object without_none(std::initializer_list<nb::handle> values) {
  Py_ssize_t count = 0;
  for (nb::handle value : values) count += value.is_none() ? 0 : 1;
  const nb::object kept = made(PyTuple_New(count));
  Py_ssize_t place = 0;
  for (nb::handle value : values)
    if (!value.is_none()) PyTuple_SetItem(kept.ptr(), place++, nb::borrow(value).release().ptr());
  return kept;
}

nb::object int64s(nb::handle empty_words, const std::vector<int64_t>& words) {
  const nb::object tensor = empty_words(words.size());
  std::copy(words.begin(), words.end(), pointer<int64_t>(address_of(tensor)));
  return tensor;
}

// What a call along new routes goes by, beside its form.
struct Routes {
  nb::object x, scales, topk_idx, topk_weights, token_in_rank, tokens_per_expert, sum_place;
  // [send_row, slot_base, prefix, routes], to be filled. Records of a call among nodes follow behind them.
  nb::list places;
};

// What such dispatches of so many tokens and experts, in one format, share.
class DispatchForm {
 public:
  struct Python {
    nb::object state_type;   // DispatchState
    nb::object handle_type;  // DispatchHandle
    nb::object part;         // weft.runtime.allocation.part_of
    nb::object empty_words;  // (count) -> i64[count] on the CPU
    // (state, sent, facts) -> a handle's entries where ranks do not all map each other.
    nb::object across_nodes;
  };
  struct Facts {
    Facts(int64_t kind, nb::dict alike)
        : kind(kind),
          group_key(nb::cast<int64_t>(nb::object(alike["group_key"]))),
          rank(nb::cast<int64_t>(nb::object(alike["rank"]))),
          of_state(std::move(alike)) {}

    int64_t kind, group_key, rank;  // of a handle
    nb::dict of_state;              // the fields of a state that all calls have alike
  };

  DispatchForm(nb::object receiving, const RowFormat& format, uint32_t tokens, uint32_t experts,
               bool keep_weights, bool has_global_scale, Facts facts, Python python)
      : receiving_(std::move(receiving)),
        format_(format),
        tokens_(tokens),
        experts_(experts),
        keep_weights_(keep_weights),
        has_global_scale_(has_global_scale),
        facts_(std::move(facts)),
        python_(std::move(python)) {}

  // Returns: (ReceivedRows, DispatchState, slots of each local expert: none with worst_rows).
  nb::tuple run(Routes routes, uint64_t worst_rows, uint64_t most_tokens, uint32_t num_sms,
                const Order& order, nb::handle reclaim) const {
    Dispatched came = dispatched(routes, worst_rows, most_tokens, num_sms, order, reclaim);
    ReceivedRows received = received_by(routes, came);
    const nb::object state = state_of(came.handle, received, routes);
    return nb::make_tuple(std::move(received), state, std::move(came.tokens_per_local_expert));
  }

  // Returns: (payload, ids, weights, slots of each local expert as multiples of `alignment`, DispatchHandle).
  nb::tuple run_whole(Routes routes, const nb::object& tokens_per_rank, uint64_t worst_rows,
                      int32_t alignment, uint32_t num_sms, const Order& order, nb::handle reclaim) const {
    Dispatched came = dispatched(routes, worst_rows, 0, num_sms, order, reclaim);
    for (int32_t& slots : came.tokens_per_local_expert)
      slots = (slots + alignment - 1) / alignment * alignment;
    ReceivedRows received = received_by(routes, came);
    const nb::object state = state_of(came.handle, received, routes);
    const nb::object handle = handle_of(came.handle, state, routes, tokens_per_rank, received);
    return nb::make_tuple(received.payload(), received.ids(), received.weights(),
                          std::move(came.tokens_per_local_expert), handle);
  }

 private:
  Dispatched dispatched(Routes& routes, uint64_t worst_rows, uint64_t most_tokens, uint32_t num_sms,
                        const Order& order, nb::handle reclaim) const {
    check(by().core().check_owner());
    const auto place = [&](size_t i) { return pointer<int32_t>(address_of(routes.places[i])); };
    const RoutePlaces places{place(0), place(1), place(2), pointer<int32_t>(address_of(routes.sum_place))};
    const NotifyTensors counts{pointer<uint8_t>(address_of(routes.token_in_rank)),
                               pointer<int32_t>(address_of(routes.tokens_per_expert))};
    const NewDispatchCall call{{counts,
                                format_,
                                {places, place(3), nullptr},
                                tokens_,
                                experts_,
                                worst_rows,
                                order_of(order),
                                most_tokens},
                               sent(routes).tensors(),
                               keep_weights_,
                               num_sms,
                               more_room_by(reclaim),
                               [&](uint64_t words) { return new_records(routes.places, words); }};
    MoeBuffer& core = by().core();
    return value_or_throw(without_gil([&] { return core.dispatch_new(call); }));
  }

  SentRows sent(const Routes& routes) const {
    return {routes.x, routes.scales, routes.topk_idx, routes.topk_weights, has_global_scale_};
  }
  ReceivedRows received_by(const Routes& routes, const Dispatched& came) const {
    return {receiving_, came.received, sent(routes), came.handle.rows};
  }
  const Receiving& by() const { return nb::cast<const Receiving&>(receiving_); }

  int32_t* new_records(nb::list& places, uint64_t words) const {
    const nb::gil_scoped_acquire held;
    const nb::object records = by().empty(nb::make_tuple(words), by().int32);
    places.append(records);
    return pointer<int32_t>(address_of(records));
  }

  // Without a call of its constructor, which would work out what is known here.
  nb::object state_of(const DispatchHandle& handle, ReceivedRows& received, const Routes& routes) const {
    const StateNames& name = StateNames::get();
    const nb::object send_row = routes.places[0], slot_base = routes.places[1], prefix = routes.places[2],
                     node_routes = routes.places[3], slot = received.slot();
    const nb::object records = routes.places.size() > 4 ? nb::object(routes.places[4]) : nb::none();
    const nb::object kept =
        without_none({send_row, slot_base, prefix, slot, routes.sum_place, node_routes, records});
    const nb::dict fields = nb::steal<nb::dict>(made(PyDict_Copy(facts_.of_state.ptr())).release());
    set(fields, name.handle_id, nb::int_(handle.id));
    set(fields, name.num_rows, nb::int_(handle.rows));
    set(fields, name.staging_rows, nb::int_(handle.staging_rows));
    set(fields, name.counts_unknown, nb::bool_(handle.counts_unknown));
    set(fields, name.is_token_in_rank, routes.token_in_rank);
    set(fields, name.send_row, send_row);
    set(fields, name.slot_base, slot_base);
    set(fields, name.prefix, prefix);
    set(fields, name.slot, slot);
    set(fields, name.token, received.token());
    set(fields, name.sum_place, routes.sum_place);
    set(fields, name.routes, node_routes);
    set(fields, name.records, records);
    set(fields, name.core, nb::cast(handle));
    set(fields, name.kept, kept);
    set(fields, name.places, addresses_of(kept));
    const nb::object state = bare(python_.state_type, 0);
    set_attribute(state, name.dict, fields);
    return state;
  }

  nb::object handle_of(const DispatchHandle& of, const nb::object& state, const Routes& routes,
                       const nb::object& tokens_per_rank, ReceivedRows& received) const {
    std::vector<int64_t> facts{facts_.kind,
                               facts_.group_key,
                               facts_.rank,
                               static_cast<int64_t>(of.id),
                               experts_,
                               format_.top_k,
                               static_cast<int64_t>(of.staging_rows),
                               of.counts_unknown ? 1 : 0};
    const nb::object prefix = routes.places[2];
    const nb::object shape = nb::make_tuple(by().core().communicator()->size(), 1);
    const nb::object sent = python_.part(tokens_per_rank, 0, shape);
    nb::object entries;
    if (routes.places.size() == 4) {
      const nb::object column = python_.part(prefix, facts_.rank, shape, nb::make_tuple(shape[0], 1));
      entries = nb::make_tuple(prefix, sent, column, received.token(), routes.token_in_rank, routes.places[0],
                               routes.places[1], received.slot(), int64s(python_.empty_words, facts));
    } else {
      for (size_t i : {3, 4}) facts.push_back(nb::cast<int64_t>(routes.places[i].attr("numel")()));
      entries = python_.across_nodes(state, sent, int64s(python_.empty_words, facts));
    }
    const Py_ssize_t count = PyTuple_Size(entries.ptr());
    const nb::object handle = bare(python_.handle_type, count);
    for (Py_ssize_t i = 0; i < count; ++i)
      PyTuple_SetItem(handle.ptr(), i, nb::object(entries[i]).release().ptr());
    set_attribute(handle, StateNames::get().state, state);
    return handle;
  }

  nb::object receiving_;
  RowFormat format_;
  uint32_t tokens_, experts_;
  bool keep_weights_;  // of a slot whose expert is elsewhere; else 0 arrives
  bool has_global_scale_;
  Facts facts_;
  Python python_;
};

}  // namespace

void bind_dispatch_form(nb::module_& module) {
  nb::class_<DispatchForm>(module, "DispatchForm")
      .def(
          "__init__",
          [](DispatchForm* self, nb::object receiving, const RowFormat& format, uint32_t tokens,
             uint32_t experts, bool keep_weights, bool has_global_scale, int64_t kind, nb::dict facts,
             nb::object state_type, nb::object handle_type, nb::object part, nb::object empty_words,
             nb::object across_nodes) {
            new (self)
                DispatchForm(receiving, format, tokens, experts, keep_weights, has_global_scale,
                             {kind, facts}, {state_type, handle_type, part, empty_words, across_nodes});
          },
          nb::kw_only(), nb::arg("receiving"), nb::arg("format"), nb::arg("tokens"), nb::arg("experts"),
          nb::arg("keep_weights"), nb::arg("has_global_scale"), nb::arg("kind"), nb::arg("facts"),
          nb::arg("state_type"), nb::arg("handle_type"), nb::arg("part"), nb::arg("empty_words"),
          nb::arg("across_nodes"))
      .def(
          "run",
          [](const DispatchForm& self, nb::object x, nb::object scales, nb::object topk_idx,
             nb::object topk_weights, nb::object token_in_rank, nb::object tokens_per_expert,
             nb::object sum_place, nb::list places, uint64_t worst_rows, uint64_t most_tokens,
             uint32_t num_sms, const Order& order, nb::handle reclaim) {
            return self.run(
                {x, scales, topk_idx, topk_weights, token_in_rank, tokens_per_expert, sum_place, places},
                worst_rows, most_tokens, num_sms, order, reclaim);
          },
          nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
          nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def(
          "run_whole",
          [](const DispatchForm& self, nb::object x, nb::object scales, nb::object topk_idx,
             nb::object topk_weights, nb::object token_in_rank, nb::object tokens_per_expert,
             nb::object tokens_per_rank, nb::list places, uint64_t worst_rows, int32_t alignment,
             uint32_t num_sms, const Order& order, nb::handle reclaim) {
            return self.run_whole(
                {x, scales, topk_idx, topk_weights, token_in_rank, tokens_per_expert, nb::none(), places},
                tokens_per_rank, worst_rows, alignment, num_sms, order, reclaim);
          },
          nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
}

}  // namespace weft
