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
  // A stretch of a window, registered; places count from the window's first byte. Null: the network may not go there.
  struct Part {
    uint64_t begin = 0, bytes = 0;
    std::shared_ptr<transfer::Memory> memory;

    bool holds(uint64_t place, uint64_t length) const {
      return place >= begin && length <= bytes && place - begin <= bytes - length;
    }
  };
  struct Own {
    std::byte* base = nullptr;  // of its first byte: that of the host part
    uint64_t bytes = 0;         // of the window when it was registered
    Part host;                  // where threads of the host load and store
    Part device;
    uint32_t use = 0;

    // Where the host finds what stands there; null: not in its part.
    std::byte* at(uint64_t place, uint64_t length) const {
      return base && host.holds(place, length) ? base + place : nullptr;
    }
    // The part that holds it; null: none does.
    const Part* part(uint64_t place, uint64_t length) const {
      if (host.memory && host.holds(place, length)) return &host;
      return device.memory && device.holds(place, length) ? &device : nullptr;
    }
  };
  // What a peer has granted of its window: parts as here.
  struct Theirs {
    std::shared_ptr<transfer::Remote> host, device;
  };
  // Whether the host finds it there.
  bool is_in_host(uint32_t region, uint64_t place, uint64_t length) const {
    std::lock_guard lock(mutex_);
    const auto& own = rows_[region].own;
    return !own.empty() && own.back().at(place, length);
  }
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
  Theirs of(uint32_t region, int rank) const {
    std::lock_guard lock(mutex_);
    const auto& theirs = rows_[region].theirs;
    return static_cast<size_t>(rank) < theirs.size() ? theirs[static_cast<size_t>(rank)] : Theirs();
  }
  // A window was made or has grown: what was granted before stays valid for what is under way.
  void add(uint32_t region, Own own) {
    std::lock_guard lock(mutex_);
    own.use = rows_[region].use;
    rows_[region].own.push_back(std::move(own));
  }
  void set_theirs(uint32_t region, std::vector<Theirs> theirs, std::vector<Name> names) {
    std::lock_guard lock(mutex_);
    rows_[region].theirs = std::move(theirs);
    rows_[region].names = std::move(names);
  }
  // Takes out the registrations of more than `bytes` bytes; with 0 the region is free again.
  std::vector<std::shared_ptr<transfer::Memory>> cut(uint32_t region, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<transfer::Memory>> gone;
    std::vector<Own>& own = rows_[region].own;
    for (; !own.empty() && own.back().bytes > bytes; own.pop_back())
      for (const auto& memory : {own.back().host.memory, own.back().device.memory})
        if (memory) gone.push_back(memory);
    if (bytes == 0) {
      rows_[region].theirs.clear();
      rows_[region].names.clear();
      rows_[region].is_open = false;
    }
    return gone;
  }

 private:
  struct Row {
    std::vector<Own> own;        // one for each time that it grew; the last is all of it
    std::vector<Theirs> theirs;  // by rank
    std::vector<Name> names;     // by rank
    bool is_open = false;
    uint32_t use = 0;
  };
  mutable std::mutex mutex_;
  Row rows_[kRegions];
};

}  // namespace weft::proxy
