// SPDX-License-Identifier: Apache-2.0
//
// The verbs provider's choices.
#include <gtest/gtest.h>

#include "base/config.h"
#include "providers/verbs/verbs.h"
#include "tests/conformance/fake_verbs.h"

namespace weft::provider::ib {
namespace {

GidEntry entry(int index, std::initializer_list<int> head, std::initializer_list<int> tail,
               const char* type) {
  GidEntry made{index, {}, type};
  int at = 0;
  for (int byte : head) made.gid.raw[at++] = static_cast<uint8_t>(byte);
  at = 16 - static_cast<int>(tail.size());
  for (int byte : tail) made.gid.raw[at++] = static_cast<uint8_t>(byte);
  return made;
}

TEST(VerbsGid, PrefersRoceV2OverV1AndIpv4OverIpv6) {
  const GidEntry local = entry(0, {0xfe, 0x80}, {1}, "RoCE v2");
  const GidEntry v1 = entry(1, {}, {0xff, 0xff, 10, 0, 0, 1}, "IB/RoCE v1");
  const GidEntry v6 = entry(2, {0x20, 1}, {1}, "RoCE v2");
  const GidEntry v4 = entry(3, {}, {0xff, 0xff, 10, 0, 0, 1}, "RoCE v2");
  EXPECT_EQ(choose_gid({local, v1, v6, v4}), 3);
  EXPECT_EQ(choose_gid({local, v1, v6}), 2);
  EXPECT_EQ(choose_gid({local, v1}), 1);
  EXPECT_EQ(choose_gid({local}), -1);
  EXPECT_EQ(choose_gid({}), -1);
}

// One setting of the environment while it lives.
class Setting {
 public:
  Setting(const char* variable, const char* value) : variable_(variable) {
    setenv(variable, value, 1);
    config_reload();
  }
  ~Setting() {
    unsetenv(variable_);
    config_reload();
  }

 private:
  const char* variable_;
};

TEST(VerbsProbe, PortAndGidCanBeGiven) {
  const auto fake = transfer::testing::make_fake_verbs();
  const auto whys = [&](const char* variable, const char* value) {
    const Setting setting(variable, value);
    return fake->probe()[0].unusable_because;
  };
  EXPECT_EQ(whys("WEFT_IB_PORT", "2"), "");
  EXPECT_EQ(whys("WEFT_IB_PORT", "1"), "port 1 (WEFT_IB_PORT) is not active");
  EXPECT_EQ(whys("WEFT_IB_PORT", "9"), "port 9 (WEFT_IB_PORT) is not active");
  EXPECT_EQ(whys("WEFT_GID_INDEX", "2"), "");
  EXPECT_EQ(whys("WEFT_GID_INDEX", "4"), "GID 4 (WEFT_GID_INDEX) is beyond its 4");
  EXPECT_EQ(whys("WEFT_PKEY", "0x8001"), "");
  EXPECT_EQ(whys("WEFT_PKEY", "0x1"), "") << "the top bit says how a port is a member, not of what";
  EXPECT_EQ(whys("WEFT_PKEY", "0x8002"), "port 2 is not in the partition of P_Key 0x8002 (WEFT_PKEY)");
}

TEST(VerbsProbe, SettingsThatDoNotFitAreRefused) {
  const Setting setting("WEFT_RC_RETRY", "8");
  const auto fake = transfer::testing::make_fake_verbs();
  const auto rail = fake->open(fake->probe()[0], {});
  EXPECT_EQ(rail.status().message(), "WEFT_RC_RETRY: got '8', allowed: whole number, 0 to 7");
}

TEST(VerbsProbe, SaysWhyNothingIsUsable) {
  const std::vector<Nic> nics = make_verbs()->probe();
  ASSERT_FALSE(nics.empty());
  for (const Nic& nic : nics) EXPECT_NE(nic.usable(), !nic.unusable_because.empty());
}

}  // namespace
}  // namespace weft::provider::ib
