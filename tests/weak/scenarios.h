// SPDX-License-Identifier: Apache-2.0
//
// Scenarios: kernels on the weak machine, with arguments drawn from a seed and results that are known.
#pragma once

#include <string>
#include <vector>

#include "weak/machine.h"

namespace weft::weak {

struct Scenario {
  const char* name;
  // Launches kernels, runs the machine, and checks results: false where it failed, and the machine's report says how.
  bool (*play)(Machine& machine, uint64_t seed);
};
const std::vector<Scenario>& scenarios();

// Two calls of dispatch and combine between two ranks, by words or lines or bulk copies, with phases together or apart.
bool play_low_latency_words(Machine& machine, uint64_t seed);
bool play_low_latency_lines(Machine& machine, uint64_t seed);
bool play_low_latency_bulk(Machine& machine, uint64_t seed);
// Two calls of layout, notify, dispatch and combine.
bool play_high_throughput(Machine& machine, uint64_t seed);
// Three calls of one kind of collective, each by lines, in place or by stages.
bool play_exchange(Machine& machine, uint64_t seed);

}  // namespace weft::weak
