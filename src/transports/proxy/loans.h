// SPDX-License-Identifier: Apache-2.0
//
// Memory of users that a link was lent for the time of a call, and what peers have lent this rank. A loan is a number of its
// owner's: a place below kLoans and the use of that place (wire.h).
//   const std::optional<uint32_t> loan = loans.open(memory);  // none: no place is free
//   loans.set(theirs, rank, remote);                           // a peer has told of one of its own
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

class Loans {
 public:
  std::optional<uint32_t> open(std::shared_ptr<transfer::Memory> memory) {
    std::lock_guard lock(mutex_);
    for (uint32_t place = 0; place < kLoans; ++place) {
      if (own_[place].memory) continue;
      own_[place].memory = std::move(memory);
      return number(place);
    }
    return {};
  }
  // Null: it is over.
  std::shared_ptr<transfer::Memory> own(uint32_t loan) const {
    std::lock_guard lock(mutex_);
    return number(loan % kLoans) == loan ? own_[loan % kLoans].memory : nullptr;
  }
  std::shared_ptr<transfer::Memory> close(uint32_t loan) {
    std::lock_guard lock(mutex_);
    Own& own = own_[loan % kLoans];
    own.use = (own.use + 1) % kLoanUses;
    return std::exchange(own.memory, nullptr);
  }

  // What `rank` lends as `loan`; null: nothing any more.
  void set(uint32_t loan, int rank, std::shared_ptr<transfer::Remote> theirs) {
    std::lock_guard lock(mutex_);
    theirs_[{rank, loan % kLoans}] = {loan, std::move(theirs)};
  }
  std::shared_ptr<transfer::Remote> of(uint32_t loan, int rank) const {
    std::lock_guard lock(mutex_);
    const auto found = theirs_.find({rank, loan % kLoans});
    return found != theirs_.end() && found->second.first == loan ? found->second.second : nullptr;
  }

 private:
  struct Own {
    std::shared_ptr<transfer::Memory> memory;
    uint32_t use = 0;
  };
  uint32_t number(uint32_t place) const { return own_[place].use * kLoans + place; }

  mutable std::mutex mutex_;
  Own own_[kLoans];
  std::map<std::pair<int, uint32_t>, std::pair<uint32_t, std::shared_ptr<transfer::Remote>>> theirs_;
};

}  // namespace weft::proxy
