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

}  // namespace weft::weak
