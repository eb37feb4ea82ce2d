// SPDX-License-Identifier: Apache-2.0
//
// A message authentication code for short messages that are sent often: SipHash-2-4 (Aumasson and Bernstein, 2012), 64
// bits, by a key of 128. A byte costs about a nanosecond, where base/proof.h takes a microsecond for the shortest message.
//   const MacKey key = mac_key(prove(secret, "messages", {...}));
//   const uint64_t mac = message_mac(key, head, body);
// Threads: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/proof.h"

namespace weft {

using MacKey = std::array<uint64_t, 2>;

MacKey mac_key(const Proof& proof);  // of its first 16 bytes

// Of `front` and `rest`, one behind the other. `front`: a multiple of 8 bytes.
uint64_t message_mac(const MacKey& key, std::string_view front, std::string_view rest = {});

}  // namespace weft
