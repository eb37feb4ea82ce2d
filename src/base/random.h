// SPDX-License-Identifier: Apache-2.0
//
// Random numbers from the operating system, for names and keys that other processes cannot guess or repeat.
// Threads: any.
#pragma once

#include <cstdint>

namespace weft {

// 64 random bits; never 0.
uint64_t random_key();

// A key of this process: the same on every call, another in every other process, also after fork().
uint64_t process_key();

}  // namespace weft
