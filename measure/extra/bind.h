// SPDX-License-Identifier: Apache-2.0
//
// What this house adds to the Python extension: the module weft._core.measure.
#pragma once

namespace nanobind {
class module_;
}

namespace weft {

void bind_extra(nanobind::module_& module);

}  // namespace weft
