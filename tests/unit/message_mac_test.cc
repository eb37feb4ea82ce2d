// SPDX-License-Identifier: Apache-2.0
#include "base/message_mac.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>

namespace weft {
namespace {

// Expected values: the authors' vectors for SipHash-2-4, key 00 01 .. 0f, text 00 01 .. of so many bytes.
TEST(MessageMac, OfKnownTexts) {
  const MacKey key{0x0706050403020100, 0x0f0e0d0c0b0a0908};
  std::string text(15, '\0');
  std::iota(text.begin(), text.end(), '\0');
  EXPECT_EQ(message_mac(key, ""), 0x726fdb47dd0e0e31u);
  EXPECT_EQ(message_mac(key, "", std::string_view(text).substr(0, 8)), 0x93f5f5799a932462u);
  EXPECT_EQ(message_mac(key, "", text), 0xa129ca6149be45e5u);
  EXPECT_EQ(message_mac(key, std::string_view(text).substr(0, 8), std::string_view(text).substr(8)),
            0xa129ca6149be45e5u);
}

TEST(MessageMac, EveryBitOfTextAndKeyCounts) {
  MacKey key{1, 2};
  std::string text = "what a peer says";
  std::set<uint64_t> seen{message_mac(key, text)};
  for (size_t bit = 0; bit < 8 * text.size(); ++bit) {
    text[bit / 8] ^= static_cast<char>(1 << bit % 8);
    EXPECT_TRUE(seen.insert(message_mac(key, text)).second) << bit;
    text[bit / 8] ^= static_cast<char>(1 << bit % 8);
  }
  for (size_t bit = 0; bit < 128; ++bit) {
    key[bit / 64] ^= uint64_t{1} << bit % 64;
    EXPECT_TRUE(seen.insert(message_mac(key, text)).second) << bit;
    key[bit / 64] ^= uint64_t{1} << bit % 64;
  }
}

}  // namespace
}  // namespace weft
