// SPDX-License-Identifier: Apache-2.0
#include "bind/signature.h"

#include <nanobind/ndarray.h>

#include <cstring>

#include "bind/bind.h"

namespace nb = nanobind;

namespace weft {
namespace {

constexpr uint64_t kRowAlignmentBytes = 16;  // arguments.ROW_ALIGNMENT_BYTES

nb::bytes signature_of(nb::tuple tensors, nb::args options) {
  Signature signature;
  TensorAddress unused;
  for (nb::handle value : tensors)
    if (!signature.add_tensor(value, unused)) return nb::bytes("", 0);
  for (nb::handle value : options)
    if (!signature.add_option(value)) return nb::bytes("", 0);
  return signature.bytes();
}

// Returns None for a call that has to be checked.
nb::object find_plan(nb::dict plans, nb::tuple tensors, nb::args options) {
  Signature signature;
  TensorAddress unused;
  for (nb::handle value : tensors)
    if (!signature.add_tensor(value, unused)) return nb::none();
  for (nb::handle value : options)
    if (!signature.add_option(value)) return nb::none();
  nb::object plan = signature.found_in(plans);
  return plan.is_valid() ? plan : nb::none();
}

}  // namespace

bool Signature::add(const void* from, size_t bytes) {
  if (bytes > kMostBytes - size_) return false;
  std::memcpy(bytes_ + size_, from, bytes);
  size_ += bytes;
  return true;
}

bool Signature::add_tensor(nb::handle value, TensorAddress& address) {
  if (value.is_none()) {
    address.value = 0;
    return add('-');
  }
  nb::dlpack::dltensor tensor;
  if (!describe_plain(value, tensor) ||
      tensor.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Complex))
    return false;
  address = TensorAddress::of(address_in(tensor));
  const bool is_aligned = address.value % kRowAlignmentBytes == 0;
  const uint8_t head[] = {static_cast<uint8_t>(is_aligned ? 't' : 'u'),
                          tensor.dtype.code,
                          tensor.dtype.bits,
                          static_cast<uint8_t>(tensor.device.device_type),
                          static_cast<uint8_t>(tensor.device.device_id),
                          static_cast<uint8_t>(tensor.ndim)};
  if (tensor.device.device_id < 0 || tensor.device.device_id > UINT8_MAX || tensor.ndim > UINT8_MAX)
    return false;
  return add(head, sizeof head) && add(tensor.shape, sizeof(int64_t) * static_cast<size_t>(tensor.ndim));
}

bool Signature::add_option(nb::handle value) {
  if (value.is_none()) return add('-');
  if (PyBool_Check(value.ptr())) return add(value.ptr() == Py_True ? 'y' : 'n');
  if (PyLong_CheckExact(value.ptr())) {
    const int64_t number = PyLong_AsLongLong(value.ptr());
    const bool fits = !PyErr_Occurred();
    PyErr_Clear();
    return fits && add('i') && add(number);
  }
  if (PyTuple_CheckExact(value.ptr())) {
    if (!add('(')) return false;
    for (nb::handle each : nb::borrow<nb::tuple>(value))
      if (!add_option(each)) return false;
    return add(')');
  }
  if (PyUnicode_CheckExact(value.ptr())) {
    Py_ssize_t bytes = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(value.ptr(), &bytes);
    if (!text) PyErr_Clear();  // of what has no UTF-8
    return text && add('s') && add(bytes) && add(text, static_cast<size_t>(bytes));
  }
  if (!PyBytes_CheckExact(value.ptr())) return false;
  const nb::bytes text = nb::borrow<nb::bytes>(value);
  return add('b') && add(text.size()) && add(text.c_str(), text.size());
}

nb::object Signature::found_in(nb::handle plans) const {
  PyObject* const plan = PyDict_GetItemWithError(plans.ptr(), bytes().ptr());
  if (!plan && PyErr_Occurred()) throw nb::python_error();
  return nb::borrow(plan);
}

void bind_signature(nb::module_& module) {
  module.def("signature_of", &signature_of, nb::arg("tensors"), nb::arg("options"));
  module.def("find_plan", &find_plan, nb::arg("plans"), nb::arg("tensors"), nb::arg("options"));
}

}  // namespace weft
