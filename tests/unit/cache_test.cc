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
#include "base/private_path.h"
#include "support/other_user.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

class CacheTest : public ::testing::Test {
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

// What another user could put there or swap is not read. Each case names the part and what helps.
TEST_F(CacheTest, APathThatOthersCanChangeIsRefusedByItsPart) {
  const fs::path folder = folder_ / "home" / "cache";
  const KernelCache cache(folder.string());
  cache.store("copy", "kernel");
  fs::permissions(folder_ / "home", fs::perms::group_write, fs::perm_options::add);
  EXPECT_FALSE(cache.load("copy").has_value());
  EXPECT_EQ(prepare_cache(folder.string()).message(),
            text("{}/home: mode 0775, allowed: writable by its owner alone; chmod go-w {}/home",
                 folder_.string(), folder_.string()));
  fs::permissions(folder_ / "home", fs::perms::sticky_bit, fs::perm_options::add);  // as /tmp is
  EXPECT_EQ(cache.load("copy"), "kernel");
}

TEST_F(CacheTest, ALinkIsFollowedUnlessItLeadsToWhatOthersCanChange) {
  const fs::path target = folder_ / "scratch", link = folder_ / "home" / "cache";
  fs::create_directories(folder_ / "home");
  fs::create_directories(target);
  for (const fs::path& said : {target, fs::path("../scratch")}) {
    fs::remove(link);
    fs::create_symlink(said, link);
    const KernelCache cache(link.string());
    cache.store("copy", "kernel");
    EXPECT_EQ(cache.load("copy"), "kernel");
    fs::permissions(target, fs::perms::others_write, fs::perm_options::add);
    EXPECT_FALSE(cache.load("copy").has_value());
    EXPECT_FALSE(KernelCache("/nowhere", link.string()).load("copy").has_value());  // WEFT_CACHE_PATH
    EXPECT_EQ(prepare_cache(link.string()).message(),
              text("{}: mode 0757, allowed: writable by its owner alone; chmod go-w {}, or point the link {} "
                   "elsewhere: "
                   "ln -sfn FOLDER {}",
                   target.string(), target.string(), link.string(), link.string()));
    fs::permissions(target, fs::perms::others_write, fs::perm_options::remove);
  }
}

TEST_F(CacheTest, LinksInARoundEnd) {
  fs::create_directories(folder_);
  fs::create_symlink("b", folder_ / "a");
  fs::create_symlink("a", folder_ / "b");
  EXPECT_THAT(prepare_cache((folder_ / "a").string()).message(), ::testing::HasSubstr("symbolic links"));
}

TEST_F(CacheTest, AFileThatIsALinkOrAPipeIsAMiss) {
  const KernelCache cache(folder_.string());
  cache.store("copy", "kernel");
  fs::rename(cache.path("copy"), folder_ / "elsewhere");
  fs::create_symlink(folder_ / "elsewhere", cache.path("copy"));
  EXPECT_FALSE(cache.load("copy").has_value());
  fs::remove(cache.path("copy"));
  ASSERT_EQ(mkfifo(cache.path("copy").c_str(), 0600), 0);
  EXPECT_FALSE(cache.load("copy").has_value());
  cache.store("copy", "kernel");
  EXPECT_EQ(cache.load("copy"), "kernel");
}

TEST_F(CacheTest, WhatAnotherUserOwnsIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const fs::path folder = folder_ / "home" / "cache";
  const KernelCache cache(folder.string());
  for (const fs::path& part : {folder_ / "home", folder, fs::path(cache.path("copy"))}) {
    cache.store("copy", "kernel");
    ASSERT_EQ(chown(part.c_str(), weft::testing::kNobody, weft::testing::kNobody), 0);
    EXPECT_FALSE(cache.load("copy").has_value()) << part;
    EXPECT_FALSE(cache.open("copy.cubin").has_value()) << part;
    ASSERT_EQ(chown(part.c_str(), 0, 0), 0);
    EXPECT_TRUE(cache.load("copy").has_value()) << part;
  }
}

// What was checked is what is loaded, whatever takes its place in between.
TEST_F(CacheTest, AnOpenFileIsTheOneThatWasChecked) {
  const KernelCache cache(folder_.string());
  cache.store("copy", "kernel");
  const auto checked = cache.open("copy.cubin");
  ASSERT_TRUE(checked.has_value());
  fs::remove_all(folder_);
  cache.store("copy", "another one");
  EXPECT_TRUE(read_all(checked->descriptor, "it")->ends_with("\nkernel"));
}

TEST_F(CacheTest, FoldersOnTheWayAreMadeForTheirOwnerAloneToWrite) {
  const mode_t before = umask(0);
  const KernelCache cache((folder_ / "deep" / "cache").string());
  cache.store("copy", "kernel");
  umask(before);
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
  EXPECT_THAT(warnings[0], ::testing::HasSubstr("WEFT_CACHE_DIR"));
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
  for (int i = 0; i < 200; ++i) EXPECT_THAT(payloads, ::testing::Contains(cache.load("copy")));
  for (std::thread& writer : writers) writer.join();
  // Nothing that was written aside is left behind.
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace weft
