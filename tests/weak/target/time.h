// SPDX-License-Identifier: Apache-2.0
//
// Time of the weak target: steps. Deadlines are far; a lane that waits for nothing is a deadlock, which is found at once.
#pragma once

#include "weak/target/language.h"

namespace weft {

inline uint64_t now_ns() {
  return weak::machine().steps();
}
inline uint64_t cycles() {
  return now_ns();
}
inline void pause_ns(uint32_t /*ns*/) {
  weak::machine().pause();
}
inline void pause(uint32_t /*polls*/) {
  weak::machine().pause();
}

}  // namespace weft
