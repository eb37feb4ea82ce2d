// SPDX-License-Identifier: Apache-2.0
//
// Whose program books are read.
#include "collective/program_book.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace weft {
namespace {

using ::testing::HasSubstr;

class BookTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/weft-book-XXXXXX";
    folder_ = mkdtemp(name);
    path_ = folder_ + "/tuned.book";
    std::ofstream(path_) << "no book";
    chmod(path_.c_str(), 0600);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  Status read(bool is_private) const {
    return ProgramBook::read(path_, 2, BookMachine::kCpu, is_private).status();
  }
  std::string folder_, path_;
};

TEST_F(BookTest, OfOthersIsNotRead) {
  EXPECT_THAT(read(true).message(), HasSubstr("not a book"));
  chmod(path_.c_str(), 0666);
  EXPECT_EQ(read(true).code(), Code::kCapacity);
  EXPECT_THAT(read(true).message(), HasSubstr("chmod go-w " + path_));
  EXPECT_THAT(read(false).message(), HasSubstr("not a book"));  // somebody has named it
  chmod(path_.c_str(), 0600);
  chmod(folder_.c_str(), 0777);
  EXPECT_EQ(read(true).code(), Code::kCapacity);
  EXPECT_THAT(read(true).message(), HasSubstr("chmod go-w " + folder_));
}

TEST_F(BookTest, ThatIsALinkIsNotRead) {
  const std::string link = folder_ + "/link.book";
  ASSERT_EQ(symlink(path_.c_str(), link.c_str()), 0);
  path_ = link;
  EXPECT_EQ(read(true).code(), Code::kCapacity);
  EXPECT_THAT(read(false).message(), HasSubstr("not a book"));
}

TEST_F(BookTest, ThatEndsAfterItsFirstWordsSaysSo) {
  for (const std::string& bytes :
       {std::string(), std::string("weftbook"), std::string("weftbook\5\0\0\0", 12)}) {
    std::ofstream(path_, std::ios::binary) << bytes;
    EXPECT_EQ(read(false).code(), Code::kInvalid) << bytes.size() << " bytes";
  }
}

}  // namespace
}  // namespace weft
