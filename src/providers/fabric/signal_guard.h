// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <array>

namespace weft::provider::fi {

// Restores at its end the signal actions of its beginning. Providers inside of libfabric (psm3 of release 1.17) install
// actions for SIGINT and SIGTERM when they are loaded, which end the process before the program can clean up.
//
//   const SignalGuard guard;
//   dlopen(...);
//
// Threads: a handler that another thread installs meanwhile is lost.
class SignalGuard {
 public:
  SignalGuard() {
    for (size_t i = 0; i < kGuarded.size(); ++i) sigaction(kGuarded[i], nullptr, &before_[i]);
  }
  ~SignalGuard() {
    for (size_t i = 0; i < kGuarded.size(); ++i) sigaction(kGuarded[i], &before_[i], nullptr);
  }
  SignalGuard(const SignalGuard&) = delete;

 private:
  static constexpr std::array kGuarded = {SIGHUP, SIGINT,  SIGQUIT, SIGILL,  SIGTRAP, SIGABRT, SIGBUS,
                                          SIGFPE, SIGSEGV, SIGPIPE, SIGTERM, SIGUSR1, SIGUSR2, SIGCHLD};
  std::array<struct sigaction, kGuarded.size()> before_{};
};

}  // namespace weft::provider::fi
