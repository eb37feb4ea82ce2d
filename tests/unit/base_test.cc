// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/config.h"
#include "base/deadline.h"
#include "base/status.h"

namespace weft {
namespace {

TEST(Text, ReplacesBracesInOrder) {
  EXPECT_EQ(text("rank {} of {}", 3, 8), "rank 3 of 8");
}

TEST(Text, KeepsWhatHasNoBraces) {
  EXPECT_EQ(text("plain"), "plain");
}

TEST(Status, CarriesCodeAndMessage) {
  const Status status = Status::invalid("x: got {}, allowed: {}", 3, "1 or 2");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_EQ(status.message(), "x: got 3, allowed: 1 or 2");
}

TEST(Config, EnvironmentOverridesDefault) {
  setenv("WEFT_TIMEOUT_S", "2.5", 1);
  config_reload();
  EXPECT_DOUBLE_EQ(config().timeout_s, 2.5);
  setenv("WEFT_TIMEOUT_S", "soon", 1);
  config_reload();
  EXPECT_DOUBLE_EQ(config().timeout_s, Config{}.timeout_s);
  EXPECT_NE(config_table()[0].source.find("ignored"), std::string::npos);
  unsetenv("WEFT_TIMEOUT_S");
  config_reload();
}

TEST(Deadline, WaitEndsWhenItPasses) {
  EXPECT_FALSE(wait_until(Deadline::after_s(0.01), [] { return false; }));
  EXPECT_TRUE(wait_until(Deadline::after_s(10), [] { return true; }));
  EXPECT_FALSE(Deadline::after_s(1e18).passed());
}

}  // namespace
}  // namespace weft
