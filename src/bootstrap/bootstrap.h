// SPDX-License-Identifier: Apache-2.0
//
// A Bootstrap is how ranks find each other before any window exists: one collective that moves a few hundred
// bytes.
//   std::vector<std::shared_ptr<Bootstrap>> ranks = thread_bootstraps(4);  // as threads of this process
//   Result<std::vector<std::string>> all = ranks[0]->all_gather(mine, Deadline::after_s(10));
// Python implements it over torch process groups, torchrun's environment, TCP and MPI
// (weft/runtime/bootstrap.py). Threads: one call at a time per object.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/owner_process.h"
#include "base/status.h"

namespace weft {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Gives `mine` to every rank and returns everyone's bytes in rank order. Collective: every rank calls it
  // equally often. Errors: kPeerLost when ranks stay away past `until`, naming them; kSystem when the way
  // itself fails.
  virtual Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) = 0;

  // kInvalid in a forked child: its parent is the rank.
  Status check_owner() const { return owner_.check("bootstrap"); }

 protected:
  bool is_of_this_process() const { return owner_.is_this(); }

 private:
  const OwnerProcess owner_;
};

// Bootstraps of `ranks` ranks that are threads of this process, in rank order. Each is to be used by one
// thread.
std::vector<std::shared_ptr<Bootstrap>> thread_bootstraps(int ranks);

}  // namespace weft
