// SPDX-License-Identifier: Apache-2.0
//
// Engines over the verbs provider whose connections break: the fake of libibverbs cuts them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/conformance/fake_verbs.h"
#include "tests/conformance/transfer_fixture.h"

namespace weft::transfer::testing {
namespace {

using ::testing::HasSubstr;

TEST(VerbsOutage, WritesImmediatesAndMessagesComeOnceOverConnectionsThatBreak) {
  constexpr uint32_t kRounds = 100, kBytes = 64;
  Pair pair(make_fake_verbs(), 1, 1, kRounds * kBytes);
  pair.a.buffer.randomize(5);
  std::minstd_rand random(3);
  const FakeVerbsCuts cuts([&](uint32_t) {
    const uint32_t drawn = random() % 30;
    return drawn == 0 ? FakeVerbsCut::kBefore : drawn == 1 ? FakeVerbsCut::kAfter : FakeVerbsCut::kNone;
  });
  for (uint32_t i = 0; i < kRounds; ++i) {
    WriteRequest write = pair.write(i * kBytes, i * kBytes, kBytes);
    write.how = with_imm(5);
    ASSERT_OK(pair.a.engine->write(write).status());
    ASSERT_OK(pair.a.engine->send(pair.b_at_a, pair.a.memory, i * kBytes, kBytes, {}).status());
  }
  ASSERT_OK(pair.wait_imm(5, kRounds));
  EXPECT_EQ(std::memcmp(pair.b.buffer.data(), pair.a.buffer.data(), kRounds * kBytes), 0);
  for (uint32_t i = 0; i < kRounds; ++i) {
    auto received = pair.b.engine->recv(pair.a_at_b, pair.b.memory, 0, kBytes, {});
    ASSERT_OK(received.status());
    ASSERT_OK(pair.b.engine->wait(*received, soon()));
    EXPECT_EQ(std::memcmp(pair.b.buffer.data(), pair.a.buffer.data() + i * kBytes, kBytes), 0) << i;
  }
  auto counter = pair.b.engine->imm_counter(pair.a_at_b, 5);
  ASSERT_OK(counter.status());
  EXPECT_EQ((*counter)->value(), kRounds);
  EXPECT_TRUE(pair.b_at_a->is_alive() && pair.a_at_b->is_alive());
}

TEST(VerbsOutage, WhoIsGivenUpIsToldWhyTheConnectionBrokeFirst) {
  Pair pair(make_fake_verbs(), 1, 1, 1000);
  pair.b.engine->close();  // its queue pairs go: nothing answers
  std::vector<std::shared_ptr<Transfer>> writes;
  for (int i = 0; i < 8 && pair.b_at_a->is_alive(); ++i)
    if (auto written = pair.a.engine->write(pair.write(0, 0, 8)); written.ok()) writes.push_back(*written);
  for (const auto& write : writes) (void)pair.a.engine->wait(write, soon());
  EXPECT_FALSE(pair.b_at_a->is_alive());
  EXPECT_THAT(pair.b_at_a->why().message(), ::testing::Not(HasSubstr("status 5")));
}

}  // namespace
}  // namespace weft::transfer::testing
