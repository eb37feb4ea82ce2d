// SPDX-License-Identifier: Apache-2.0
#include "moe/handle_id.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace weft {
namespace {

TEST(HandleId, HoldsABufferAndANumber) {
  constexpr uint64_t id = handle_id(0x123456789, 42);
  EXPECT_EQ(handle_buffer(id), 0x123456789u);
  EXPECT_EQ(handle_number(id), 42u);
}

TEST(HandleId, FitsWhatTheHostKeepsItIn) {
  constexpr uint64_t id = handle_id(UINT64_MAX, UINT64_MAX);
  EXPECT_GE(static_cast<int64_t>(id), 0);
  EXPECT_EQ(handle_number(id), (1u << kHandleNumberBits) - 1);
  EXPECT_EQ(handle_id(handle_buffer(id), handle_number(id)), id);
}

}  // namespace
}  // namespace weft
