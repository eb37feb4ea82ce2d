// SPDX-License-Identifier: Apache-2.0
//
// Shows that a process knows a secret, without sending it: HMAC-SHA256 (RFC 2104) over a random number that
// the other side has just made up.
//   const Nonce mine = random_nonce();                       // sent to the client
//   const Proof shown = prove(secret, "join", {bytes_of(mine), claim});      // the client's answer
//   if (is_same(shown, prove(secret, "join", {bytes_of(mine), claim}))) ...
// The role keeps proofs of different places apart, so that a proof cannot be reflected to its maker.
// Threads: pure functions.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace weft {

using Nonce = std::array<uint8_t, 16>;
using Proof = std::array<uint8_t, 32>;

Nonce random_nonce();  // from the system's random source

// Each part of `said` is hashed with its length, so that moving a byte from one part to the next changes the proof.
Proof prove(std::string_view secret, std::string_view role, std::initializer_list<std::string_view> said);

// HMAC-SHA256 as RFC 4231 has it.
Proof hmac_sha256(std::string_view key, std::string_view message);

bool is_same(const Proof& a, const Proof& b);  // takes the same time whatever the bytes

template <size_t N>
std::string_view bytes_of(const std::array<uint8_t, N>& value) {
  return {reinterpret_cast<const char*>(value.data()), N};
}

}  // namespace weft
