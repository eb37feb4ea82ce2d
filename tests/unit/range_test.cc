// SPDX-License-Identifier: Apache-2.0
#include "memory/range.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace weft {
namespace {

// Whether the system stores a byte there for this process.
bool is_writable(std::byte* at) {
  int ends[2];
  if (pipe(ends) != 0) return ADD_FAILURE() << "no pipe", false;
  const FileDescriptor out(ends[0]), in(ends[1]);
  const char byte = 1;
  EXPECT_EQ(write(in.get(), &byte, 1), 1);
  return read(out.get(), at, 1) == 1;
}

TEST(HostPart, IsWrittenByItsOwnerOnly) {
  RangeOptions options{.device = {}, .reserve_bytes = 8 * kPartMultiple, .least_bytes = 8 * kPartMultiple};
  options.host_bytes = 2 * kPartMultiple;
  const auto own = make_range(options), seen = make_range(options);
  ASSERT_TRUE(own.ok() && seen.ok());
  const uint64_t page = (*own)->granularity();
  for (const uint64_t bytes : {options.host_bytes, 3 * page, page}) {
    const auto offer = (*own)->extend(bytes);
    ASSERT_TRUE(offer.ok()) << offer.status().message();
    const Status imported = (*seen)->import(*offer, bytes);
    ASSERT_TRUE(imported.ok()) << imported.message();
  }
  EXPECT_EQ((*own)->bytes(), 4 * page);
  const uint64_t before = before_base(options.host_bytes);
  std::byte* const own_part = (*own)->base() - before;
  std::byte* const seen_part = (*seen)->base() - before;
  for (const uint64_t at : {uint64_t{0}, options.host_bytes - 1}) {
    own_part[at] = std::byte{7};
    EXPECT_EQ(seen_part[at], std::byte{7});
    EXPECT_TRUE(is_writable(own_part + at));
    EXPECT_FALSE(is_writable(seen_part + at));
  }
  EXPECT_TRUE(is_writable((*seen)->base()) && is_writable((*seen)->base() + 4 * page - 1));
  EXPECT_FALSE(is_writable(own_part + options.host_bytes)) << "nothing lies between the parts";
}

}  // namespace
}  // namespace weft
