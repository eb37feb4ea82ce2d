// SPDX-License-Identifier: Apache-2.0
//
// The windows of a link, as its proxy threads see them: the own memory, and what each peer has granted. A region
// is a number for a window while it lives; later windows use it again, each under the next use, so that what comes
// late for an earlier one is known as such.
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
    uint32_t use = 0;
  };
  // What a peer calls a window.
  struct Name {
    uint32_t region = 0, use = 0;
  };

  Own own(uint32_t region) const {
    std::lock_guard lock(mutex_);
    return rows_[region].own.empty() ? Own() : rows_[region].own.back();
  }
  Name name_at(uint32_t region, int rank) const {
    std::lock_guard lock(mutex_);
    const auto& names = rows_[region].names;
    return static_cast<size_t>(rank) < names.size() ? names[static_cast<size_t>(rank)] : Name();
  }
  // A region that no window has now, for its next use; kRegions where there is none.
  uint32_t open() {
    std::lock_guard lock(mutex_);
    uint32_t region = 0;
    while (region < kRegions && rows_[region].is_open) ++region;
    if (region < kRegions) {
      rows_[region].is_open = true;
      rows_[region].use = (rows_[region].use + 1) % kUses;
    }
    return region;
  }
  uint32_t use(uint32_t region) const {
    std::lock_guard lock(mutex_);
    return rows_[region].use;
  }
  std::shared_ptr<transfer::Remote> of(uint32_t region, int rank) const {
    std::lock_guard lock(mutex_);
    const auto& remotes = rows_[region].remotes;
    return static_cast<size_t>(rank) < remotes.size() ? remotes[static_cast<size_t>(rank)] : nullptr;
  }
  // A window was made or has grown: what was granted before stays valid for what is under way.
  void add(uint32_t region, Own own) {
    std::lock_guard lock(mutex_);
    own.use = rows_[region].use;
    rows_[region].own.push_back(std::move(own));
  }
  void set_remotes(uint32_t region, std::vector<std::shared_ptr<transfer::Remote>> remotes,
                   std::vector<Name> names) {
    std::lock_guard lock(mutex_);
    rows_[region].remotes = std::move(remotes);
    rows_[region].names = std::move(names);
  }
  // Takes out the registrations of more than `bytes` bytes; with 0 the region is free again.
  std::vector<std::shared_ptr<transfer::Memory>> cut(uint32_t region, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<transfer::Memory>> gone;
    std::vector<Own>& own = rows_[region].own;
    for (; !own.empty() && own.back().bytes > bytes; own.pop_back()) gone.push_back(own.back().memory);
    if (bytes == 0) {
      rows_[region].remotes.clear();
      rows_[region].names.clear();
      rows_[region].is_open = false;
    }
    return gone;
  }

 private:
  struct Row {
    std::vector<Own> own;  // one for each time that it grew; the last is all of it
    std::vector<std::shared_ptr<transfer::Remote>> remotes;  // by rank
    std::vector<Name> names;                                 // by rank
    bool is_open = false;
    uint32_t use = 0;
  };
  mutable std::mutex mutex_;
  Row rows_[kRegions];
};

}  // namespace weft::proxy
