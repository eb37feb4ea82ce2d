// SPDX-License-Identifier: Apache-2.0
#include "bind/dispatch_state.h"

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "bind/bind.h"
#include "bind/collected.h"

namespace nb = nanobind;

namespace weft {
namespace {

using SizesInOrder =
    std::tuple<int64_t, int64_t, uint64_t, uint32_t, uint32_t, uint32_t, uint64_t, uint64_t, bool>;

}  // namespace

DispatchState::DispatchState(const Sizes& sizes, Tensors tensors, nb::object domains)
    : is_token_in_rank(std::move(tensors.is_token_in_rank)),
      send_row(std::move(tensors.send_row)),
      slot_base(std::move(tensors.slot_base)),
      prefix(std::move(tensors.prefix)),
      slot(std::move(tensors.slot)),
      token(std::move(tensors.token)),
      sum_place(std::move(tensors.sum_place)),
      routes(std::move(tensors.routes)),
      records(std::move(tensors.records)),
      domains(std::move(domains)),
      sizes_(sizes),
      places_(places()) {}

// Of one that has lost its memory 0, which is no tensor's.
DispatchState::Places DispatchState::places() const {
  const nb::object* const tensors[] = {&send_row, &slot_base, &prefix, &slot, &sum_place, &routes, &records};
  Places places;
  std::transform(std::begin(tensors), std::end(tensors), places.begin(), [](const nb::object* tensor) {
    TensorAddress at;
    return read_address(tensor->ptr(), at) ? at.value : 0;
  });
  return places;
}

DispatchRoutes DispatchState::core() const {
  const auto at = [&](size_t i) { return reinterpret_cast<int32_t*>(places_[i]); };
  return {{{at(0), at(1), at(2), at(4)}, at(5), at(6)},
          sizes_.handle_id,
          sizes_.num_tokens,
          sizes_.num_experts,
          sizes_.num_rows,
          sizes_.staging_rows,
          sizes_.counts_unknown};
}

void bind_dispatch_state(nb::module_& module) {
  using Slots = Collected<DispatchState, &DispatchState::is_token_in_rank, &DispatchState::send_row,
                          &DispatchState::slot_base, &DispatchState::prefix, &DispatchState::slot,
                          &DispatchState::token, &DispatchState::sum_place, &DispatchState::routes,
                          &DispatchState::records, &DispatchState::domains>;
  nb::class_<DispatchState> state(module, "DispatchState", nb::type_slots(Slots::slots));
  // sizes, tensors: as in Sizes and Tensors.
  state.def(
      "__init__",
      [](DispatchState* self, const SizesInOrder& sizes, const nb::tuple& tensors, nb::tuple domains) {
        const auto of = [&](size_t i) { return nb::object(tensors[i]); };
        new (self) DispatchState(
            std::apply([](auto... each) { return DispatchState::Sizes{each...}; }, sizes),
            {of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8)}, std::move(domains));
      },
      nb::arg("sizes"), nb::arg("tensors"), nb::arg("domains") = nb::make_tuple());
  // A copy is of the copies of its tensors, and of where those are.
  state.def("__reduce__", [](nb::handle self) {
    const auto& of = nb::cast<const DispatchState&>(self);
    const auto& [group_key, rank, id, experts, top_k, tokens, rows, staging_rows, unknown] = of.sizes();
    const nb::object sizes =
        nb::make_tuple(group_key, rank, id, experts, top_k, tokens, rows, staging_rows, unknown);
    const nb::object tensors = nb::make_tuple(of.is_token_in_rank, of.send_row, of.slot_base, of.prefix,
                                              of.slot, of.token, of.sum_place, of.routes, of.records);
    return nb::make_tuple(self.type(), nb::make_tuple(sizes, tensors, of.domains));
  });
  const auto def_size = [&](const char* name, auto DispatchState::Sizes::* size) {
    state.def_prop_ro(name, [size](const DispatchState& self) { return self.sizes().*size; });
  };
  def_size("group_key", &DispatchState::Sizes::group_key);
  def_size("rank", &DispatchState::Sizes::rank);
  def_size("handle_id", &DispatchState::Sizes::handle_id);
  def_size("top_k", &DispatchState::Sizes::top_k);
  def_size("num_tokens", &DispatchState::Sizes::num_tokens);
  def_size("num_rows", &DispatchState::Sizes::num_rows);
  def_size("staging_rows", &DispatchState::Sizes::staging_rows);
  state.def_ro("is_token_in_rank", &DispatchState::is_token_in_rank)
      .def_ro("send_row", &DispatchState::send_row)
      .def_ro("slot_base", &DispatchState::slot_base)
      .def_ro("prefix", &DispatchState::prefix)
      .def_ro("slot", &DispatchState::slot)
      .def_ro("token", &DispatchState::token)
      .def_ro("sum_place", &DispatchState::sum_place)
      .def_ro("routes", &DispatchState::routes)
      .def_ro("records", &DispatchState::records)
      .def_ro("domains", &DispatchState::domains)
      .def_prop_ro("is_in_place", &DispatchState::is_in_place);
}

}  // namespace weft
