// SPDX-License-Identifier: Apache-2.0
//
// Every fuzz target with every input of its corpus, in each run of the tests: a target that does not link, or an input
// that was found once and is wrong again, is seen before tools/fuzz runs. A target aborts where it finds a mistake.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "support/places.h"

using Target = int(const uint8_t*, size_t);
extern "C" Target book_fuzz, engine_fuzz, rendezvous_fuzz, pages_fuzz, fd_messages_fuzz, wire_fuzz;

namespace weft::testing {
namespace {

struct Corpus {
  const char* folder;
  Target* target;
};

class FuzzCorpus : public ::testing::TestWithParam<Corpus> {};

TEST_P(FuzzCorpus, IsTakenByItsTarget) {
  size_t inputs = 0;
  const auto folder = std::filesystem::path(kSourceDir) / "tests/fuzz" / GetParam().folder;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    ASSERT_FALSE(bytes.empty());
    EXPECT_EQ(GetParam().target(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()), 0);
    ++inputs;
  }
  EXPECT_GT(inputs, 0u);
}

INSTANTIATE_TEST_SUITE_P(Targets, FuzzCorpus,
                         ::testing::Values(Corpus{"corpus_book", book_fuzz},
                                           Corpus{"corpus_engine", engine_fuzz},
                                           Corpus{"corpus_rendezvous", rendezvous_fuzz},
                                           Corpus{"corpus_fd_messages", fd_messages_fuzz},
                                           Corpus{"corpus_pages", pages_fuzz}, Corpus{"corpus", wire_fuzz}),
                         [](const auto& each) { return std::string(each.param.folder); });

}  // namespace
}  // namespace weft::testing
