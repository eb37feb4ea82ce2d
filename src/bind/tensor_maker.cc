// SPDX-License-Identifier: Apache-2.0
#include "bind/tensor_maker.h"

#include "bind/bind.h"

namespace nb = nanobind;

namespace weft {

TensorMaker::TensorMaker(nb::object empty, nb::object part, size_t count, nb::list memory, nb::list parts,
                         nb::object current_device, nb::object device, nb::object otherwise)
    : empty_(std::move(empty)),
      part_(std::move(part)),
      count_(count),
      current_device_(std::move(current_device)),
      device_(std::move(device)),
      otherwise_(std::move(otherwise)) {
  for (nb::handle piece : memory) memory_.push_back({nb::cast<size_t>(piece[0]), nb::tuple(piece[1])});
  for (nb::handle piece : parts) parts_.push_back({nb::cast<size_t>(piece[0]), piece[1], piece[2], piece[3]});
}

template <class Set>
void TensorMaker::make_each(const Set& set) const {
  nb::object last;
  for (const Piece& piece : memory_) {
    last = made(PyObject_Call(empty_.ptr(), piece.arguments.ptr(), nullptr));
    if (piece.place < count_) set(piece.place, last);
  }
  for (const Part& part : parts_) {
    PyObject* const arguments[] = {last.ptr(), part.shape.ptr(), part.strides.ptr(), part.offset.ptr()};
    set(part.place, made(PyObject_Vectorcall(part_.ptr(), arguments, 4, nullptr)));
  }
}

bool TensorMaker::is_elsewhere() const {
  return !current_device_.is_none() && !current_device_().equal(device_);
}

void TensorMaker::make(nb::object* results) const {
  if (is_elsewhere()) {
    const nb::list others(otherwise_());
    for (size_t i = 0; i < count_; ++i) results[i] = others[i];
    return;
  }
  for (size_t i = 0; i < count_; ++i) results[i] = nb::none();
  make_each([&](size_t place, nb::object value) { results[place] = std::move(value); });
}

nb::list TensorMaker::list() const {
  if (is_elsewhere()) return nb::list(otherwise_());
  const nb::object list = made(PyList_New(static_cast<Py_ssize_t>(count_)));
  const auto set = [&](size_t place, nb::object value) {
    PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(place), value.release().ptr());
  };
  for (size_t i = 0; i < count_; ++i) set(i, nb::none());
  make_each(set);
  return nb::borrow<nb::list>(list);
}

void bind_tensor_maker(nb::module_& module) {
  nb::class_<TensorMaker>(module, "TensorMaker")
      .def(nb::init<nb::object, nb::object, size_t, nb::list, nb::list, nb::object, nb::object, nb::object>(),
           nb::arg("empty"), nb::arg("part"), nb::arg("count"), nb::arg("memory"), nb::arg("parts"),
           nb::arg("current_device").none(), nb::arg("device").none(), nb::arg("otherwise"))
      .def("__call__", &TensorMaker::list);
}

}  // namespace weft
