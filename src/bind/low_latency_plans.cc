// SPDX-License-Identifier: Apache-2.0
//
// weft._core.LowLatencyDispatchPlan and LowLatencyCombinePlan: low-latency calls of one signature. A call is one trip into
// the core, which makes what the call fills, starts it, and returns what its caller gets: weft/moe/low_latency.py says what
// that is. The trip of a call whose signature is known finds its plan as well.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "base/stream_order.h"
#include "bind/bind.h"
#include "bind/collected.h"
#include "bind/low_latency_calls.h"
#include "bind/signature.h"
#include "bind/tensor_maker.h"
#include "bind/tensors.h"

namespace nb = nanobind;

namespace weft {
namespace {

// What a dispatch leaves for its combine: weft/moe/low_latency_handle.py, LowLatencyHandle.
class HandleState {
 public:
  // key: of the agreement. place: of the routes.
  HandleState(nb::object agreement, nb::object key, nb::object routes, nb::object status, TensorAddress place)
      : agreement(std::move(agreement)),
        key(std::move(key)),
        routes(std::move(routes)),
        status(std::move(status)),
        place_(place.value) {}

  nb::object agreement, key, routes, status;
  nb::object combine_rows = nb::none();  // as long as this: what the next combine reads in place
  bool is_checked = false;  // whether the routes are as long as the agreement says: those of a dispatch are

  TensorAddress place() const { return address_of(routes); }
  bool is_in_place(TensorAddress now) const { return now.value == place_; }
  bool is_ready(TensorAddress now) { return is_checked && is_in_place(now) && is_received(); }
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
  int64_t* words() const {
    const TensorAddress at = address_of(status);
    return at.has_elements() ? pointer<int64_t>(at) : nullptr;
  }

  uint64_t place_;  // of the routes while nobody else has them
  bool was_received_ = false;
};

// What is left to do of a call whose rows were sent.
template <class Calls>
struct Receive {
  const Calls* calls;
  typename Calls::Sent sent;

  void operator()() const { calls->receive(sent); }
};

// Launches the receive phase, once, and keeps the call's tensors alive until then.
class ReceiveHook {
 public:
  using Left = std::variant<Receive<DispatchCalls>, Receive<CombineCalls>>;

  ReceiveHook(nb::object calls, LowLatency& mode, uint64_t number, Left left, nb::object tensors,
              nb::object state)
      : calls(std::move(calls)),
        tensors(std::move(tensors)),
        state(std::move(state)),
        mode_(&mode),
        number_(number),
        left_(std::move(left)) {}

  ReceiveHook(ReceiveHook&&) = default;
  ~ReceiveHook() { forget(); }
  // The tensors are going: a send that would come with this is off.
  void forget() {
    if (calls.is_valid() && !calls.is_none()) mode_->forget_later(number_);
  }

  nb::object calls;    // which keep the mode alive
  nb::object tensors;  // None once it has run
  nb::object state;    // of the handle; None for a combine

  void call() {
    if (tensors.is_none())
      check(Status::invalid("hook: called a second time, allowed: once for each call that returned one"));
    mode_->note_received(number_);
    std::visit([](const auto& receive) { receive(); }, left_);
    tensors = nb::none();
    if (!state.is_none()) nb::cast<HandleState&>(state).receive();
  }

 private:
  LowLatency* mode_;
  uint64_t number_;  // of the call; 0 for one that a graph captured
  Left left_;
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
  nb::object finish(const nb::object& tensors) const { return finish_(tensors); }
  nb::object finished() const { return bare(event_type_, 0); }
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
  nb::object handle(const nb::object& state, std::span<const nb::handle> entries) const {
    return handle_of(handle_type_, state, entries);
  }

 private:
  uint64_t stream_;
  nb::object current_stream_, ordinal_, finish_, handle_type_, event_type_;
  nb::tuple unused_;
  nb::object more_;
};

// What a caller gave: tensors, and options, of which the last two are async_finish and return_recv_hook.
template <Py_ssize_t count>
class Given {
 public:
  Given(nb::tuple tensors, nb::tuple options) : tensors_(std::move(tensors)), options_(std::move(options)) {}

  // Adds all of it, and reads where the tensors are. Returns false where the call has to be checked.
  bool sign(Signature& signature) {
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!signature.add_tensor((*this)[i], at_[i])) return false;
    for (nb::handle option : options_)
      if (!signature.add_option(option)) return false;
    return true;
  }
  void read_addresses() {
    for (Py_ssize_t i = 0; i < count; ++i) at_[i] = address_of((*this)[i]);
  }

