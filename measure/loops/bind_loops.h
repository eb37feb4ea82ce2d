// SPDX-License-Identifier: Apache-2.0
//
// Adds the loops to a Python module; bind.cc makes it.
#pragma once

#include <nanobind/nanobind.h>

namespace weft {

void bind_transfer_loops(nanobind::module_& module);

}  // namespace weft
