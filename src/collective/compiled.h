// SPDX-License-Identifier: Apache-2.0
//
// A collective program as source: its blocks, steps and waits become constants of a kernel of its own, which
// the compiler folds into straight code per step. The interpreter (kernels/collective/program.cuh) remains
// the definition: both run the same functions, so results are the same bits.
//   if (can_compile(text)) key.prelude = program_source(text);     // defines weft::run_compiled
// Pure: no device, no environment.
#pragma once

#include <string>

#include "collective/runner.h"

namespace weft {

// Code grows with the steps; longer programs are interpreted.
inline constexpr size_t kMaxCompiledSteps = 48;
bool can_compile(const ProgramText& text);

// Source that follows #include "kernels/collective/program.cuh". `text` has passed CollectiveRunner::load().
std::string program_source(const ProgramText& text);

}  // namespace weft
