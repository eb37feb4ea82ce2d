// SPDX-License-Identifier: Apache-2.0
//
// Memory of users that a link was lent for the time of a call, and what peers have lent this rank. A loan is a number below
// kLoans, each rank's own.
//   const uint32_t loan = loans.open(memory);       // kLoans: there is no free one
//   loans.set(theirs, rank, remote);                // a peer has told of one of its own
// Threads: any; a look-up gives a handle that stays valid.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "transfer/engine.h"
#include "transports/proxy/wire.h"

namespace weft::proxy {

class Loans {
 public:
  uint32_t open(std::shared_ptr<transfer::Memory> memory) {
    std::lock_guard lock(mutex_);
    for (uint32_t loan = 0; loan < kLoans; ++loan)
      if (!own_[loan]) return own_[loan] = std::move(memory), loan;
    return kLoans;
  }
  std::shared_ptr<transfer::Memory> own(uint32_t loan) const {
    std::lock_guard lock(mutex_);
    return own_[loan];
  }
  std::shared_ptr<transfer::Memory> close(uint32_t loan) {
    std::lock_guard lock(mutex_);
    return std::exchange(own_[loan], nullptr);
  }
  // What `rank` lends as `loan`; null: nothing any more.
  void set(uint32_t loan, int rank, std::shared_ptr<transfer::Remote> theirs) {
    std::lock_guard lock(mutex_);
    theirs_[{rank, loan}] = std::move(theirs);
  }
  std::shared_ptr<transfer::Remote> of(uint32_t loan, int rank) const {
    std::lock_guard lock(mutex_);
    const auto found = theirs_.find({rank, loan});
    return found == theirs_.end() ? nullptr : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<transfer::Memory> own_[kLoans];
  std::map<std::pair<int, uint32_t>, std::shared_ptr<transfer::Remote>> theirs_;
};

}  // namespace weft::proxy
