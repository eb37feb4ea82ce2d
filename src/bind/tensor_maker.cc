// SPDX-License-Identifier: Apache-2.0
#include "bind/tensor_maker.h"

#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind/bind.h"

namespace nb = nanobind;

namespace weft {
namespace {

nb::tuple tuple_of(std::span<const uint64_t> values) {
  const nb::object tuple = made(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; i < values.size(); ++i)
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromUnsignedLongLong(values[i]));
  return nb::borrow<nb::tuple>(tuple);
}

nb::tuple strides_in_order(std::span<const uint64_t> shape) {
  std::vector<uint64_t> strides(shape.size());
  uint64_t step = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = step;
    step *= std::max<uint64_t>(shape[axis], 1);
  }
  return tuple_of(strides);
}

}  // namespace

Allocator::Allocator(Functions torch, nb::object device, uint64_t large_bytes)
    : torch_(std::move(torch)), device_(std::move(device)), large_bytes_(large_bytes) {}

bool Allocator::is_large(const nb::tuple& shape, const nb::object& dtype) const {
  if (torch_.large.is_none()) return false;
  uint64_t bytes = nb::cast<uint64_t>(dtype.attr("itemsize"));
  for (nb::handle length : shape) bytes *= nb::cast<uint64_t>(length);
  return bytes >= large_bytes_;
}

nb::handle Allocator::small() const {
  const bool is_elsewhere = !torch_.current_device.is_none() && !torch_.current_device().equal(device_);
  return is_elsewhere ? torch_.elsewhere : torch_.empty;
}

nb::object Allocator::empty(std::span<const uint64_t> shape, const nb::object& dtype) const {
  const nb::tuple sizes = tuple_of(shape), strides = strides_in_order(shape);
  const nb::handle function = is_large(sizes, dtype) ? nb::handle(torch_.large) : small();
  PyObject* const arguments[] = {sizes.ptr(), strides.ptr(), dtype.ptr()};
  return made(PyObject_Vectorcall(function.ptr(), arguments, 3, nullptr));
}

nb::object Allocator::part(const nb::object& tensor, std::span<const uint64_t> shape,
                           std::span<const uint64_t> strides, uint64_t offset) const {
  const nb::tuple sizes = tuple_of(shape), steps = tuple_of(strides);
  const nb::object begin = made(PyLong_FromUnsignedLongLong(offset));
  PyObject* const arguments[] = {tensor.ptr(), sizes.ptr(), steps.ptr(), begin.ptr()};
  return made(PyObject_Vectorcall(torch_.part.ptr(), arguments, 4, nullptr));
}

TensorMaker::TensorMaker(nb::object allocator, size_t count, nb::list memory, nb::list parts)
    : allocator_(std::move(allocator)), by_(&nb::cast<const Allocator&>(allocator_)), count_(count) {
  for (nb::handle piece : memory) {
    const nb::tuple arguments(piece[1]);
    memory_.push_back({nb::cast<size_t>(piece[0]), arguments,
                       by_->is_large(nb::tuple(arguments[0]), nb::object(arguments[2]))});
  }
  for (nb::handle piece : parts) parts_.push_back({nb::cast<size_t>(piece[0]), piece[1], piece[2], piece[3]});
}

void TensorMaker::expect(size_t count) const {
  if (count != count_) throw nb::value_error("a maker of another number of tensors");
}

nb::list TensorMaker::list() const {
  const nb::object list = made(PyList_New(static_cast<Py_ssize_t>(count_)));
  const auto set = [&](size_t place, nb::object value) {
    PyList_SetItem(list.ptr(), static_cast<Py_ssize_t>(place), value.release().ptr());
  };
  for (size_t i = 0; i < count_; ++i) set(i, nb::none());
  make_each(set);
  return nb::borrow<nb::list>(list);
}

void bind_tensor_maker(nb::module_& module) {
  nb::class_<Allocator>(module, "Allocator")
      .def(
          "__init__",
          [](Allocator* self, nb::object empty, nb::object part, nb::object current_device,
             nb::object elsewhere, nb::object large, nb::object device, uint64_t large_bytes) {
            new (self) Allocator({std::move(empty), std::move(part), std::move(current_device),
                                  std::move(elsewhere), std::move(large)},
                                 std::move(device), large_bytes);
          },
          nb::kw_only(), nb::arg("empty"), nb::arg("part"), nb::arg("current_device").none(),
          nb::arg("elsewhere"), nb::arg("large").none(), nb::arg("device").none(), nb::arg("large_bytes"))
      .def(
          "empty",
          [](const Allocator& self, const std::vector<uint64_t>& shape, nb::object dtype) {
            return self.empty(shape, dtype);
          },
          nb::arg("shape"), nb::arg("dtype"), "A row-major tensor, for the stream that is current.");
  nb::class_<TensorMaker>(module, "TensorMaker")
      .def(nb::init<nb::object, size_t, nb::list, nb::list>(), nb::arg("allocator"), nb::arg("count"),
           nb::arg("memory"), nb::arg("parts"))
      .def("__call__", &TensorMaker::list);
}

}  // namespace weft
