// SPDX-License-Identifier: Apache-2.0
//
// What stands in the environment while libfabric reads its settings, and what is left of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "providers/fabric/key_cache.h"
#include "providers/fabric/library.h"

namespace weft::provider::fi {
namespace {

using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

using Settings = std::map<std::string, std::string>;

Settings in_environment() {
  Settings seen;
  for (const char* name : {"FI_MR_CACHE_MAX_COUNT", "FI_EFA_MR_CACHE_ENABLE", "FI_UNIVERSE_SIZE"})
    if (const char* value = std::getenv(name)) seen[name] = value;
  return seen;
}

Settings seen_by_library;

// What a library of no networks reads at the first question.
Settings read_with(uint32_t queue_limit) {
  Library library;
  library.dupinfo = [](const fi_info*) {
    auto* info = new fi_info{};
    info->fabric_attr = new fi_fabric_attr{};
    return info;
  };
  library.freeinfo = [](fi_info* info) {
    std::free(info->fabric_attr->prov_name);
    delete info->fabric_attr;
    delete info;
  };
  library.getinfo = [](uint32_t, const char*, const char*, uint64_t, const fi_info*, fi_info**) {
    seen_by_library = in_environment();
    return -61;
  };
  read_settings(library, queue_limit);
  return seen_by_library;
}

TEST(FabricSettings, WhereThereAreNoRdmaDevicesNothingIsSet) {
  EXPECT_THAT(read_with(0), IsEmpty());
}

TEST(FabricSettings, RegistrationsAreNotCachedAndQueuesFitTheDevice) {
  EXPECT_THAT(read_with(32767),
              UnorderedElementsAre(Pair("FI_MR_CACHE_MAX_COUNT", "0"), Pair("FI_EFA_MR_CACHE_ENABLE", "0"),
                                   Pair("FI_UNIVERSE_SIZE", "127")));
  EXPECT_THAT(in_environment(), IsEmpty()) << "left in the environment";
}

TEST(FabricSettings, ReceivesAreSharedFromThenOn) {
  unsetenv("FI_OFI_RXM_USE_SRX");
  read_with(0);
  EXPECT_EQ(std::getenv("FI_OFI_RXM_USE_SRX"), nullptr);
  read_with(32767);
  EXPECT_STREQ(std::getenv("FI_OFI_RXM_USE_SRX"), "1");
  setenv("FI_OFI_RXM_USE_SRX", "0", 1);
  read_with(32767);
  EXPECT_STREQ(std::getenv("FI_OFI_RXM_USE_SRX"), "0") << "what the user has set";
  unsetenv("FI_OFI_RXM_USE_SRX");
}

TEST(FabricSettings, ALongQueueIsLeftAsItIs) {
  EXPECT_EQ(read_with(4194303).count("FI_UNIVERSE_SIZE"), 0u);
}

TEST(FabricSettings, WhatTheUserHasSetStays) {
  setenv("FI_UNIVERSE_SIZE", "16", 1);
  setenv("FI_MR_CACHE_MAX_COUNT", "1024", 1);
  EXPECT_THAT(read_with(32767),
              UnorderedElementsAre(Pair("FI_MR_CACHE_MAX_COUNT", "1024"), Pair("FI_EFA_MR_CACHE_ENABLE", "0"),
                                   Pair("FI_UNIVERSE_SIZE", "16")));
  EXPECT_THAT(in_environment(),
              UnorderedElementsAre(Pair("FI_MR_CACHE_MAX_COUNT", "1024"), Pair("FI_UNIVERSE_SIZE", "16")));
  unsetenv("FI_UNIVERSE_SIZE");
  unsetenv("FI_MR_CACHE_MAX_COUNT");
}

// A device that gives out keys by a rule, and a cache in front of it.
struct Keys {
  std::vector<uint64_t> free = {1, 2, 3, 4, 5};  // the last one is next
  std::map<void*, uint64_t> cached;
  bool has_cache = false;

  Result<Registration> enroll(void* data) {
    Registration made;
    made.handle = data;
    if (has_cache && cached.count(data)) {
      made.rkey = cached[data];
    } else {
      made.rkey = free.back();
      free.pop_back();
    }
    return made;
  }
  void release(const Registration& registration) {
    if (has_cache)
      cached[registration.handle] = registration.rkey;
    else
      free.push_back(registration.rkey);
  }
  bool are_cached() {
    return *caches_keys([&](void* data, uint64_t) { return enroll(data); },
                        [&](Registration& registration) { release(registration); });
  }
};

TEST(FabricKeys, ACacheOfRegistrationsIsSeen) {
  Keys keys;
  keys.has_cache = true;
  EXPECT_TRUE(keys.are_cached());
}

TEST(FabricKeys, ADeviceThatGivesOutTheLastKeyAgainHasNoCache) {
  EXPECT_FALSE(Keys().are_cached());
}

}  // namespace
}  // namespace weft::provider::fi
