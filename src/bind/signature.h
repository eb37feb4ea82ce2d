// SPDX-License-Identifier: Apache-2.0
//
// A call's signature: bytes of everything that its checks depend on, without the addresses of its tensors.
// weft/runtime/plain.py says which calls have one.
//   Signature signature;
//   TensorAddress x;
//   if (!signature.add_tensor(given[0], x) || !signature.add_option(given[1])) return nb::none();  // to be checked
//   const nb::object plan = signature.found_in(plans);
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bind/tensors.h"

namespace weft {

class Signature {
 public:
  // Type, device and shape of a tensor, and whether rows may begin where it does; or None. Returns false, as the next
  // does, for one that has to be checked in every call, and where there is no room left.
  bool add_tensor(nanobind::handle value, TensorAddress& address);
  // None, a bool, a number, bytes or a tuple of these, each with its type: 1.0 is as good a key as 1 to Python, but no
  // number of experts.
  bool add_option(nanobind::handle value);

  nanobind::bytes bytes() const { return nanobind::bytes(bytes_, size_); }
  // The dictionary's value for this signature; an invalid object if there is none.
  nanobind::object found_in(nanobind::handle plans) const;

 private:
  template <class T>
  bool add(T value) {
    return add(&value, sizeof value);
  }
  bool add(const void* from, size_t bytes);

  static constexpr size_t kMostBytes = 1024;
  char bytes_[kMostBytes];
  size_t size_ = 0;
};

}  // namespace weft
