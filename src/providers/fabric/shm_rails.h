// SPDX-License-Identifier: Apache-2.0
//
// The end of what libfabric opened for a rail. Over shm it waits for other rails of the process.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>

#include "providers/fabric/library.h"

namespace weft::provider {

// In the order in which they are closed; null: not opened.
using RailParts = std::array<fid*, 5>;

void close_parts(const fi::Library& library, const std::string& nic, const RailParts& parts);

// Rails over shm reach others of their process in place, not through a mapping of their own: libfabric 1.17 ends the
// process where one writes to an endpoint that is closed. So the parts of a rail stay while others are open that may
// not know yet that it is gone. Threads: any.
class ShmRails {
 public:
  static ShmRails& of_process();
  void opened();  // before the rail opens anything
  // Once for each opened(), when nobody uses the parts any more: they belong to this object from now on.
  void closed(const fi::Library& library, const std::string& nic, const RailParts& parts);

 private:
  struct Gone {
    const fi::Library* library;
    std::string nic;
    RailParts parts;
  };

  std::mutex mutex_;
  size_t open_ = 0;
  std::deque<Gone> gone_;  // the longest first
};

}  // namespace weft::provider
