// SPDX-License-Identifier: Apache-2.0
//
// weft._core.LowLatencyDispatch and LowLatencyCombine: calls of one form, each in one trip into the core. They make what
// a call fills, start it, and return what its caller gets: weft/moe/low_latency.py says what that is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/stream_order.h"
#include "bind/bind.h"
#include "bind/low_latency_calls.h"
#include "bind/tensors.h"

namespace nb = nanobind;

namespace weft {
namespace {

// What a dispatch leaves for its combine: weft/moe/low_latency_handle.py, LowLatencyHandle.
class HandleState {
 public:
  HandleState(nb::object form, nb::object routes, nb::object status)
      : form(std::move(form)), routes(std::move(routes)), status(std::move(status)), place_(place()) {}

  nb::object form, routes, status;
  nb::object kept_rows = nb::none();  // as long as this: what the next combine reads in place
  bool is_checked = false;  // whether the routes are as long as the form says: those of a dispatch are

  bool is_in_place() const { return place() == place_; }
  bool is_received() {
    const int64_t* word = words();
    return was_received_ = was_received_ || (word != nullptr && word[0] != 0);
  }
  // Written past torch: autograd, which may have saved the status, shall not take this for a change.
  void receive() {
    if (int64_t* word = words()) word[0] = 1;
    was_received_ = true;
  }
  int64_t number() const { return words() != nullptr ? words()[1] : 0; }

 private:
  uint64_t place() const { return address_of(routes).value; }
  int64_t* words() const {
    const TensorAddress at = address_of(status);
    return at.has_elements() ? pointer<int64_t>(at) : nullptr;
  }

  uint64_t place_;  // of the routes while nobody else has them
  bool was_received_ = false;
};

// Launches the receive phase, once, and keeps the call's tensors alive until then.
class ReceiveHook {
 public:
  ReceiveHook(nb::object calls, LowLatency& mode, uint64_t number, std::function<void()> receive,
              nb::object tensors, nb::object state)
      : calls(std::move(calls)),
        tensors(std::move(tensors)),
        state(std::move(state)),
        mode_(&mode),
        number_(number),
        receive_(std::move(receive)) {}

  nb::object calls;    // which keep the mode alive
  nb::object tensors;  // None once it has run
  nb::object state;    // of the handle; None for a combine

  void call() {
    if (tensors.is_none())
      check(Status::invalid("hook: called a second time, allowed: once for each call that returned one"));
    mode_->note_received(number_);
    receive_();
    tensors = nb::none();
    if (!state.is_none()) nb::cast<HandleState&>(state).receive();
  }

 private:
  LowLatency* mode_;
  uint64_t number_;  // of the call; 0 for one that a graph captured
  std::function<void()> receive_;
};

// For Python's collector: the objects that one of a bound class holds.
template <class T, nb::object T::*... held>
struct Collected {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const T& of = *nb::inst_ptr<T>(self);
    int stopped = 0;
    (void)((stopped = (of.*held).is_valid() ? visit((of.*held).ptr(), arg) : 0, stopped != 0) || ...);
    return stopped;
  }
  static int clear(PyObject* self) {
    T& of = *nb::inst_ptr<T>(self);
    ((of.*held = nb::none()), ...);
    return 0;
  }
  static inline PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                       {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                       {0, nullptr}};
};

// What calls of one device have in common, and the classes of what they return.
class LowLatencySetting {
 public:
  // stream: the communication stream. current_stream(ordinal) is the caller's; None on the CPU. finish(tensors) returns
  // the event of a call with async_finish. unused: statuses of handles that have not received and of those that have,
  // which more(is_received) fills up.
  LowLatencySetting(uint64_t stream, nb::object current_stream, nb::object ordinal, nb::object finish,
                    nb::object handle_type, nb::object event_type, nb::tuple unused, nb::object more)
      : stream_(stream),
        current_stream_(std::move(current_stream)),
        ordinal_(std::move(ordinal)),
        finish_(std::move(finish)),
        handle_type_(std::move(handle_type)),
        event_type_(std::move(event_type)),
        unused_(std::move(unused)),
        more_(std::move(more)) {}

