// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

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

// The settings while a variable of the environment has a value.
class ConfigTest : public ::testing::Test {
 protected:
  const Config& with(const char* name, const char* value) {
    setenv(name, value, 1);
    names_.push_back(name);
    config_reload();
    return config();
  }
  void TearDown() override {
    for (const char* name : names_) unsetenv(name);
    config_reload();
  }

 private:
  std::vector<const char*> names_;
};

TEST_F(ConfigTest, EnvironmentOverridesDefault) {
  EXPECT_DOUBLE_EQ(with("WEFT_TIMEOUT_S", "2.5").timeout_s, 2.5);
  EXPECT_TRUE(config_status().ok());
}

TEST_F(ConfigTest, UnitsAreUnderstood) {
  const std::pair<const char*, double> times[] = {
      {"5s", 5}, {"250ms", 0.25}, {"2 min", 120}, {"1e3us", 1e-3}};
  for (const auto& [given, seconds] : times)
    EXPECT_DOUBLE_EQ(with("WEFT_TIMEOUT_S", given).timeout_s, seconds) << given;
  const std::pair<const char*, int64_t> sizes[] = {
      {"1GiB", 1 << 30}, {"2GB", 2'000'000'000}, {"64KiB", 65536}, {"7", 7}, {"0x10", 16}, {"010", 10}};
  for (const auto& [given, bytes] : sizes)
    EXPECT_EQ(with("WEFT_WINDOW_BYTES", given).window_bytes, bytes) << given;
  EXPECT_TRUE(config_status().ok()) << config_status().message();
}

TEST_F(ConfigTest, DocumentedValuesAreTaken) {
  EXPECT_EQ(with("WEFT_LOW_LATENCY_LINE_TOKENS", "-1").low_latency_line_tokens, -1);
  EXPECT_EQ(with("WEFT_GID_INDEX", "-1").gid_index, -1);
  EXPECT_TRUE(config_status().ok()) << config_status().message();
}

TEST_F(ConfigTest, WhatIsMalformedIsNamedWithWhatIsAllowed) {
  const char* wrong[][2] = {{"WEFT_TIMEOUT_S", "soon"},
                            {"WEFT_TIMEOUT_S", "-1"},
                            {"WEFT_TIMEOUT_S", "5 parsecs"},
                            {"WEFT_WINDOW_BYTES", "1G"},
                            {"WEFT_WINDOW_BYTES", "-5"},
                            {"WEFT_LOG", "loud"},
                            {"WEFT_RC_RETRY", "8"},
                            {"WEFT_WINDOW_BYTES", "99999999999999999999"},
                            {"WEFT_WINDOW_BYTES", "9999999TiB"}};
  for (const auto& [name, value] : wrong) {
    with(name, value);
    const std::string message = config_status().message();
    EXPECT_EQ(message.find(text("{}: got '{}', allowed: ", name, value)), 0u) << message;
    with(name, "");
  }
  EXPECT_DOUBLE_EQ(with("WEFT_TIMEOUT_S", "soon").timeout_s, Config{}.timeout_s);
}

TEST_F(ConfigTest, AnUnknownNameComesWithTheNearestKnownOne) {
  with("WEFT_TIMOUT_S", "5");
  EXPECT_EQ(
      config_status().message().find(
          "WEFT_TIMOUT_S: got '5', but there is no such setting; the nearest is WEFT_TIMEOUT_S (seconds"),
      0u)
      << config_status().message();
}

TEST(Deadline, WaitEndsWhenItPasses) {
  EXPECT_FALSE(wait_until(Deadline::after_s(0.01), [] { return false; }));
  EXPECT_TRUE(wait_until(Deadline::after_s(10), [] { return true; }));
  EXPECT_FALSE(Deadline::after_s(1e18).passed());
}

}  // namespace
}  // namespace weft
