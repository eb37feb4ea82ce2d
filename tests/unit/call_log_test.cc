// SPDX-License-Identifier: Apache-2.0
#include "collective/call_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/text.h"
#include "support/ranks.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using namespace weft::testing;  // NOLINT(google-build-using-namespace)

constexpr double kTimeoutS = 20;

CallRecord record_of(std::string_view call, uint64_t count) {
  CallRecord record;
  record.count = count;
  record.digest = CallDigest().add(call == "recv" ? "send" : call).add(count).value();
  set_name(record, call, "any");
  return record;
}

// A message that differs is an error of its receive; later calls, and later messages, are compared for themselves.
TEST(CallLog, ADifferenceIsToldByTheCallThatHasIt) {
  run_ranks(RanksAre::kThreads, 2, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{Device::Kind::kHost, 0}, kTimeoutS);
    ASSERT_EQ(comm.status().message(), "");
    auto log = CallLog::create(**comm);
    ASSERT_EQ(log.status().message(), "");
    const auto never = [] { return false; };
    const auto compared = [&] { return (*log)->compare(Deadline::after_s(kTimeoutS), never); };
    const auto received = [&] { return (*log)->compare_receive(0, Deadline::after_s(kTimeoutS), never); };
    const bool is_sender = (*comm)->rank() == 0;
    for (uint64_t count : {4, 5}) {
      if (is_sender) {
        (*log)->post_send(1, record_of("send", 4));
      } else {
        (*log)->post_receive(0, record_of("recv", count + 1));
        const std::string words = received().message();
        EXPECT_THAT(words, HasSubstr("rank 0 called send of 4"));
        EXPECT_THAT(words, HasSubstr(text("rank 1 called recv of {}", count + 1)));
      }
      (*log)->post(record_of("all_reduce", 7));
      EXPECT_EQ(compared().message(), "");
    }
    if (is_sender)
      (*log)->post_send(1, record_of("send", 9));
    else
      (*log)->post_receive(0, record_of("recv", 9));
    if (!is_sender) EXPECT_EQ(received().message(), "");
    (*log)->post(record_of("all_reduce", is_sender ? 1 : 2));
    EXPECT_THAT(compared().message(), HasSubstr("collective 3: rank 0 called all_reduce of 1"));
    (*log)->post(record_of("all_reduce", 3));
    EXPECT_EQ(compared().message(), "");
  });
}

}  // namespace
}  // namespace weft