  void* stream() const { return pointer<void>(stream_); }
  void* current_stream() const {
    return current_stream_.is_none() ? nullptr : pointer<void>(nb::cast<uint64_t>(current_stream_(ordinal_)));
  }
  nb::object event(bool async_finish, const nb::object& tensors) const {
    return async_finish ? finish_(tensors) : bare(event_type_, 0);
  }
  nb::object status(bool is_received) const {
    PyObject* unused = PyTuple_GetItem(unused_.ptr(), is_received ? 1 : 0);
    if (PyList_Size(unused) == 0) more_(is_received);
    const Py_ssize_t last = PyList_Size(unused) - 1;
    PyObject* status = PyList_GetItem(unused, last);
    if (!status) throw nb::python_error();
    nb::object taken = nb::borrow(status);
    if (PyList_SetSlice(unused, last, last + 1, nullptr) != 0) throw nb::python_error();
    return taken;
  }
  template <class... Entry>
  nb::object handle(const nb::object& state, const Entry&... entries) const {
    const nb::object handle = bare(handle_type_, sizeof...(entries));
    Py_ssize_t place = 0;
    ((void)PyTuple_SetItem(handle.ptr(), place++, nb::object(entries).release().ptr()), ...);
    handle.attr("state") = state;
    return handle;
  }

 private:
  uint64_t stream_;
  nb::object current_stream_, ordinal_, finish_, handle_type_, event_type_;
  nb::tuple unused_;
  nb::object more_;
};

struct Started {
  nb::object event, hook;
};

// A form's calls. They are objects of Python, which keep the buffer's mode alive.
template <class Calls>
class Whole {
 public:
  // make() makes what a call fills.
  Whole(nb::object calls, const LowLatencySetting& setting, std::string name, nb::object make)
      : calls_(std::move(calls)), setting_(setting), name_(std::move(name)), make_(std::move(make)) {}

 protected:
  nb::object new_outputs() const { return make_(); }
  const LowLatencySetting& setting() const { return setting_; }

  // Throws, with nothing sent, while the hook of the call before the last one is still to be run.
  void check_hooks(void* stream) const {
    const LowLatency& mode = calls().mode();
    const std::string* late = mode.late_receive();
    if (late != nullptr && !value_or_throw(mode.is_captured(stream)))
      check(Status::invalid(
          "hook: that of the {}() before the last call has not run, allowed: a hook runs before the "
          "second call after its own; where it was dropped, destroy the buffer",
          *late));
  }

  // Runs both phases on the communication stream, or sends on the current one and returns the hook. `tensors` are all
  // that the call works on; the hook tells `state`, unless it is None, that it has received.
  template <class Memory>
  Started start(const Memory& memory, const nb::object& tensors, const nb::object& state, bool async_finish,
                bool returns_hook) const {
    void* const current = setting_.current_stream();
    check_hooks(current);
    if (!returns_hook) {
      calls().run(memory, setting_.stream(), current, !async_finish);
      return {setting_.event(async_finish, tensors), nb::none()};
    }
    auto sent = calls().send(memory, current);
    const uint64_t number = sent.number;
    calls().mode().note_unreceived(number, name_);
    auto receive = [calls = &calls(), sent = std::move(sent)] { calls->receive(sent); };
    return {setting_.event(false, tensors),
            nb::cast(ReceiveHook(calls_, calls().mode(), number, std::move(receive), tensors, state))};
  }

 private:
  const Calls& calls() const { return nb::cast<const Calls&>(calls_); }

  nb::object calls_;
  LowLatencySetting setting_;
  std::string name_;
  nb::object make_;
};

class WholeDispatch : Whole<DispatchCalls> {
 public:
  // form: a LowLatencyForm. seen(rows, scales): as the caller sees them; None: as they are.
  WholeDispatch(nb::object calls, const LowLatencySetting& setting, nb::object make, nb::object form,
                nb::object seen)
      : Whole(std::move(calls), setting, "low_latency_dispatch", std::move(make)),
        form_(std::move(form)),
        entries_(form_.attr("entries")),
        seen_(std::move(seen)) {}

  // given: what to fill, in the order of make(); None: new tensors.
  nb::tuple call(nb::object x, nb::object x_scales, nb::object topk_idx, nb::object topk_weights,
                 nb::object expert_stats, nb::object wait_cycles, nb::object given, bool async_finish,
                 bool returns_hook) const {
    const nb::object filled = given.is_none() ? new_outputs() : std::move(given);
    nb::object out[8];
    for (Py_ssize_t i = 0; i < 8; ++i) out[i] = made(PySequence_GetItem(filled.ptr(), i));
    const auto& [rows, scales, src_info, layout_range, counts, routes, weights, sources] = out;
    const LowLatencyDispatchMemory memory =
        dispatch_memory(address_of(x), address_of(x_scales), address_of(topk_idx), address_of(topk_weights),
                        address_of(expert_stats), address_of(wait_cycles), address_of(rows),
                        address_of(scales), address_of(src_info), address_of(layout_range),
                        address_of(counts), address_of(routes), address_of(weights), address_of(sources));
    const nb::object status = setting().status(!returns_hook);
    HandleState fresh(form_, routes, status);
    fresh.is_checked = true;
    const nb::object state = nb::cast(std::move(fresh));
    const nb::tuple tensors =
        nb::make_tuple(x, x_scales, topk_idx, topk_weights, expert_stats, wait_cycles, filled);
    const Started started = start(memory, tensors, state, async_finish, returns_hook);
    const nb::object handle =
        setting().handle(state, src_info, layout_range, nb::object(entries_[0]), nb::object(entries_[1]),
                         nb::object(entries_[2]), routes, nb::object(entries_[3]), status);
    const nb::object payload = as_seen(rows, scales);
    if (topk_weights.is_none()) return nb::make_tuple(payload, counts, handle, started.event, started.hook);
    return nb::make_tuple(payload, counts, weights, sources, handle, started.event, started.hook);
  }