  nb::handle operator[](Py_ssize_t i) const { return PyTuple_GetItem(tensors_.ptr(), i); }
  TensorAddress at(Py_ssize_t i) const { return at_[i]; }
  bool async_finish() const { return from_last(2); }
  bool returns_hook() const { return from_last(1); }
  const nb::tuple& tensors() const { return tensors_; }

 private:
  bool from_last(Py_ssize_t place) const {
    return PyObject_IsTrue(PyTuple_GetItem(options_.ptr(), PyTuple_Size(options_.ptr()) - place)) == 1;
  }

  nb::tuple tensors_, options_;
  TensorAddress at_[count];
};

struct Started {
  nb::object event, hook;
};

// A plan's calls. They are objects of Python, which keep the buffer's mode alive.
template <class Calls>
class LowLatencyCallPlan {
 protected:
  LowLatencyCallPlan(nb::object calls, const LowLatencySetting& setting, std::string name)
      : python_calls_(std::move(calls)),
        calls_(&nb::cast<const Calls&>(python_calls_)),
        setting_(setting),
        name_(std::move(name)) {}

  const LowLatencySetting& setting() const { return setting_; }

  // Throws, with nothing sent, while the hook of the call before the last one is still to be run.
  void check_hooks(void* stream) const {
    const LowLatency& mode = calls_->mode();
    const std::string* late = mode.late_receive();
    if (late != nullptr && !value_or_throw(mode.is_captured(stream)))
      check(Status::invalid(
          "hook: that of the {}() before the last call has not run, allowed: a hook runs before the "
          "second call after its own; where it was dropped, destroy the buffer",
          *late));
  }

  // Runs both phases on the communication stream, or sends on the current one and returns the hook. tensors() are all
  // that the call works on; the hook tells `state`, unless it is None, that it has received.
  // sends_late: until that has happened once with calls of the plan, the hook sends, too.
  template <class Given, class Memory, class Tensors>
  Started start(const Given& given, const Memory& memory, const Tensors& tensors, nb::object state,
                bool sends_late = false) const {
    void* const current = setting_.current_stream();
    check_hooks(current);
    if (!given.returns_hook()) {
      const bool is_async = given.async_finish();
      calls_->run(memory, setting_.stream(), current, !is_async);
      return {is_async ? setting_.finish(tensors()) : setting_.finished(), nb::none()};
    }
    const bool is_late = sends_late && !calls_->was_late();
    Receive<Calls> left{calls_,
                        is_late ? calls_->send_later(memory, current) : calls_->send(memory, current)};
    LowLatency& mode = calls_->mode();
    const uint64_t number = left.sent.number;
    mode.note_unreceived(number, name_);
    return {setting_.finished(),
            nb::cast(ReceiveHook(python_calls_, mode, number, std::move(left), tensors(), std::move(state)))};
  }

 private:
  nb::object python_calls_;
  const Calls* calls_;
  LowLatencySetting setting_;
  std::string name_;
};

class LowLatencyDispatchPlan : LowLatencyCallPlan<DispatchCalls> {
 public:
  // x, topk_idx, topk_weights, expert_stats, wait_cycles
  using Arguments = Given<5>;

  // make: makes what a call fills. agreement: a LowLatencyAgreement. seen(rows, scales): as the caller sees them; None:
  // as they are.
  LowLatencyDispatchPlan(nb::object calls, const LowLatencySetting& setting, nb::object make,
                         nb::object agreement, nb::object seen)
      : LowLatencyCallPlan(std::move(calls), setting, "low_latency_dispatch"),
        outputs_(std::move(make)),
        agreement_(std::move(agreement)),
        key_(agreement_.attr("key")),
        entries_(agreement_.attr("entries")),
        seen_(std::move(seen)) {}

  // filled: what to fill, in the order of make(); None: new tensors.
  nb::tuple call(nb::tuple tensors, nb::tuple options, nb::object x_scales, nb::object filled) const {
    Arguments arguments(std::move(tensors), std::move(options));
    arguments.read_addresses();
    nb::object out[8];
    if (filled.is_none()) outputs_.make(out);
    for (Py_ssize_t i = 0; !filled.is_none() && i < 8; ++i)
      out[i] = made(PySequence_GetItem(filled.ptr(), i));
    return run(arguments, x_scales, out);
  }
  nb::tuple call_known(const Arguments& given) const {
    nb::object out[8];
    outputs_.make(out);
    return run(given, nb::none(), out);
  }

