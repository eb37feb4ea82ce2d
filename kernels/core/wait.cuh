// SPDX-License-Identifier: Apache-2.0
//
// wait.cuh: the one way device code waits for a signal. Signals are 64-bit counters in local memory that only
// grow; a wait acquires, so everything its writer released is visible after it. Every wait is bounded: when
// the time is up, or another warp has already raised a fault, it returns false.
//
// A rank that gave up has wrong results, and must not send them to a rank that is merely late. Within its
// launch a kernel sends nothing that it made from missing data. Later launches, which the host may have
// queued before it knew, send nothing at all: see is_void().
#pragma once

#include "kernels/core/trace.cuh"

namespace weft {

// The wait settings of every kernel: how long to wait, where to report a fault, where to trace spans.
struct WaitRule {
  uint64_t timeout_ns;
  FaultBox* fault;
  uint32_t self;
  uint32_t reserved;
  TraceLog* trace = nullptr;    // null: nowhere
  uint32_t* gave_up = nullptr;  // 1 once a launch of this rank gave up; in device memory. Null: not kept

  WEFT_DEVICE bool is_raised() const { return load_relaxed(&fault->raised) != 0; }
};

// Whether an earlier launch gave up: this one sends nothing then, and raises that too.
WEFT_DEVICE bool is_void(const WaitRule& rule, uint32_t gave_up) {
  if (gave_up == 0) return false;
  raise(rule.fault, Site::kGaveUp, rule.self, rule.self, 0, 0, 0);
  return true;
}
WEFT_DEVICE uint32_t load_gave_up(const WaitRule& rule) {
  return rule.gave_up ? load_relaxed(rule.gave_up) : 0;
}

// Whether a loop reads the clock and the fault box after `looks` polls in vain.
WEFT_DEVICE constexpr bool is_check_due(uint32_t looks) {
  return looks % kLooksPerCheck == kFirstCheck;
}

// Call after a wait in vain. All ranks find faults other than a lost peer alike, and the next launch works
// again.
WEFT_DEVICE void note_loss(const WaitRule& rule, bool is_late) {
  const bool is_lost =
      is_late || (load_acquire(&rule.fault->raised) != 0 && rule.fault->site == Site::kPeerDied);
  if (is_lost) store_relaxed(rule.gave_up, uint32_t{1});
}

// How long one thread waits for one thing. A Rule is a WaitRule that may know a nearer place to look for a fault.
template <class Rule>
struct PatienceBy {
  const Rule& rule;
  uint64_t since_ns = 0;
  uint64_t waited_ns = 0;

  // Call after poll number `looks` in vain. True: time is up, or another warp has raised a fault.
  WEFT_DEVICE bool ends(uint32_t looks) {
    if (!is_check_due(looks)) return false;
    const uint64_t now = now_ns();
    if (since_ns == 0) since_ns = now;
    waited_ns = now - since_ns;
    if (!is_late() && !rule.is_raised()) return false;
    if (rule.gave_up) note_loss(rule, is_late());
    return true;
  }
  WEFT_DEVICE bool is_late() const { return waited_ns > rule.timeout_ns; }
};
using Patience = PatienceBy<WaitRule>;

// Polls came() from one thread until it returns true. False: time is up, or another warp has raised a fault.
template <class Rule, class Came>
WEFT_DEVICE bool poll(const Rule& rule, uint64_t& waited_ns, Came came) {
  PatienceBy<Rule> patience{rule};
  for (uint32_t looks = 0; !came(); ++looks) {
    pause(looks);
    if (!patience.ends(looks)) continue;
    waited_ns = patience.waited_ns;
    return false;
  }
  return true;
}

// The same from a warp, which polls and gives up together: came() must return the same in every lane.
template <class Came>
WEFT_DEVICE bool poll_together(Warp warp, const WaitRule& rule, uint64_t& waited_ns, Came came) {
  Patience patience{rule};
  for (uint32_t looks = 0; !came(); ++looks) {
    pause(looks);
    if (!is_check_due(looks) || !warp.any(patience.ends(looks))) continue;
    waited_ns = patience.waited_ns;
    return false;
  }
  return true;
}

// Polls one signal from one thread. Returns whether it reached `want`; `seen` is the last value read. The signal may
// lie in memory of the host, which a peek() of a GPU's own memory need not see change.
WEFT_DEVICE bool poll_host_signal(const uint64_t* signal, uint64_t want, const WaitRule& rule, uint64_t& seen,
                                  uint64_t& waited_ns) {
  if (!poll(rule, waited_ns, [&] { return (seen = load_relaxed(signal)) >= want; })) return false;
  load_acquire(signal);
  return true;
}
// The same of a signal in the rank's own memory, or where it shares that with all its peers.
WEFT_DEVICE bool poll_signal(const uint64_t* signal, uint64_t want, const WaitRule& rule, uint64_t& seen,
                             uint64_t& waited_ns) {
  if (!poll(rule, waited_ns, [&] { return (seen = peek(signal)) >= want; })) return false;
  load_acquire(signal);
  return true;
}

// Waits until signal(peer) reaches `want` for every peer that `expects(peer)`; peers are shared out over the
// lanes. Returns false in every lane when one of them gave up. on_lost(peer, seen, waited_ns) runs in the
// lane that did.
template <class SignalOf, class Expects, class OnLost>
WEFT_DEVICE bool wait_peers(Warp warp, uint32_t peers, uint64_t want, Site site, const WaitRule& rule,
                            SignalOf signal_of, Expects expects, OnLost on_lost) {
  bool lost = false;
  for (uint32_t peer = warp.rank(); peer < peers; peer += warp.size()) {
    if (!expects(peer)) continue;
    uint64_t seen = 0;
    uint64_t waited_ns = 0;
    const Span span(rule.trace, site, peer);
    if (poll_signal(signal_of(peer), want, rule, seen, waited_ns)) continue;
    on_lost(peer, seen, waited_ns);
    lost = true;
  }
  warp.sync();  // what a lane has acquired, all of the warp have: a vote alone orders no memory
  return !warp.any(lost);
}

// The common case: every peer must come, and one that does not is a fault.
template <class SignalOf>
WEFT_DEVICE bool wait_all_peers(Warp warp, uint32_t peers, uint64_t want, Site site, const WaitRule& rule,
                                SignalOf signal_of) {
  return wait_peers(
      warp, peers, want, site, rule, signal_of, [](uint32_t) { return true; },
      [&](uint32_t peer, uint64_t seen, uint64_t waited_ns) {
        raise(rule.fault, site, rule.self, peer, want, seen, waited_ns);
      });
}

}  // namespace weft
