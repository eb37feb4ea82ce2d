// SPDX-License-Identifier: Apache-2.0
//
// One bind_*() per area, called by module.cc. check() turns a Status into weft.Error (or weft.PeerLost).
#pragma once

#include <nanobind/nanobind.h>

#include "base/status.h"

namespace weft {

void bind_base(nanobind::module_& module);
void bind_collective(nanobind::module_& module);
void bind_jit(nanobind::module_& module);
void bind_low_latency(nanobind::module_& module);
void bind_moe(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);
void bind_transfer(nanobind::module_& module);

// Throws what weft.errors.from_core(code, message) returns, unless ok.
void check(const Status& status);

template <class T>
T value_or_throw(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

}  // namespace weft
