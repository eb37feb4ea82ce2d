// SPDX-License-Identifier: Apache-2.0
//
// One bind_*() per area, called by module.cc. check() turns a Status into weft.Error (or weft.PeerLost).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "base/status.h"
#include "comm/window.h"

namespace weft {

void bind_base(nanobind::module_& module);
void bind_collective(nanobind::module_& module);
void bind_elastic(nanobind::module_& module);
void bind_jit(nanobind::module_& module);
void bind_leases(nanobind::module_& module);
void bind_low_latency(nanobind::module_& module);
void bind_measure(nanobind::module_& module);
void bind_moe(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);
void bind_signature(nanobind::module_& module);
void bind_tally(nanobind::module_& module);
void bind_tensor_maker(nanobind::module_& module);
void bind_tensors(nanobind::module_& module);
void bind_transfer(nanobind::module_& module);

// "cpu" or "cuda:N"; throws for anything else.
Device parse_device(const std::string& name);

// Addresses cross as integers.
template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// Lets Python threads, the peers' in a test among them, run while a call waits for other ranks.
template <class Call>
auto without_gil(Call call) {
  nanobind::gil_scoped_release released;
  return call();
}

// uint8[bytes] of this rank's part of a window from `offset` on; `owner` lives as long as the view's memory
// is used.
using WindowArray = nanobind::ndarray<uint8_t, nanobind::ndim<1>>;
WindowArray view_of(const Window& window, uint64_t offset, uint64_t bytes, nanobind::object owner);

// Throws what weft.errors.from_core(code, message) returns, unless ok.
void check(const Status& status);

template <class T>
T value_or_throw(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

}  // namespace weft
