// SPDX-License-Identifier: Apache-2.0
//
// weft._core.plain_address: weft/runtime/plain.py says what it returns, and asks tensors one property at a time where this
// cannot be had. Torch describes a tensor to C programs by DLPack's exchange of tensors (torch 2.10 and newer): one call
// instead of eight. https://dmlc.github.io/dlpack/latest/c_api.html
#include "bind/tensors.h"

#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "bind/bind.h"

namespace nb = nanobind;

namespace weft {
namespace {

// Version 1 of the table that types of tensors point to, as far as it is used here.
struct ExchangeTable {
  uint32_t major, minor;
  const ExchangeTable* older;
  void* unused[3];
  int (*describe)(void* object, nb::dlpack::dltensor* description);
};

const ExchangeTable* torch_table = nullptr;
std::vector<PyObject*> plain_types;  // which live as long as the process

bool is_plain_type(PyObject* value) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  for (const PyObject* plain : plain_types)
    if (plain == type) return true;
  return false;
}

bool is_contiguous(const nb::dlpack::dltensor& tensor) {
  int64_t step = 1;
  for (int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != step) return false;
    step *= tensor.shape[axis];
  }
  return true;
}

uint64_t bytes_of(const nb::dlpack::dltensor& tensor) {
  uint64_t elements = 1;
  for (int32_t axis = 0; axis < tensor.ndim; ++axis) elements *= static_cast<uint64_t>(tensor.shape[axis]);
  return elements * ((uint64_t{tensor.dtype.bits} * tensor.dtype.lanes + 7) / 8);
}

// What a method without arguments returns; null, with an error set, where it raises.
PyObject* call_method(PyObject* object, PyObject* method) noexcept {
  PyObject* const arguments[] = {object};
  return PyObject_VectorcallMethod(method, arguments, 1, nullptr);
}

nb::object asked(nb::handle object, nb::handle method) {
  return nb::steal(call_method(object.ptr(), method.ptr()));
}

uint64_t number_of(nb::handle value) {
  return value.is_valid() ? PyLong_AsUnsignedLongLong(value.ptr()) : 0;
}

// Whether the storage holds all of a tensor: it may have been freed or cut under it. One of the tensor's own length is
// taken for the whole of it: that it was cut to this very length, under a part of what it was, is not looked for.
bool has_its_memory(nb::handle value, const nb::dlpack::dltensor& tensor) {
  static const nb::object untyped_storage = nb::steal(PyUnicode_InternFromString("untyped_storage"));
  static const nb::object data_ptr = nb::steal(PyUnicode_InternFromString("data_ptr"));
  const nb::object storage = asked(value, untyped_storage);
  if (!storage.is_valid()) return false;
  const Py_ssize_t length = PyObject_Size(storage.ptr());
  const uint64_t held = length < 0 ? 0 : static_cast<uint64_t>(length), needed = bytes_of(tensor);
  if (held <= needed) return held == needed;
  const uint64_t begin = number_of(asked(storage, data_ptr)), at = address_in(tensor);
  return at >= begin && at + needed <= begin + held;
}

// Whether reading a tensor negates what its memory holds. Such tensors are imaginary parts of conjugated ones, and so of
// the types that complex numbers have parts of.
bool is_negated(nb::handle value, const nb::dlpack::dltensor& tensor) {
  static const nb::object is_neg = nb::steal(PyUnicode_InternFromString("is_neg"));
  const bool may_be = tensor.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
  return may_be && asked(value, is_neg).ptr() != Py_False;
}

}  // namespace

bool describe_plain(nb::handle value, nb::dlpack::dltensor& tensor) {
  const bool is_plain = torch_table != nullptr && is_plain_type(value.ptr()) &&
                        torch_table->describe(value.ptr(), &tensor) == 0 && is_contiguous(tensor) &&
                        bytes_of(tensor) != 0 && !is_negated(value, tensor) && has_its_memory(value, tensor);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return is_plain;
}

uint64_t address_in(const nb::dlpack::dltensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
}

namespace {

uint64_t plain_address(nb::handle value) {
  nb::dlpack::dltensor tensor;
  return describe_plain(value, tensor) ? address_in(tensor) : 0;
}

// table: torch's capsule. Returns whether the table is one that this file knows.
bool read_plain_tensors_by(nb::capsule table, nb::tuple types) {
  const auto* candidate = static_cast<const ExchangeTable*>(table.data("dlpack_exchange_api"));
  while (candidate != nullptr && candidate->major != 1) candidate = candidate->older;
  if (candidate == nullptr || candidate->describe == nullptr) return false;
  torch_table = candidate;
  for (nb::handle type : types) plain_types.push_back(type.ptr());
  return true;
}

}  // namespace

bool read_address(PyObject* value, TensorAddress& address) noexcept {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  if (value == Py_None) {
    address.value = 0;
    return true;
  }
  nb::dlpack::dltensor tensor;
  if (torch_table && is_plain_type(value)) {
    if (torch_table->describe(value, &tensor) == 0) {
      address = TensorAddress::of(address_in(tensor));
      return true;
    }
    PyErr_Clear();
  }
  PyObject* number = call_method(value, data_ptr);
  const uint64_t at = number ? PyLong_AsUnsignedLongLong(number) : 0;
  Py_XDECREF(number);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  address = TensorAddress::of(at);
  return true;
}

TensorAddress address_of(nb::handle tensor) {
  TensorAddress address;
  if (!read_address(tensor.ptr(), address)) throw nb::type_error("a tensor that tells no address");
  return address;
}

nb::object made(PyObject* object) {
  if (!object) throw nb::python_error();
  return nb::steal(object);
}

nb::object bare(const nb::object& type, Py_ssize_t items) {
  auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
  return made(reinterpret_cast<allocfunc>(PyType_GetSlot(of, Py_tp_alloc))(of, items));
}

nb::object handle_of(const nb::object& type, const nb::object& state, std::span<const nb::handle> entries) {
  static PyObject* const name = PyUnicode_InternFromString("state");
  const nb::object handle = bare(type, static_cast<Py_ssize_t>(entries.size()));
  Py_ssize_t place = 0;
  for (nb::handle entry : entries) PyTuple_SetItem(handle.ptr(), place++, nb::borrow(entry).release().ptr());
  if (PyObject_SetAttr(handle.ptr(), name, state.ptr()) != 0) throw nb::python_error();
  return handle;
}

void bind_tensors(nb::module_& module) {
  module.def("plain_address", &plain_address, nb::arg("value").none());
  module.def("read_plain_tensors_by", &read_plain_tensors_by, nb::arg("table"), nb::arg("types"));
}

}  // namespace weft
