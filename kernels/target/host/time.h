// SPDX-License-Identifier: Apache-2.0
//
// Clocks of host kernels, and how long a loop that waits pauses.
#pragma once

#include <sched.h>
#include <time.h>

#include "kernels/target/host/groups.h"

namespace weft {

inline uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// For measuring waits. There is no portable cycle counter, so these are nanoseconds.
inline uint64_t cycles() {
  return now_ns();
}

// About that long, at most 1 ms; for polls that are in no hurry.
inline void pause_ns(uint32_t /*ns*/) {
  sched_yield();
}

// A loop that waits looks at the clock and the fault box after so many looks in vain, for the first time
// after kFirstCheck. Both are near here.
inline constexpr uint32_t kLooksPerCheck = 64, kFirstCheck = 0;

namespace pausing {
// One pause of a polling loop that has polled `polls` times. There may be more ranks than cores, so it yields
// soon; and there may be more busy processes than cores, who would be given a whole time slice for every
// yield, so it then sleeps: who sleeps is woken before those.
inline void once(uint32_t polls) {
  if (host_thread.help.once && host_thread.help.once(host_thread.help.what)) return;
  if (polls < 16) return;
  if (polls < 128) {
    sched_yield();
    return;
  }
  const timespec nap{0, 20'000};
  nanosleep(&nap, nullptr);
}
}  // namespace pausing

inline void pause(uint32_t polls) {
  if (!host_thread.waited_ns || (polls < 16 && !host_thread.help.once)) return pausing::once(polls);
  const uint64_t since_ns = now_ns();
  pausing::once(polls);
  *host_thread.waited_ns += now_ns() - since_ns;
}
// The same for a word in shared memory.
inline void pause_near(uint32_t polls) {
  pause(polls);
}

}  // namespace weft
