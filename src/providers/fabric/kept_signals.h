// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <array>

namespace weft::provider::fi {

// Puts back, when it goes, what signals did when it came. Providers inside of libfabric (psm3 of release 1.17) take SIGINT
// and SIGTERM as soon as they are loaded, and then end the process without a word to the program, which cannot clean up.
//
//   const KeptSignals kept;
//   dlopen(...);
//
// Threads: a handler that another thread installs meanwhile is lost.
class KeptSignals {
 public:
  KeptSignals() {
    for (size_t i = 0; i < kKept.size(); ++i) sigaction(kKept[i], nullptr, &before_[i]);
  }
  ~KeptSignals() {
    for (size_t i = 0; i < kKept.size(); ++i) sigaction(kKept[i], &before_[i], nullptr);
  }
  KeptSignals(const KeptSignals&) = delete;

 private:
  static constexpr std::array kKept = {SIGHUP, SIGINT,  SIGQUIT, SIGILL,  SIGTRAP, SIGABRT, SIGBUS,
                                       SIGFPE, SIGSEGV, SIGPIPE, SIGTERM, SIGUSR1, SIGUSR2, SIGCHLD};
  std::array<struct sigaction, kKept.size()> before_{};
};

}  // namespace weft::provider::fi
