// SPDX-License-Identifier: Apache-2.0
//
// The windows of a link, as its proxy threads see them: the own memory, and what each peer has granted.
// Threads: any; a look-up gives a copy that stays valid.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "transfer/engine.h"
#include "transports/proxy/wire.h"

namespace weft::proxy {

class Regions {
 public:
  struct Own {
    std::byte* base = nullptr;
    uint64_t bytes = 0;
    std::shared_ptr<transfer::Memory> memory;
  };

  Own own(uint32_t region) const {
    std::lock_guard lock(mutex_);
    return rows_[region].own.empty() ? Own() : rows_[region].own.back();
  }
  std::shared_ptr<transfer::Remote> of(uint32_t region, int rank) const {
    std::lock_guard lock(mutex_);
    const auto& remotes = rows_[region].remotes;
    return static_cast<size_t>(rank) < remotes.size() ? remotes[static_cast<size_t>(rank)] : nullptr;
  }
  // A window was made or has grown: what was granted before stays valid for what is under way.
  void add(uint32_t region, Own own) {
    std::lock_guard lock(mutex_);
    rows_[region].own.push_back(std::move(own));
  }
  void set_remotes(uint32_t region, std::vector<std::shared_ptr<transfer::Remote>> remotes) {
    std::lock_guard lock(mutex_);
    rows_[region].remotes = std::move(remotes);
  }
  // Takes out the registrations of more than `bytes` bytes.
  std::vector<std::shared_ptr<transfer::Memory>> cut(uint32_t region, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<transfer::Memory>> gone;
    std::vector<Own>& own = rows_[region].own;
    for (; !own.empty() && own.back().bytes > bytes; own.pop_back()) gone.push_back(own.back().memory);
    if (bytes == 0) rows_[region].remotes.clear();
    return gone;
  }

 private:
  struct Row {
    std::vector<Own> own;  // one for each time that it grew; the last is all of it
    std::vector<std::shared_ptr<transfer::Remote>> remotes;  // by rank
  };
  mutable std::mutex mutex_;
  Row rows_[kRegions];
};

}  // namespace weft::proxy
