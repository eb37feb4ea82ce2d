// SPDX-License-Identifier: Apache-2.0
#include "base/digest.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

// Expected values: FIPS 180-4 examples, as sha256sum prints them.
TEST(Digest, OfKnownTexts) {
  EXPECT_EQ(Digest().hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Digest().bytes("abc").hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Digest().bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Digest().bytes(std::string(1'000'000, 'a')).hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Digest, DoesNotDependOnHowBytesArrive) {
  const std::string text(200, 'x');
  Digest parts;
  for (size_t at = 0; at < text.size(); at += 7) parts.bytes(std::string_view(text).substr(at, 7));
  EXPECT_EQ(parts.hex(), Digest().bytes(text).hex());
}

TEST(Digest, AddKeepsItemsApart) {
  EXPECT_NE(Digest().add("ab").add("c").hex(), Digest().add("a").add("bc").hex());
}

}  // namespace
}  // namespace weft
