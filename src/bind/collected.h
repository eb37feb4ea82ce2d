// SPDX-License-Identifier: Apache-2.0
//
// Tells Python's garbage collector which objects an object of a bound class holds.
//   using Slots = Collected<Hook, &Hook::tensors, &Hook::state>;
//   nb::class_<Hook>(module, "Hook", nb::type_slots(Slots::slots));
// forget() of a class, if there is one, is called before they are released.
#pragma once

#include <nanobind/nanobind.h>

namespace weft {

template <class T, nanobind::object T::*... held>
struct Collected {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nanobind::inst_ready(self)) return 0;
    const T& of = *nanobind::inst_ptr<T>(self);
    int stopped = 0;
    (void)((stopped = (of.*held).is_valid() ? visit((of.*held).ptr(), arg) : 0, stopped != 0) || ...);
    return stopped;
  }
  static int clear(PyObject* self) {
    T& of = *nanobind::inst_ptr<T>(self);
    if constexpr (requires { of.forget(); }) of.forget();
    ((of.*held = nanobind::none()), ...);
    return 0;
  }
  static inline PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                       {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                       {0, nullptr}};
};

}  // namespace weft
