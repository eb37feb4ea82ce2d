// SPDX-License-Identifier: Apache-2.0
#include "base/random.h"

#include <sys/random.h>
#include <unistd.h>

#include <chrono>

#include "base/owner_process.h"

namespace weft {

uint64_t random_key() {
  uint64_t key = 0;
  while (key == 0) {
    if (getrandom(&key, sizeof key, 0) != sizeof key) {
      // Only kernels without getrandom() come here; the clock and the process still tell ranks apart.
      key = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) *
                0x9E3779B97F4A7C15u ^
            static_cast<uint64_t>(getpid()) << 40;
    }
  }
  return key;
}

uint64_t process_key() {
  struct Key {
    const uint64_t value = random_key();
  };
  static OnePerProcess<Key> keys;
  return keys.get().value;
}

}  // namespace weft
