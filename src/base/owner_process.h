// SPDX-License-Identifier: Apache-2.0
//
// OwnerProcess is the process that made an object. A child that fork() made has a copy of every object of its parent, but
// not their threads, connections and ranks: it must neither use nor end them.
//   class Engine { OwnerProcess owner_; };                        // made with the object
//   WEFT_TRY(owner_.check("transfer engine"));                    // where a call begins: kInvalid in a forked child
//   std::shared_ptr<Engine>(made, EndedByOwner{});                // a forked child never runs the destructor
//   static OnePerProcess<Registry> registry;  registry.get()      // a forked child begins with an empty one
// Cost of a check: a load and a compare. Threads: any. A child of vfork() or clone(), which must call exec(), does not count.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/status.h"

namespace weft {

class OwnerProcess {
 public:
  OwnerProcess() : mark_(now_.load(std::memory_order_relaxed)) {
    if (mark_ == 0) mark_ = first_mark();
  }
  bool is_this() const { return mark_ == now_.load(std::memory_order_relaxed); }
  pid_t pid() const { return static_cast<pid_t>(mark_ & UINT32_MAX); }
  // `what` is the object, as its user calls it.
  Status check(const char* what) const { return is_this() ? Status() : refusal(what); }

 private:
  static uint64_t first_mark();
  Status refusal(const char* what) const;

  static std::atomic<uint64_t>
      now_;  // of this process: forks since its first ancestor, then its id; 0 before first_mark()
  uint64_t mark_;
};

// A deleter that leaves objects of another process alone: what they hold stays allocated in the child.
class EndedByOwner {
 public:
  template <class T>
  void operator()(T* object) const {
    if (owner_.is_this()) delete object;
  }

 private:
  OwnerProcess owner_;
};

template <class T>
std::shared_ptr<T> ended_by_owner(std::unique_ptr<T> object) {
  return std::shared_ptr<T>(object.release(), EndedByOwner{});
}

// One T for each process: a forked child makes its own, as that of its parent may be locked. Never destroyed.
template <class T>
class OnePerProcess {
 public:
  T& get() {
    Made* known = made_.load(std::memory_order_acquire);
    while (!known || !known->owner.is_this()) {
      auto fresh = std::make_unique<Made>();
      if (made_.compare_exchange_strong(known, fresh.get(), std::memory_order_acq_rel))
        return fresh.release()->object;
    }
    return known->object;
  }

 private:
  struct Made {
    const OwnerProcess owner;
    T object{};
  };
  std::atomic<Made*> made_{nullptr};
};

}  // namespace weft