 private:
  nb::tuple run(const Arguments& given, const nb::object& x_scales, const nb::object (&out)[8]) const {
    const auto& [rows, scales, src_info, layout_range, counts, routes, weights, sources] = out;
    const TensorAddress routes_at = address_of(routes);
    const LowLatencyDispatchMemory memory =
        dispatch_memory(given.at(0), address_of(x_scales), given.at(1), given.at(2), given.at(3), given.at(4),
                        address_of(rows), address_of(scales), address_of(src_info), address_of(layout_range),
                        address_of(counts), routes_at, address_of(weights), address_of(sources));
    const nb::object status = setting().status(!given.returns_hook());
    HandleState fresh(agreement_, key_, routes, status, routes_at);
    fresh.is_checked = true;
    const nb::object state = nb::cast(std::move(fresh));
    const auto tensors = [&] {
      return nb::make_tuple(given.tensors(), x_scales, rows, scales, src_info, layout_range, counts, routes,
                            weights, sources);
    };
    const Started started = start(given, memory, tensors, state);
    const std::array<nb::handle, 8> entries{src_info, layout_range, entry(0), entry(1),
                                            entry(2), routes,       entry(3), status};
    const nb::object handle = setting().handle(state, entries);
    const nb::object payload = as_seen(rows, scales);
    if (given[2].is_none()) return nb::make_tuple(payload, counts, handle, started.event, started.hook);
    return nb::make_tuple(payload, counts, weights, sources, handle, started.event, started.hook);
  }
  nb::handle entry(Py_ssize_t place) const { return PyTuple_GetItem(entries_.ptr(), place); }
  nb::object as_seen(const nb::object& rows, const nb::object& scales) const {
    if (scales.is_none()) return rows;
    return seen_.is_none() ? nb::make_tuple(rows, scales) : seen_(rows, scales);
  }

  Outputs outputs_;
  nb::object agreement_, key_;
  nb::tuple entries_;  // of a handle: M, hidden, E and the facts
  nb::object seen_;
};

class LowLatencyCombinePlan : LowLatencyCallPlan<CombineCalls> {
 public:
  // x, topk_idx, topk_weights, wait_cycles
  using Arguments = Given<4>;

  LowLatencyCombinePlan(nb::object calls, const LowLatencySetting& setting, nb::object make)
      : LowLatencyCallPlan(std::move(calls), setting, "low_latency_combine"), outputs_(std::move(make)) {}

  // filled: what to fill; None: a new tensor.
  nb::tuple call(nb::tuple tensors, nb::tuple options, const HandleState& state, nb::object filled,
                 nb::object signals, bool sends_late) const {
    Arguments arguments(std::move(tensors), std::move(options));
    arguments.read_addresses();
    const nb::object combined = filled.is_none() ? new_output() : std::move(filled);
    return run(arguments, state.routes, state.place(), combined, signals, sends_late);
  }
  nb::tuple call_known(const Arguments& given, const nb::object& routes, TensorAddress routes_at) const {
    return run(given, routes, routes_at, new_output(), nb::none(), false);
  }

 private:
  nb::object new_output() const {
    nb::object out[1];
    outputs_.make(out);
    return out[0];
  }
  nb::tuple run(const Arguments& given, const nb::object& routes, TensorAddress routes_at,
                const nb::object& combined, const nb::object& signals, bool sends_late) const {
    const LowLatencyCombineMemory memory =
        combine_memory(given.at(0), given.at(1), given.at(2), routes_at, address_of(combined), given.at(3),
                       address_of(signals), TensorAddress{});
    const auto tensors = [&] { return nb::make_tuple(given.tensors(), routes, combined, signals); };
    const Started started = start(given, memory, tensors, nb::none(), sends_late);
    return nb::make_tuple(combined, started.event, started.hook);
  }

