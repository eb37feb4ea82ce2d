// SPDX-License-Identifier: Apache-2.0
//
// Which transports a communicator probes, and rules that its choice must keep.
//   const std::vector<Candidate> all = candidates_for("nccl", device);      // the others are not asked
//   WEFT_TRY_ASSIGN(const Transport* brings, who_brings_memory(chosen, all));
// Threads: any.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transports/transport.h"

namespace weft {

// Whether a transport may be chosen, or stands behind one that may: others need not look at the machine.
bool is_asked_for(std::string_view wanted, const Transport& transport);

// All transports; the capabilities of those that are asked for.
std::vector<Candidate> candidates_for(std::string_view wanted, Device device);

// Of a transport that is among the candidates.
const Caps& caps_of(const std::vector<Candidate>& candidates, const Transport* transport);
// How rank `self` gets at `peer` through a transport; mapped where `taken` is null, which is the rank itself.
Reach reach_between(const std::vector<Candidate>& candidates, const Transport* taken,
                    const std::vector<RankFacts>& facts, int self, int peer);

// Windows lie in one memory: where a transport that brings it was chosen for a pair of ranks, it takes every pair that it
// can reach, also those for which mapped memory stood before it. All ranks find the same. Pure.
void gather_in_one_memory(std::vector<std::vector<const Transport*>>& chosen,
                          const std::vector<Candidate>& candidates, const std::vector<RankFacts>& facts);

// The transport that brings the memory of all windows; null where none was chosen. `chosen`: the transport of every rank
// to every rank. All ranks find the same. Errors: kUnsupported where others were chosen beside it: a window lies in one
// memory.
Result<const Transport*> who_brings_memory(const std::vector<std::vector<const Transport*>>& chosen,
                                           const std::vector<Candidate>& candidates);

// Where windows of GPUs with port peers lie; the same answer on every rank.
struct PortWindows {
  // What the network puts there: the whole window or, where it has a host part, payload.
  bool are_in_device = false;
  // Words and records of ports lie in memory of the host, what mapped peers write in that of the device.
  bool have_host_part = false;
  std::string why;  // for people
};
// `refusals`: by rank, why the network does not reach its device's memory; empty where it does. `undivided`: by rank, why its
// windows cannot have a host part; empty where they can. `wanted`: WEFT_PORT_WINDOWS. All ranks or none. Errors: kUnsupported
// for "device" where a rank cannot, naming it. Pure.
Result<PortWindows> choose_port_windows(const std::vector<std::string>& refusals,
                                        const std::vector<std::string>& undivided, bool hosts_store_words,
                                        std::string_view wanted);

}  // namespace weft
