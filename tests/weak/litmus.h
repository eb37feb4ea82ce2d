// SPDX-License-Identifier: Apache-2.0
//
// Litmus tests: small programs whose outcomes PTX's model allows or forbids, on the weak machine.
#pragma once

#include <cstdint>
#include <string>

namespace weft::weak {

// Runs every shape whose name has `part`, `seeds` times, and prints a line for each. Returns how many have a wrong verdict:
// an outcome that must be seen is not, or one that must not be is.
uint32_t run_litmus(const std::string& part, uint64_t seeds);

// Prints, as JSON, for each shape: the outcomes that `seeds` runs showed, under the profile h200 where the shape is for it;
// whether the machine reports a race, by which any outcome is allowed; and what PTX allows though the machine never shows it.
void print_allowed(uint64_t seeds);

}  // namespace weft::weak
