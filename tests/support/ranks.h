// SPDX-License-Identifier: Apache-2.0
//
// Runs a test's body on several ranks, as threads of this process or as forked processes.
//   run_thread_ranks(3, [](std::shared_ptr<Bootstrap> boot) { ... EXPECT_... });
//   run_process_ranks(3, body);         // a failed expectation in a child prints there and fails the test
//   here
// Threads: one run at a time.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/bootstrap.h"

namespace weft::testing {

using RankBody = std::function<void(std::shared_ptr<Bootstrap>)>;

enum class RanksAre { kThreads, kProcesses };

void run_thread_ranks(int ranks, const RankBody& body);
void run_process_ranks(int ranks, const RankBody& body);

inline void run_ranks(RanksAre kind, int ranks, const RankBody& body) {
  kind == RanksAre::kThreads ? run_thread_ranks(ranks, body) : run_process_ranks(ranks, body);
}

inline std::string to_string(RanksAre kind) {
  return kind == RanksAre::kThreads ? "Threads" : "Processes";
}

// Ranks that are forked processes: a bootstrap over memory that parent and children share. Made before the
// fork.
class ForkRendezvous {
 public:
  explicit ForkRendezvous(int ranks);
  ~ForkRendezvous();
  ForkRendezvous(const ForkRendezvous&) = delete;
  ForkRendezvous& operator=(const ForkRendezvous&) = delete;
  std::shared_ptr<Bootstrap> bootstrap(int rank) const;  // in the child; must not outlive this object

 private:
  const int ranks_;
  void* area_;
};

}  // namespace weft::testing
