// SPDX-License-Identifier: Apache-2.0
#include "base/message_mac.h"

#include <bit>
#include <cstring>

namespace weft {
namespace {

class SipState {
 public:
  explicit SipState(const MacKey& key)
      : v0_(key[0] ^ 0x736f6d6570736575),
        v1_(key[1] ^ 0x646f72616e646f6d),
        v2_(key[0] ^ 0x6c7967656e657261),
        v3_(key[1] ^ 0x7465646279746573) {}

  void add(uint64_t word) {
    v3_ ^= word;
    round();
    round();
    v0_ ^= word;
  }
  // All whole words; what is left of the text.
  std::string_view add_words(std::string_view text) {
    for (; text.size() >= 8; text.remove_prefix(8)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data(), 8);
      add(word);
    }
    return text;
  }
  uint64_t value() {
    v2_ ^= 0xff;
    for (int i = 0; i < 4; ++i) round();
    return v0_ ^ v1_ ^ v2_ ^ v3_;
  }

 private:
  void round() {
    v0_ += v1_;
    v2_ += v3_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v1_;
    v0_ += v3_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ = std::rotl(v2_, 32);
  }

  uint64_t v0_, v1_, v2_, v3_;
};

}  // namespace

MacKey mac_key(const Proof& proof) {
  MacKey key;
  std::memcpy(key.data(), proof.data(), sizeof key);
  return key;
}

uint64_t message_mac(const MacKey& key, std::string_view front, std::string_view rest) {
  SipState state(key);
  const uint64_t bytes = front.size() + rest.size();
  state.add_words(front);
  const std::string_view tail = state.add_words(rest);
  uint64_t last = bytes << 56;  // the length's lowest byte, above what is left
  for (size_t i = 0; i < tail.size(); ++i) last |= uint64_t{static_cast<uint8_t>(tail[i])} << (8 * i);
  state.add(last);
  return state.value();
}

}  // namespace weft
