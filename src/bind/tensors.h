// SPDX-License-Identifier: Apache-2.0
//
// Torch tensors as arguments of the core's functions, read without torch's headers.
#pragma once

#include <nanobind/nanobind.h>

namespace weft {

// Where the elements of a tensor begin. An empty tensor has an address, too; None has none, which is 0.
struct TensorAddress {
  static constexpr uint64_t kNoElements = 16;  // where an empty tensor is: no address of anything

  uint64_t value = 0;

  bool has_elements() const { return value > kNoElements; }
};

template <class T>
T* pointer(TensorAddress tensor) {
  return reinterpret_cast<T*>(tensor.value);
}

// value: a tensor, which the caller has checked, or None. Returns: whether it has told where it is.
bool read_address(PyObject* value, TensorAddress& address) noexcept;

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