  Outputs outputs_;
};

// plans: LowLatencyDispatchPlans by the signatures of their calls. Returns None, with nothing done, for a call that is to
// be checked.
nb::object known_dispatch(nb::dict plans, nb::tuple tensors, nb::tuple options) {
  LowLatencyDispatchPlan::Arguments arguments(std::move(tensors), std::move(options));
  Signature signature;
  if (!arguments.sign(signature)) return nb::none();
  const nb::object plan = signature.found_in(plans);  // kept, should another thread drop it meanwhile
  if (!plan.is_valid()) return nb::none();
  return nb::cast<const LowLatencyDispatchPlan&>(plan).call_known(arguments);
}

// The same for LowLatencyCombinePlans. A signature ends with the key of the state's agreement.
nb::object known_combine(nb::dict plans, nb::tuple tensors, nb::tuple options, HandleState& state) {
  const TensorAddress routes_at = state.place();
  if (!state.is_ready(routes_at)) return nb::none();
  LowLatencyCombinePlan::Arguments arguments(std::move(tensors), std::move(options));
  Signature signature;
  if (!arguments.sign(signature) || !signature.add_option(state.key)) return nb::none();
  const nb::object plan = signature.found_in(plans);  // kept, should another thread drop it meanwhile
  if (!plan.is_valid()) return nb::none();
  return nb::cast<const LowLatencyCombinePlan&>(plan).call_known(arguments, state.routes, routes_at);
}

}  // namespace

void bind_low_latency_plans(nb::module_& module) {
  using StateCollected = Collected<HandleState, &HandleState::agreement, &HandleState::routes,
                                   &HandleState::status, &HandleState::combine_rows>;
  nb::class_<HandleState>(module, "LowLatencyHandleState", nb::type_slots(StateCollected::slots))
      .def(
          "__init__",
          [](HandleState* self, nb::object agreement, nb::object routes, nb::object status) {
            const TensorAddress place = address_of(routes);
            new (self) HandleState(agreement, agreement.attr("key"), routes, status, place);
          },
          nb::arg("agreement"), nb::arg("routes"), nb::arg("status"))
      .def_ro("agreement", &HandleState::agreement)
      .def_ro("routes", &HandleState::routes)
      .def_rw("combine_rows", &HandleState::combine_rows, nb::arg().none())
      .def_prop_ro("number", &HandleState::number)
      .def_prop_ro("group_key", [](const HandleState& self) { return self.agreement.attr("group_key"); })
      .def_prop_ro("is_in_place", [](const HandleState& self) { return self.is_in_place(self.place()); })
      .def_prop_ro("is_received", &HandleState::is_received)
      .def_rw("is_checked", &HandleState::is_checked)
      .def_prop_ro("is_ready", [](HandleState& self) { return self.is_ready(self.place()); });

  using HookCollected =
      Collected<ReceiveHook, &ReceiveHook::calls, &ReceiveHook::tensors, &ReceiveHook::state>;
  nb::class_<ReceiveHook>(module, "ReceiveHook", nb::type_slots(HookCollected::slots))
      .def("__call__", &ReceiveHook::call);

  nb::class_<LowLatencySetting>(module, "LowLatencySetting")
      .def(nb::init<uint64_t, nb::object, nb::object, nb::object, nb::object, nb::object, nb::tuple,
                    nb::object>(),
           nb::arg("stream"), nb::arg("current_stream").none(), nb::arg("ordinal"), nb::arg("finish"),
           nb::arg("handle_type"), nb::arg("event_type"), nb::arg("unused"), nb::arg("more"));

  nb::class_<LowLatencyDispatchPlan>(module, "LowLatencyDispatchPlan")
      .def(nb::init<nb::object, const LowLatencySetting&, nb::object, nb::object, nb::object>(),
           nb::arg("calls"), nb::arg("setting"), nb::arg("make"), nb::arg("agreement"),
           nb::arg("seen").none())
      .def("__call__", &LowLatencyDispatchPlan::call, nb::arg("tensors"), nb::arg("options"),
           nb::arg("x_scales").none(), nb::arg("filled").none());
  module.def("known_low_latency_dispatch", &known_dispatch);

  nb::class_<LowLatencyCombinePlan>(module, "LowLatencyCombinePlan")
      .def(nb::init<nb::object, const LowLatencySetting&, nb::object>(), nb::arg("calls"), nb::arg("setting"),
           nb::arg("make"))
      .def("__call__", &LowLatencyCombinePlan::call, nb::arg("tensors"), nb::arg("options"), nb::arg("state"),
           nb::arg("filled").none(), nb::arg("signals").none(), nb::arg("sends_late") = false);
  module.def("known_low_latency_combine", &known_combine);
}

}  // namespace weft
