// SPDX-License-Identifier: Apache-2.0
#include "bind/leases.h"

#include <nanobind/stl/pair.h>

#include <unordered_map>
#include <utility>

#include "bind/bind.h"

namespace nb = nanobind;

namespace weft {
namespace {

// Of the process, under the GIL. They live as long as it does: tensors may die at its very end.
struct Shares {
  std::unordered_map<uint64_t, PieceShare*> out;  // by the address at which the storage begins
  // What resize_(0) freed, by torch's object of the storage, as long as that is alive: another may begin there by then.
  std::unordered_map<uint64_t, PieceShare*> freed;
};

Shares& shares() {
  static auto* const once = new Shares;
  return *once;
}

// What Python tells this file once.
struct FromPython {
  nb::object is_finalizing;  // sys.is_finalizing
  nb::object profiler;       // torch.autograd.profiler
  nb::object tell;           // weft.runtime.profiled_memory.tell
};

FromPython& from_python() {
  static auto* const once = new FromPython;
  return *once;
}

// At the end of the interpreter there is nothing left to give back to.
bool is_ending() {
  return !nb::is_alive() || nb::cast<bool>(from_python().is_finalizing());
}

// A destructor must not throw.
template <class Run>
void unless_it_raises(const char* what, Run run) noexcept {
  try {
    run();
  } catch (nb::python_error& error) {
    error.discard_as_unraisable(what);
  }
}

void forget(std::unordered_map<uint64_t, PieceShare*>& by_key, uint64_t key, const PieceShare* share) {
  const auto found = by_key.find(key);
  if (found != by_key.end() && found->second == share) by_key.erase(found);
}

}  // namespace

nb::object Pieces::lease(nb::object pieces, nb::object owner, uint64_t offset) {
  const uint64_t home = nb::cast<const Pieces&>(pieces).now();
  return nb::cast(new PieceLease(std::move(pieces), std::move(owner), offset, home),
                  nb::rv_policy::take_ownership);
}

void Pieces::take_back(nb::handle pieces, uint64_t offset, uint64_t home, const nb::dict& recorded) {
  const auto& self = nb::cast<const Pieces&>(pieces);
  if (self.current_.is_none()) {
    self.give_back_(offset);
    return;
  }
  const uint64_t now = self.now();
  const bool is_simple = recorded.size() == 0 && now == home && !self.give_back_after_.is_none();
  if (is_simple && nb::cast<bool>(self.give_back_after_(offset, now))) return;
  pieces.attr("take_later")(offset, home, now, recorded);
}

PieceLease::~PieceLease() {
  unless_it_raises("a piece of a window that goes back", [this] {
    if (!is_ending() && maker_.is_this()) Pieces::take_back(pieces_, offset_, home_, recorded);
  });
}

PieceShare::~PieceShare() {
  unless_it_raises("the end of a storage in a window", [this] {
    forget(shares().freed, freed_storage_, this);
    forget(shares().out, address_, this);
    if (!is_ending()) let_go();
  });
}

void PieceShare::lies_at(uint64_t address, uint64_t bytes, nb::handle device) {
  address_ = address;
  shares().out[address] = this;
  const FromPython& python = from_python();
  if (python.profiler.attr("_is_profiler_enabled").ptr() != Py_True) return;
  if (!nb::cast<bool>(python.tell(address, bytes, device))) return;
  told_bytes_ = bytes;
  device_ = nb::borrow(device);
}

void PieceShare::free(uint64_t storage) {
  freed_storage_ = storage;
  shares().freed[storage] = this;
  let_go();
}

void PieceShare::let_go() {
  forget(shares().out, address_, this);  // another storage may begin there by now
  const nb::object let = std::exchange(lease_, nb::none());
  if (told_bytes_ != 0)
    from_python().tell(address_, -static_cast<int64_t>(std::exchange(told_bytes_, 0)), device_);
}

void bind_leases(nb::module_& module) {
  nb::class_<Pieces>(module, "Pieces", "The pieces of one window.")
      .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("give_back"), nb::arg("current").none(),
           nb::arg("give_back_after").none())
      .def("lease", &Pieces::lease, nb::arg("owner"), nb::arg("offset"),
           "The lease of a piece. owner: what keeps its memory.");
  nb::class_<PieceLease>(module, "PieceLease", "One piece of a window that is out.")
      .def_ro("recorded", &PieceLease::recorded)
      .def("share", [](nb::object self) { return new PieceShare(std::move(self)); });
  nb::class_<PieceShare>(module, "PieceShare", "What one storage has of a piece, which it keeps alive.")
      .def("lies_at", &PieceShare::lies_at, nb::arg("address"), nb::arg("num_bytes"), nb::arg("device"));
  module.def(
      "watch_shares",
      [](nb::object is_finalizing, nb::object profiler, nb::object tell) {
        from_python() = {std::move(is_finalizing), std::move(profiler), std::move(tell)};
      },
      nb::arg("is_finalizing"), nb::arg("profiler"), nb::arg("tell"));
  module.def("has_shares", [] { return !shares().out.empty() || !shares().freed.empty(); });
  module.def(
      "is_freed", [](uint64_t storage) { return shares().freed.count(storage) != 0; }, nb::arg("storage"));
  module.def(
      "lease_of",
      [](uint64_t address) -> nb::object {
        const auto found = shares().out.find(address);
        return found == shares().out.end() ? nb::none() : found->second->lease();
      },
      nb::arg("address"), "The lease of the piece in which a storage begins there, else None.");
  module.def(
      "free_share",
      [](uint64_t storage, uint64_t address) {
        const auto found = shares().out.find(address);
        if (found == shares().out.end()) return false;
        found->second->free(storage);
        return true;
      },
      nb::arg("storage"), nb::arg("address"),
      "Lets go of a piece; false where no storage in one begins there.");
  module.def("count_shares", [] { return std::pair(shares().out.size(), shares().freed.size()); });
}

}  // namespace weft
