// SPDX-License-Identifier: Apache-2.0
//
// weft._core.DispatchState: the routes of one high-throughput dispatch. It is immutable. Repeats and combines read it
// of a handle (weft/moe/handle.py).
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

#include "bind/tensors.h"
#include "moe/buffer.h"

namespace weft {

class DispatchState {
 public:
  struct Sizes {
    int64_t group_key;  // of the ranks and their devices
    int64_t rank;
    uint64_t handle_id;  // which dispatch this is, on all of them
    uint32_t num_experts;
    uint32_t top_k;  // 0 where no expert ids travelled
    uint32_t num_tokens;
    uint64_t num_rows;
    uint64_t staging_rows;
    bool counts_unknown;
  };
  // R ranks, T tokens sent from here, N rows received here. All are on the device of the dispatch.
  struct Tensors {
    nanobind::object is_token_in_rank;  // bool[T, R]
    nanobind::object send_row;          // i32[T, R]: a token's place among the rows for a rank, or -1
    nanobind::object slot_base;         // i32[T]: its first place in the staging of combine
    nanobind::object prefix;            // i32[R, R]: rows that rank j gets from ranks 0..i
    nanobind::object slot;              // i32[N]: a received row's place in its owner's staging
    nanobind::object token;             // i32[N]: its row at its source
    nanobind::object sum_place;         // i32[T, R]: when combine adds a rank's row; None: ranks ascending
    // What else the core keeps where ranks do not all map each other, i32[...]; else None.
    nanobind::object routes, records;
  };

  // domains: a tuple of the domain of each rank, where there are several; else ().
  DispatchState(const Sizes& sizes, Tensors tensors, nanobind::object domains);

  const Sizes& sizes() const { return sizes_; }
  // All of it that the core goes by: right as long as is_in_place().
  DispatchRoutes core() const;
  TensorAddress slot_at() const { return {places_[3]}; }
  // Whether the tensors that calls with the handle read are where they were at first.
  bool is_in_place() const { return places() == places_; }

  nanobind::object is_token_in_rank, send_row, slot_base, prefix, slot, token, sum_place, routes, records;
  nanobind::object domains;

 private:
  using Places = std::array<uint64_t, 7>;
  Places places() const;

  Sizes sizes_;
  Places places_;
};

void bind_dispatch_state(nanobind::module_& module);

}  // namespace weft
