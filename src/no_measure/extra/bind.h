// SPDX-License-Identifier: Apache-2.0
//
// What a build adds to the Python extension: nothing in this one. See settings.h.
#pragma once

namespace nanobind {
class module_;
}

namespace weft {

inline void bind_extra(nanobind::module_&) {}

}  // namespace weft
