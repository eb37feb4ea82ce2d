// SPDX-License-Identifier: Apache-2.0
//
// weft._core.plain_address and signature_of: weft/runtime/plain.py says what they return, and asks tensors one property
// at a time where this cannot be had. Torch describes a tensor to C programs by DLPack's exchange of tensors (torch
// 2.10 and newer): one call instead of eight. https://dmlc.github.io/dlpack/latest/c_api.html
#include "bind/tensors.h"

#include <nanobind/ndarray.h>

#include <cstring>
#include <string>
#include <utility>
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
nb::tuple* plain_types = nullptr;

bool is_plain_type(PyObject* value) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  for (nb::handle plain : *plain_types)
    if (plain.ptr() == type) return true;
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

// Whether the storage holds all of a tensor: it may have been freed or cut under it.
bool has_its_memory(nb::handle value, const nb::dlpack::dltensor& tensor) {
  static const nb::object untyped_storage = nb::steal(PyUnicode_InternFromString("untyped_storage"));
  static const nb::object nbytes = nb::steal(PyUnicode_InternFromString("nbytes"));
  static const nb::object data_ptr = nb::steal(PyUnicode_InternFromString("data_ptr"));
  const nb::object storage = asked(value, untyped_storage);
  if (!storage.is_valid()) return false;
  const uint64_t begin = number_of(asked(storage, data_ptr)), held = number_of(asked(storage, nbytes));
  const auto at = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
  return at >= begin && at + bytes_of(tensor) <= begin + held;
}

bool is_negated(nb::handle value) {
  static const nb::object is_neg = nb::steal(PyUnicode_InternFromString("is_neg"));
  return asked(value, is_neg).ptr() != Py_False;
}

// Describes a tensor that can be taken as it is. Returns false, with no error set, for anything else.
bool describe_plain(nb::handle value, nb::dlpack::dltensor& tensor) {
  const bool is_plain = is_plain_type(value.ptr()) && torch_table->describe(value.ptr(), &tensor) == 0 &&
                        is_contiguous(tensor) && bytes_of(tensor) != 0 && !is_negated(value) &&
                        has_its_memory(value, tensor);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return is_plain;
}

uint64_t plain_address(nb::handle value) {
  nb::dlpack::dltensor tensor;
  if (!describe_plain(value, tensor)) return 0;
  return reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
}

template <class T>
void append(std::string& key, T value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// As rows have to be: arguments.ROW_ALIGNMENT_BYTES.
bool is_aligned(const nb::dlpack::dltensor& tensor) {
  return (reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset) % 16 == 0;
}

// Type, device and shape of a tensor, and whether it is aligned. Returns false for one that is not plain.
bool append_tensor(std::string& key, nb::handle value) {
  if (value.is_none()) {
    key.push_back('-');
    return true;
  }
  nb::dlpack::dltensor tensor;
  if (!describe_plain(value, tensor) ||
      tensor.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Complex))
    return false;
  key.push_back(is_aligned(tensor) ? 't' : 'u');
  append(key, tensor.dtype.code);
  append(key, tensor.dtype.bits);
  append(key, tensor.device.device_type);
  append(key, tensor.device.device_id);
  append(key, tensor.ndim);
  key.append(reinterpret_cast<const char*>(tensor.shape), sizeof(int64_t) * static_cast<size_t>(tensor.ndim));
  return true;
}

// None, a bool, a number or bytes, each with its type: 1.0 is as good a key as 1 to Python, but no number of experts.
// Returns false for anything else.
bool append_option(std::string& key, nb::handle value) {
  if (value.is_none() || PyBool_Check(value.ptr())) {
    key.push_back(value.is_none() ? '-' : value.ptr() == Py_True ? 'y' : 'n');
    return true;
  }
  if (PyLong_CheckExact(value.ptr())) {
    key.push_back('i');
    append(key, PyLong_AsLongLong(value.ptr()));
    const bool fits = !PyErr_Occurred();
    PyErr_Clear();
    return fits;
  }
  if (!PyBytes_CheckExact(value.ptr())) return false;
  const nb::bytes text = nb::borrow<nb::bytes>(value);
  key.push_back('b');
  append(key, text.size());
  key.append(text.c_str(), text.size());
  return true;
}

nb::bytes signature_of(nb::tuple tensors, nb::args options) {
  std::string key;
  key.reserve(256);
  for (nb::handle value : tensors)
    if (!append_tensor(key, value)) return nb::bytes("", 0);
  for (nb::handle value : options)
    if (!append_option(key, value)) return nb::bytes("", 0);
  return nb::bytes(key.data(), key.size());
}

