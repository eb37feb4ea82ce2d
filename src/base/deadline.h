// SPDX-License-Identifier: Apache-2.0
//
// Deadline is a point in time that a wait may not pass; wait_until() is the one host-side way to poll for
// something.
//   Deadline until = Deadline::after_s(config().timeout_s);
//   if (!wait_until(until, [&] { return done.load(); })) return Status::make(Code::kPeerLost, ...);
// Waiting spins briefly, then yields, then sleeps: with more waiting threads than cores a bare spin starves
// the peer.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace weft {

// Longer waits are cut to this, eleven days: clocks count nanoseconds, and "forever" must not wrap into the
// past.
inline constexpr double kLongestWait_s = 1e6;

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after_s(double seconds) {
    const std::chrono::duration<double> wait(std::min(seconds, 2 * kLongestWait_s));
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(wait));
  }
  bool passed() const { return Clock::now() >= at_; }
  double left_s() const { return std::chrono::duration<double>(at_ - Clock::now()).count(); }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

// One pause of a polling loop that has already polled `polls` times.
inline void back_off(unsigned polls) {
  if (polls < 64) return;
  if (polls < 4096) {
    sched_yield();
    return;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

// Polls `ready` until it is true or the deadline passes; returns whether it became true. In between it calls
// `progress`, and pauses less when that returned true, which means that it did some work.
template <class Ready, class Progress>
bool wait_until(Deadline until, Ready ready, Progress progress) {
  for (unsigned polls = 0, idle = 0; !ready(); ++polls) {
    if ((polls & 63) == 63 && until.passed()) return ready();
    idle = progress() ? 0 : idle + 1;
    back_off(idle);
  }
  return true;
}

template <class Ready>
bool wait_until(Deadline until, Ready ready) {
  return wait_until(until, ready, [] { return false; });
}

}  // namespace weft
