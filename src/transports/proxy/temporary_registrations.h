// SPDX-License-Identifier: Apache-2.0
//
// Memory of users that is registered at a link for the time of a call, and such registrations of peers. A registration
// is a number of its owner's: a place below kTemporaries and the use of that place (wire.h).
//   const std::optional<uint32_t> registration = temporary.open(memory);  // none: no place is free
//   temporary.set(theirs, rank, remote);                                  // a peer has announced one of its own
// Threads: any; a look-up gives a handle that stays valid.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "transfer/engine.h"
#include "transports/proxy/wire.h"

namespace weft::proxy {

class TemporaryRegistrations {
 public:
  std::optional<uint32_t> open(std::shared_ptr<transfer::Memory> memory) {
    std::lock_guard lock(mutex_);
    for (uint32_t place = 0; place < kTemporaries; ++place) {
      if (own_[place].memory) continue;
      own_[place].memory = std::move(memory);
      return number(place);
    }
    return {};
  }
  // Null: it is over.
  std::shared_ptr<transfer::Memory> own(uint32_t registration) const {
    std::lock_guard lock(mutex_);
    return number(registration % kTemporaries) == registration ? own_[registration % kTemporaries].memory
                                                               : nullptr;
  }
  std::shared_ptr<transfer::Memory> close(uint32_t registration) {
    std::lock_guard lock(mutex_);
    Own& own = own_[registration % kTemporaries];
    own.use = (own.use + 1) % kTemporaryUses;
    return std::exchange(own.memory, nullptr);
  }

  // What `rank` has announced as `registration`; null: it is over.
  void set(uint32_t registration, int rank, std::shared_ptr<transfer::Remote> theirs) {
    std::lock_guard lock(mutex_);
    theirs_[{rank, registration % kTemporaries}] = {registration, std::move(theirs)};
  }
  std::shared_ptr<transfer::Remote> of(uint32_t registration, int rank) const {
    std::lock_guard lock(mutex_);
    const auto found = theirs_.find({rank, registration % kTemporaries});
    return found != theirs_.end() && found->second.first == registration ? found->second.second : nullptr;
  }

 private:
  struct Own {
    std::shared_ptr<transfer::Memory> memory;
    uint32_t use = 0;
  };
  uint32_t number(uint32_t place) const { return own_[place].use * kTemporaries + place; }

  mutable std::mutex mutex_;
  Own own_[kTemporaries];
  std::map<std::pair<int, uint32_t>, std::pair<uint32_t, std::shared_ptr<transfer::Remote>>> theirs_;
};

}  // namespace weft::proxy