// table: torch's capsule. Returns whether the table is one that this file knows.
bool read_plain_tensors_by(nb::capsule table, nb::tuple types) {
  const auto* candidate = static_cast<const ExchangeTable*>(table.data("dlpack_exchange_api"));
  while (candidate != nullptr && candidate->major != 1) candidate = candidate->older;
  if (candidate == nullptr || candidate->describe == nullptr) return false;
  torch_table = candidate;
  plain_types = new nb::tuple(types);  // as long as the process
  return true;
}

// Makes what calls of one form fill, by two functions of torch: weft/runtime/allocation.py, OutputMaker.
class TensorMaker {
 public:
  // empty(shape, strides, dtype) makes a tensor, part(tensor, shape, strides, offset) one of the same memory. memory: a
  // place among `count` results and empty()'s arguments, for each piece of memory; parts: a place, a shape, strides and
  // an offset in elements of the last piece, which has no place of its own. empty() makes tensors of the current device: where
  // current_device(), unless it is None, returns another one than `device`, otherwise() makes them.
  TensorMaker(nb::object empty, nb::object part, size_t count, nb::list memory, nb::list parts,
              nb::object current_device, nb::object device, nb::object otherwise)
      : empty_(std::move(empty)),
        part_(std::move(part)),
        count_(count),
        current_device_(std::move(current_device)),
        device_(std::move(device)),
        otherwise_(std::move(otherwise)) {
    for (nb::handle piece : memory) memory_.push_back({nb::cast<size_t>(piece[0]), nb::tuple(piece[1])});
    for (nb::handle piece : parts)
      parts_.push_back({nb::cast<size_t>(piece[0]), piece[1], piece[2], piece[3]});
  }

  nb::list make() const {
    if (!current_device_.is_none() && !current_device_().equal(device_)) return nb::list(otherwise_());
    nb::list results = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(count_)));
    for (size_t i = 0; i < count_; ++i) set(results, i, nb::none());
    nb::object last;
    for (const Piece& piece : memory_) {
      last = made(PyObject_Call(empty_.ptr(), piece.arguments.ptr(), nullptr));
      if (piece.place < count_) set(results, piece.place, last);
    }
    for (const Part& part : parts_) {
      const nb::object arguments = nb::make_tuple(last, part.shape, part.strides, part.offset);
      set(results, part.place, made(PyObject_Call(part_.ptr(), arguments.ptr(), nullptr)));
    }
    return results;
  }

 private:
  struct Piece {
    size_t place;
    nb::tuple arguments;
  };
  struct Part {
    size_t place;
    nb::object shape, strides, offset;
  };
  static void set(nb::list& results, size_t place, nb::object value) {
    PyList_SetItem(results.ptr(), static_cast<Py_ssize_t>(place), value.release().ptr());
  }

  nb::object empty_, part_;
  size_t count_;
  nb::object current_device_, device_, otherwise_;
  std::vector<Piece> memory_;
  std::vector<Part> parts_;
};

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
      const auto at = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
      address.value = at == 0 ? TensorAddress::kNoElements : at;
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
  address.value = at == 0 ? TensorAddress::kNoElements : at;
  return true;
}

TensorAddress address_of(nb::handle tensor) {
  TensorAddress address;
  if (!read_address(tensor.ptr(), address)) throw nb::type_error("a tensor that tells no address");
  return address;
}

nb::bytes addresses_of(nb::handle tensors) {
  std::string places;
  places.reserve(64);
  for (nb::handle value : tensors) {
    TensorAddress at;
    if (!read_address(value.ptr(), at)) at.value = 0;
    append(places, at.value);
  }
  return nb::bytes(places.data(), places.size());
}

nb::object made(PyObject* object) {
  if (!object) throw nb::python_error();
  return nb::steal(object);
}

nb::object bare(const nb::object& type, Py_ssize_t items) {
  auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
  return made(reinterpret_cast<allocfunc>(PyType_GetSlot(of, Py_tp_alloc))(of, items));
}

void bind_tensors(nb::module_& module) {
  module.def("plain_address", &plain_address, nb::arg("value").none());
  module.def("signature_of", &signature_of, nb::arg("tensors"), nb::arg("options"));
  module.def("addresses", [](nb::args values) { return addresses_of(values); });
  nb::class_<TensorMaker>(module, "TensorMaker")
      .def(nb::init<nb::object, nb::object, size_t, nb::list, nb::list, nb::object, nb::object, nb::object>(),
           nb::arg("empty"), nb::arg("part"), nb::arg("count"), nb::arg("memory"), nb::arg("parts"),
           nb::arg("current_device").none(), nb::arg("device").none(), nb::arg("otherwise"))
      .def("__call__", &TensorMaker::make);
  module.def("read_plain_tensors_by", &read_plain_tensors_by, nb::arg("table"), nb::arg("types"));
}

}  // namespace weft
