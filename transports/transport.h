// SPDX-License-Identifier: Apache-2.0
//
// A Transport is one way for ranks to reach each other. What it can do is data (Caps), and which one is used
// for a peer is a pure function of that data and the facts of the two ranks.
//   for (const Candidate& c : candidates(device)) show(c.transport->name, c.caps);       // `weft info`
//   WEFT_TRY_ASSIGN(auto to_peer, select_transports(candidates(device), facts, rank, "auto"));
// Adding one: a folder transports/<name>/ and one line in transports.cc.
// Threads: any; everything here is constant or a value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/device.h"
#include "base/status.h"
#include "topology/topology.h"

namespace weft {

// How device code gets at a peer: by loads and stores into its window, or through something that carries them
// out.
enum class Reach { kMapped, kPort };

// Which earlier writes are visible to whoever sees a later one, without a signal in between.
enum class Ordering {
  kNone,     // any order
  kSignals,  // a signal comes after every earlier put on its channel; puts among themselves in any order
};

struct Caps {
  Reach reach = Reach::kMapped;
  bool needs_registration = false;  // memory outside windows must be registered before it is used
  bool has_atomics = false;         // 64-bit add at the peer
  Ordering ordering = Ordering::kNone;
  uint64_t max_put_bytes = 0;    // of one put
  double latency_us = 0;         // estimate: small put with signal until the peer sees it
  double bandwidth_gb_s = 0;     // estimate: large puts of one rank to all its peers, 10^9 bytes per second
  std::string unusable_because;  // empty where it can be used on this machine

  bool is_usable() const { return unusable_because.empty(); }
};

struct Transport {
  const char* name;        // as in WEFT_TRANSPORT
  const char* carried_by;  // one line for people
  Caps (*caps)(Device);    // probes this machine; never fails: says why it is unusable instead
  // Why it cannot carry data from `self` to `peer`; empty when it can. Pure.
  std::string (*refuses)(const RankFacts& self, const RankFacts& peer);
};

// Every transport that Weft has, best first.
const std::vector<Transport>& transports();

struct Candidate {
  const Transport* transport;
  Caps caps;
};

// transports() with their capabilities for `device` on this machine.
std::vector<Candidate> candidates(Device device);

// Numbers the nodes: ranks of one host share a node; with ranks_per_node > 0, only that many consecutive
// ranks of it do. Fills RankFacts::node. Pure.
void number_nodes(std::vector<RankFacts>& facts, int64_t ranks_per_node);

// The transport to each rank, in rank order; null at `self`. `wanted` is a name or "auto", which takes the
// first usable candidate that does not refuse. Pure. Errors: kInvalid for a name that does not exist,
// kUnsupported when a peer cannot be reached, with the reason of every candidate.
Result<std::vector<const Transport*>> select_transports(const std::vector<Candidate>& candidates,
                                                        const std::vector<RankFacts>& facts, int self,
                                                        std::string_view wanted);

}  // namespace weft
