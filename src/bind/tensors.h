// SPDX-License-Identifier: Apache-2.0
//
// Torch tensors as arguments of the core's functions, read without torch's headers.
#pragma once

#include <nanobind/nanobind.h>

namespace nanobind::dlpack {
struct dltensor;
}

namespace weft {

// Where the elements of a tensor begin. An empty tensor has an address, too; None has none, which is 0.
struct TensorAddress {
  static constexpr uint64_t kNoElements = 16;  // where an empty tensor is: no address of anything

  uint64_t value = 0;

  bool has_elements() const { return value > kNoElements; }
  static TensorAddress of(uint64_t elements) { return {elements == 0 ? kNoElements : elements}; }
};

template <class T>
T* pointer(TensorAddress tensor) {
  return reinterpret_cast<T*>(tensor.value);
}

// Describes a tensor that can be taken as it is: weft/runtime/plain.py. Returns false, with no error set, for anything
// else, and where torch does not describe tensors.
bool describe_plain(nanobind::handle value, nanobind::dlpack::dltensor& tensor);
uint64_t address_in(const nanobind::dlpack::dltensor& tensor);  // of its first element

// value: a tensor, which the caller has checked, or None. Returns: whether the address could be read.
bool read_address(PyObject* value, TensorAddress& address) noexcept;
// The same; throws where the address cannot be read.
TensorAddress address_of(nanobind::handle tensor);

// Where each of a tuple's tensors begins, 8 bytes for each: other bytes once one has moved, or its memory is gone.
nanobind::bytes addresses_of(nanobind::handle tensors);

// A new reference of Python's; throws what it raised where that is null.
nanobind::object made(PyObject* object);

// An object of a class of Python whose constructor is not called: of a tuple, with room for so many items.
nanobind::object bare(const nanobind::object& type, Py_ssize_t items);

}  // namespace weft

template <>
struct nanobind::detail::type_caster<weft::TensorAddress> {
  NB_TYPE_CASTER(weft::TensorAddress, const_name("torch.Tensor | None"))
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    return weft::read_address(source.ptr(), value);
  }
};

template <>
struct nanobind::detail::has_arg_defaults<weft::TensorAddress> : std::true_type {};  // it takes None
