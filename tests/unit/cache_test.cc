// SPDX-License-Identifier: Apache-2.0
#include "jit/cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "base/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

class CacheTest : public testing::Test {
 protected:
  CacheTest() : folder_(fs::temp_directory_path() / ("weft_cache_test_" + std::to_string(getpid()))) {}
  ~CacheTest() override { fs::remove_all(folder_); }

  const fs::path folder_;
};

TEST_F(CacheTest, GivesBackWhatWasStored) {
  const KernelCache cache((folder_ / "deep/er").string());
  const std::string payload(
      "\x7f"
      "ELF\0\n binary",
      14);
  EXPECT_FALSE(cache.load("copy-1234").has_value());
  cache.store("copy-1234", payload);
  EXPECT_EQ(cache.load("copy-1234"), payload);
}

TEST_F(CacheTest, ATruncatedFileIsAMissAndIsReplaced) {
  const KernelCache cache(folder_.string());
  const std::string payload(1000, 'k');
  cache.store("copy", payload);
  for (const uintmax_t bytes : {uintmax_t{0}, uintmax_t{10}, uintmax_t{79}, uintmax_t{500}}) {
    fs::resize_file(cache.path("copy"), bytes);
    EXPECT_FALSE(cache.load("copy").has_value()) << bytes;
    cache.store("copy", payload);
    EXPECT_EQ(cache.load("copy"), payload);
  }
}

TEST_F(CacheTest, FolderAndFilesAreTheirOwnersAlone) {
  const mode_t before = umask(0);
  const KernelCache cache((folder_ / "cache").string());
  cache.store("copy", "kernel");
  umask(before);
  EXPECT_EQ(fs::status(cache.folder()).permissions(), fs::perms::owner_all);
  EXPECT_EQ(fs::status(cache.path("copy")).permissions(), fs::perms::owner_read | fs::perms::owner_write);
}

TEST_F(CacheTest, AFolderThatOthersCanWriteIsNeitherReadNorWritten) {
  const KernelCache cache(folder_.string());
  cache.store("copy", "kernel");
  fs::permissions(folder_, fs::perms::others_write, fs::perm_options::add);
  EXPECT_FALSE(cache.load("copy").has_value());
  cache.store("other", "kernel");
  EXPECT_FALSE(fs::exists(cache.path("other")));
  const Status why = prepare_cache(folder_.string());
  EXPECT_EQ(why.message(), text("{}: mode 0702, allowed: writable by its owner alone; chmod go-w {}",
                                folder_.string(), folder_.string()));
}

TEST_F(CacheTest, AFileThatOthersCanWriteIsAMissAndIsReplaced) {
  const KernelCache cache(folder_.string());
  cache.store("copy", "kernel");
  fs::permissions(cache.path("copy"), fs::perms::group_write, fs::perm_options::add);
  EXPECT_FALSE(cache.load("copy").has_value());
  cache.store("copy", "kernel");
  EXPECT_EQ(cache.load("copy"), "kernel");
}

TEST_F(CacheTest, AFlippedByteIsAMiss) {
  const KernelCache cache(folder_.string());
  cache.store("copy", std::string(1000, 'k'));
  std::fstream(cache.path("copy"), std::ios::in | std::ios::out | std::ios::binary).seekp(700).put('x');
  EXPECT_FALSE(cache.load("copy").has_value());
}

// A folder below a file can be made by nobody, not even by root.
TEST_F(CacheTest, AFolderThatCannotBeMadeWarnsOnce) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "file") << "not a folder";
  const KernelCache cache((folder_ / "file/cache").string());
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel level, const std::string& line) {
    if (level == LogLevel::kWarn) warnings.push_back(line);
  });
  cache.store("copy", "payload");
  cache.store("copy", "payload");
  set_log_sink({});
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], testing::HasSubstr("WEFT_CACHE_DIR"));
  EXPECT_FALSE(cache.load("copy").has_value());
}

TEST_F(CacheTest, ReadersNeverSeeHalfAFile) {
  const KernelCache cache(folder_.string());
  const std::vector<std::string> payloads{std::string(100'000, 'a'), std::string(50'000, 'b')};
  cache.store("copy", payloads[0]);
  std::vector<std::thread> writers;
  for (const std::string& payload : payloads)
    writers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) cache.store("copy", payload);
    });
  for (int i = 0; i < 200; ++i) EXPECT_THAT(payloads, testing::Contains(cache.load("copy")));
  for (std::thread& writer : writers) writer.join();
  // Nothing that was written aside is left behind.
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace weft
