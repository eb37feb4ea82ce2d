// SPDX-License-Identifier: Apache-2.0
#include "base/proof.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/digest.h"
#include "base/random.h"

namespace weft {

Nonce random_nonce() {
  Nonce nonce;
  for (size_t i = 0; i < nonce.size(); i += sizeof(uint64_t)) {
    const uint64_t random = random_key();
    std::memcpy(nonce.data() + i, &random, sizeof random);
  }
  return nonce;
}

Proof hmac_sha256(std::string_view key, std::string_view message) {
  constexpr size_t kBlock = 64;
  std::array<uint8_t, kBlock> inner{}, outer{};
  const Proof digest = Digest().bytes(key).value();
  const std::string_view short_key = key.size() > kBlock ? bytes_of(digest) : key;
  std::copy(short_key.begin(), short_key.end(), inner.begin());
  outer = inner;
  for (size_t i = 0; i < kBlock; ++i) {
    inner[i] ^= 0x36;
    outer[i] ^= 0x5c;
  }
  const Proof first = Digest().bytes(bytes_of(inner)).bytes(message).value();
  return Digest().bytes(bytes_of(outer)).bytes(bytes_of(first)).value();
}

Proof prove(std::string_view secret, std::string_view role, std::initializer_list<std::string_view> said) {
  std::string message;
  const auto add = [&](std::string_view part) {
    const uint64_t bytes = part.size();
    message.append(reinterpret_cast<const char*>(&bytes), sizeof bytes).append(part);
  };
  add(role);
  for (const std::string_view part : said) add(part);
  return hmac_sha256(secret, message);
}

bool is_same(const Proof& a, const Proof& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace weft
