// SPDX-License-Identifier: Apache-2.0
//
// weft._core.TensorMaker makes the outputs of calls of one form, by two functions of torch:
// weft/runtime/allocation.py, OutputMaker. Outputs is such a maker as the core calls it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "bind/tensors.h"

namespace weft {

class TensorMaker {
 public:
  // empty(shape, strides, dtype) makes a tensor, part(tensor, shape, strides, offset) one of the same memory.
  // memory: a place among `count` results and empty()'s arguments, for each piece of memory.
  // parts: a place, a shape, strides and an offset in elements of the last piece, which may have no place of its own.
  // empty() makes tensors of the current device: where current_device(), unless it is None, returns another one than
  // `device`, otherwise() makes them.
  TensorMaker(nanobind::object empty, nanobind::object part, size_t count, nanobind::list memory,
              nanobind::list parts, nanobind::object current_device, nanobind::object device,
              nanobind::object otherwise);

  size_t count() const { return count_; }
  // results: of count() places, None for those that have no tensor.
  void make(nanobind::object* results) const;
  nanobind::list list() const;

 private:
  struct Piece {
    size_t place;
    nanobind::tuple arguments;
  };
  struct Part {
    size_t place;
    nanobind::object shape, strides, offset;
  };

  bool is_elsewhere() const;  // whether another device than that of the results is the current one
  // set(place, tensor) for each of them.
  template <class Set>
  void make_each(const Set& set) const;

  nanobind::object empty_, part_;
  size_t count_;
  nanobind::object current_device_, device_, otherwise_;
  std::vector<Piece> memory_;
  std::vector<Part> parts_;
};

template <size_t count>
class Outputs {
 public:
  // make: what OutputMaker.shortest() returns.
  explicit Outputs(nanobind::object make) : make_(std::move(make)) {
    if (nanobind::isinstance<TensorMaker>(make_)) maker_ = nanobind::inst_ptr<TensorMaker>(make_);
  }

  void make(nanobind::object (&results)[count]) const {
    if (maker_ != nullptr && maker_->count() == count) return maker_->make(results);
    take(make_(), results);
  }
  static void take(const nanobind::object& list, nanobind::object (&results)[count]) {
    for (size_t i = 0; i < count; ++i)
      results[i] = made(PySequence_GetItem(list.ptr(), static_cast<Py_ssize_t>(i)));
  }

 private:
  nanobind::object make_;
  const TensorMaker* maker_ = nullptr;  // what make_ is, where it is one
};

}  // namespace weft
