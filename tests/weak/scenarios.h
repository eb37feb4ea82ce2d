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
  const char* known_fault = nullptr;  // it must fail: a fault of today's kernels
};
const std::vector<Scenario>& scenarios();

}  // namespace weft::weak
