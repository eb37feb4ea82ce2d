// SPDX-License-Identifier: Apache-2.0
//
// One bind_*() per area, called by module.cc. check() turns a Status into weft.Error (or weft.PeerLost).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "base/owner_process.h"
#include "base/status.h"
#include "comm/window.h"

namespace weft {

void bind_base(nanobind::module_& module);
void bind_collective(nanobind::module_& module);
void bind_elastic(nanobind::module_& module);
void bind_high_throughput(nanobind::module_& module);
void bind_jit(nanobind::module_& module);
void bind_leases(nanobind::module_& module);
void bind_low_latency(nanobind::module_& module);
void bind_moe(nanobind::module_& module);
void bind_plan(nanobind::module_& module);
void bind_runtime(nanobind::module_& module);
void bind_signature(nanobind::module_& module);
void bind_tally(nanobind::module_& module);
void bind_tensor_maker(nanobind::module_& module);
void bind_tensors(nanobind::module_& module);
void bind_transfer(nanobind::module_& module);

// "cpu" or "cuda:N"; throws for anything else.
Device parse_device(const std::string& name);

// Addresses cross as integers.
template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// Lets Python threads, the peers' in a test among them, run while a call waits for other ranks.
template <class Call>
auto without_gil(Call call) {
  nanobind::gil_scoped_release released;
  return call();
}

// uint8[bytes] of this rank's part of a window from `offset` on; `owner` lives as long as the view's memory
// is used.
using WindowArray = nanobind::ndarray<uint8_t, nanobind::ndim<1>>;
WindowArray view_of(const Window& window, uint64_t offset, uint64_t bytes, nanobind::object owner);

// Throws what weft.errors.from_core(code, message) returns, unless ok.
void check(const Status& status);

template <class T>
T value_or_throw(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

// Objects that a forked child never ends: see EndedByOwner.
template <class T>
std::shared_ptr<T> owned_or_throw(Result<std::unique_ptr<T>> result) {
  return ended_by_owner(value_or_throw(std::move(result)));
}

// The object that a bound function gets as its self.
template <class T>
const T& object_of(const T& self) {
  return self;
}
template <class T>
const T& object_of(nanobind::handle self) {
  return nanobind::cast<const T&>(self);
}

// The same function, which throws where its object belongs to a process that this one was forked from.
template <class T, class Call, class Result, class Self, class... Arguments>
auto asking_owner(Call call, Result (Call::*)(Self, Arguments...) const) {
  return [call = std::move(call)](Self self, Arguments... arguments) -> Result {
    check(object_of<T>(self).check_owner());
    return call(std::forward<Self>(self), std::forward<Arguments>(arguments)...);
  };
}
template <class T, class Call>
auto asking_owner(Call call) {
  return asking_owner<T>(std::move(call), &Call::operator());
}
template <class T, class Result, class Of, class... Arguments>
auto asking_owner(Result (Of::*call)(Arguments...)) {
  return asking_owner<T>([call](T& self, Arguments... arguments) -> Result {
    return (self.*call)(std::forward<Arguments>(arguments)...);
  });
}
template <class T, class Result, class Of, class... Arguments>
auto asking_owner(Result (Of::*call)(Arguments...) const) {
  return asking_owner<T>([call](const T& self, Arguments... arguments) -> Result {
    return (self.*call)(std::forward<Arguments>(arguments)...);
  });
}
template <class T, class Result, class Self, class... Arguments>
auto asking_owner(Result (*call)(Self, Arguments...)) {
  return asking_owner<T>([call](Self self, Arguments... arguments) -> Result {
    return call(std::forward<Self>(self), std::forward<Arguments>(arguments)...);
  });
}

// A class whose objects belong to the process that made them: calls throw in a child that was forked from it. T has
// check_owner(). Properties that never change, such as a rank, are facts: a child may read them.
template <class T>
class OwnedClass : public nanobind::class_<T> {
  using Base = nanobind::class_<T>;

 public:
  using Base::Base;

  template <class Call, class... Extra>
  OwnedClass& def(const char* name, Call&& call, const Extra&... extra) {
    Base::def(name, asking_owner<T>(std::forward<Call>(call)), extra...);
    return *this;
  }
  // Makes an object, which belongs to this process.
  template <class Make, class... Extra>
  OwnedClass& def_new(Make&& make, const Extra&... extra) {
    Base::def(nanobind::new_(std::forward<Make>(make)), extra...);
    return *this;
  }
  template <class Call, class... Extra>
  OwnedClass& def_static(const char* name, Call&& call, const Extra&... extra) {
    Base::def_static(name, std::forward<Call>(call), extra...);
    return *this;
  }
  template <class Get, class... Extra>
  OwnedClass& def_prop_ro(const char* name, Get&& get, const Extra&... extra) {
    Base::def_prop_ro(name, asking_owner<T>(std::forward<Get>(get)), extra...);
    return *this;
  }
  template <class Get, class... Extra>
  OwnedClass& def_fact(const char* name, Get&& get, const Extra&... extra) {
    Base::def_prop_ro(name, std::forward<Get>(get), extra...);
    return *this;
  }
};

}  // namespace weft