 private:
  nb::object as_seen(const nb::object& rows, const nb::object& scales) const {
    if (scales.is_none()) return rows;
    return seen_.is_none() ? nb::make_tuple(rows, scales) : seen_(rows, scales);
  }

  nb::object form_;
  nb::tuple entries_;  // of a handle: M, hidden, E and the facts
  nb::object seen_;
};

class WholeCombine : Whole<CombineCalls> {
 public:
  WholeCombine(nb::object calls, const LowLatencySetting& setting, nb::object make)
      : Whole(std::move(calls), setting, "low_latency_combine", std::move(make)) {}

  // given: what to fill; None: a new tensor.
  nb::tuple call(nb::object x, nb::object topk_idx, nb::object topk_weights, const HandleState& state,
                 nb::object given, nb::object wait_cycles, nb::object signals, bool async_finish,
                 bool returns_hook) const {
    const nb::object combined =
        given.is_none() ? made(PySequence_GetItem(new_outputs().ptr(), 0)) : std::move(given);
    const LowLatencyCombineMemory memory = combine_memory(
        address_of(x), address_of(topk_idx), address_of(topk_weights), address_of(state.routes),
        address_of(combined), address_of(wait_cycles), address_of(signals));
    const nb::tuple tensors =
        nb::make_tuple(x, topk_idx, topk_weights, state.routes, combined, wait_cycles, signals);
    const Started started = start(memory, tensors, nb::none(), async_finish, returns_hook);
    return nb::make_tuple(combined, started.event, started.hook);
  }
};

}  // namespace

void bind_low_latency_whole(nb::module_& module) {
  using StateCollected = Collected<HandleState, &HandleState::form, &HandleState::routes,
                                   &HandleState::status, &HandleState::kept_rows>;
  nb::class_<HandleState>(module, "LowLatencyHandleState", nb::type_slots(StateCollected::slots))
      .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("form"), nb::arg("routes"),
           nb::arg("status"))
      .def_ro("form", &HandleState::form)
      .def_ro("routes", &HandleState::routes)
      .def_rw("kept_rows", &HandleState::kept_rows, nb::arg().none())
      .def_prop_ro("number", &HandleState::number)
      .def_prop_ro("group_key", [](const HandleState& self) { return self.form.attr("group_key"); })
      .def_prop_ro("is_in_place", &HandleState::is_in_place)
      .def_prop_ro("is_received", &HandleState::is_received)
      .def_rw("is_checked", &HandleState::is_checked)
      .def_prop_ro("is_ready", [](HandleState& self) {
        return self.is_checked && self.is_in_place() && self.is_received();
      });

  using HookCollected =
      Collected<ReceiveHook, &ReceiveHook::calls, &ReceiveHook::tensors, &ReceiveHook::state>;
  nb::class_<ReceiveHook>(module, "ReceiveHook", nb::type_slots(HookCollected::slots))
      .def("__call__", &ReceiveHook::call);

  nb::class_<LowLatencySetting>(module, "LowLatencySetting")
      .def(nb::init<uint64_t, nb::object, nb::object, nb::object, nb::object, nb::object, nb::tuple,
                    nb::object>(),
           nb::arg("stream"), nb::arg("current_stream").none(), nb::arg("ordinal"), nb::arg("finish"),
           nb::arg("handle_type"), nb::arg("event_type"), nb::arg("unused"), nb::arg("more"));

  nb::class_<WholeDispatch>(module, "LowLatencyDispatch")
      .def(nb::init<nb::object, const LowLatencySetting&, nb::object, nb::object, nb::object>(),
           nb::arg("calls"), nb::arg("setting"), nb::arg("make"), nb::arg("form"), nb::arg("seen").none())
      .def("__call__", &WholeDispatch::call, nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(),
           nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());

  nb::class_<WholeCombine>(module, "LowLatencyCombine")
      .def(nb::init<nb::object, const LowLatencySetting&, nb::object>(), nb::arg("calls"), nb::arg("setting"),
           nb::arg("make"))
      .def("__call__", &WholeCombine::call, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
           nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());
}

}  // namespace weft
