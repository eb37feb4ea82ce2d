// SPDX-License-Identifier: Apache-2.0
//
// Uninitialised tensors, made by functions of torch that take no function of Python: weft/runtime/allocation.py finds them.
//   const nb::object rows = allocator.empty({tokens, hidden}, dtype);   // one tensor, row-major
//   nb::object results[3];
//   maker.make(results);                                                // all that the calls of one signature fill
// weft._core.Allocator is of one device, and weft._core.TensorMaker of one signature.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bind/tensors.h"

namespace weft {

class Allocator {
 public:
  // Of torch, for a shape, strides in elements, and a dtype.
  struct Functions {
    nanobind::object empty;           // (shape, strides, dtype) -> a tensor of the device that is current
    nanobind::object part;            // (tensor, shape, strides, offset) -> one of the same memory, no view
    nanobind::object current_device;  // () -> the number of the device that is current; None on the CPU
    nanobind::object elsewhere;       // as empty(), where another device is current
    nanobind::object large;           // as empty(), for tensors of large_bytes or more; None: as the others
  };
  // device: its number; None on the CPU.
  Allocator(Functions torch, nanobind::object device, uint64_t large_bytes);

  nanobind::object empty(std::span<const uint64_t> shape, const nanobind::object& dtype) const;
  // Some elements of a tensor, from element `offset` on.
  nanobind::object part(const nanobind::object& tensor, std::span<const uint64_t> shape,
                        std::span<const uint64_t> strides, uint64_t offset) const;

 private:
  friend class TensorMaker;
  bool is_large(const nanobind::tuple& shape, const nanobind::object& dtype) const;
  nanobind::handle small() const;  // what makes small tensors now

  Functions torch_;
  nanobind::object device_;
  uint64_t large_bytes_;
};

class TensorMaker {
 public:
  // memory: a place among `count` results and (shape, strides, dtype), for each piece of memory.
  // parts: a place, a shape, strides and an offset in elements of the last piece, which may have no place of its own.
  TensorMaker(nanobind::object allocator, size_t count, nanobind::list memory, nanobind::list parts);

  // results: None for those that have no tensor.
  template <size_t count>
  void make(nanobind::object (&results)[count]) const {
    expect(count);
    for (nanobind::object& result : results) result = nanobind::none();
    make_each([&](size_t place, nanobind::object value) { results[place] = std::move(value); });
  }
  nanobind::list list() const;

 private:
  struct Piece {
    size_t place;
    nanobind::tuple arguments;
    bool is_large;
  };
  struct Part {
    size_t place;
    nanobind::object shape, strides, offset;
  };

  void expect(size_t count) const;
  // set(place, tensor) for each of them.
  template <class Set>
  void make_each(const Set& set) const {
    const nanobind::handle small = by_->small();
    nanobind::object last;
    for (const Piece& piece : memory_) {
      const nanobind::handle function = piece.is_large ? nanobind::handle(by_->torch_.large) : small;
      last = made(PyObject_Call(function.ptr(), piece.arguments.ptr(), nullptr));
      if (piece.place < count_) set(piece.place, last);
    }
    for (const Part& part : parts_) {
      PyObject* const arguments[] = {last.ptr(), part.shape.ptr(), part.strides.ptr(), part.offset.ptr()};
      set(part.place, made(PyObject_Vectorcall(by_->torch_.part.ptr(), arguments, 4, nullptr)));
    }
  }

  nanobind::object allocator_;
  const Allocator* by_;
  size_t count_;
  std::vector<Piece> memory_;
  std::vector<Part> parts_;
};

// What the calls of one signature fill.
class Outputs {
 public:
  // make: a TensorMaker.
  explicit Outputs(nanobind::object make)
      : python_maker_(std::move(make)), maker_(&nanobind::cast<const TensorMaker&>(python_maker_)) {}

  template <size_t count>
  void make(nanobind::object (&results)[count]) const {
    maker_->make(results);
  }

 private:
  nanobind::object python_maker_;
  const TensorMaker* maker_;
};

}  // namespace weft
