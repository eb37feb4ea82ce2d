// SPDX-License-Identifier: Apache-2.0
//
// Vector clocks of the weak machine: what an agent knows. An agent is a lane of a kernel, a thread of a host, or one bulk
// copy; its own time grows with every step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace weft::weak {

class Clock {
 public:
  uint32_t of(uint32_t agent) const { return agent < times_.size() ? times_[agent] : 0; }
  void advance(uint32_t agent, uint32_t time) {
    if (agent >= times_.size()) times_.resize(agent + 1);
    times_[agent] = std::max(times_[agent], time);
  }
  void join(const Clock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<uint32_t> times_;
};

// By which way an access reaches memory: threads, or the engine of bulk copies, in a block's shared memory or elsewhere. What
// a thread knows for one proxy it does not know for another, until a fence.
enum Proxy : uint8_t { kGeneric, kAsyncShared, kAsyncGlobal, kProxies };

struct View {
  std::array<Clock, kProxies> of;

  void join(const View& other) {
    for (uint32_t p = 0; p < kProxies; ++p) of[p].join(other.of[p]);
  }
  // What an agent did until `time`, by any proxy.
  void advance(uint32_t agent, uint32_t time) {
    for (Clock& clock : of) clock.advance(agent, time);
  }
  // Everything that is known by some proxy, for all.
  void level() {
    of[kGeneric].join(of[kAsyncShared]);
    of[kGeneric].join(of[kAsyncGlobal]);
    of[kAsyncShared] = of[kAsyncGlobal] = of[kGeneric];
  }
};

}  // namespace weft::weak
