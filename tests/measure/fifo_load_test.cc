// SPDX-License-Identifier: Apache-2.0
//
// The FIFO of `weft bench channel`: what is pushed is what is taken.
#include "measure/loops/fifo_load.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(ProxyFifo, CarriesEveryCommandOfEveryProducerInOrder) {
  for (const uint64_t capacity : {2u, 8u, 2048u})
    for (const uint32_t producers : {1u, 4u}) {
      const auto seconds = measure_fifo(Device{}, producers, 20'000, capacity);
      ASSERT_TRUE(seconds.ok()) << capacity << " slots: " << seconds.status().message();
      EXPECT_GT(*seconds, 0);
    }
  EXPECT_FALSE(measure_fifo(Device{}, 0, 1, 2).ok());
  const auto trips = measure_fifo_trips(Device{}, 100, 2);
  ASSERT_TRUE(trips.ok()) << trips.status().message();
  ASSERT_EQ(trips->push_to_pop_us.size(), 100u);
  for (size_t i = 0; i < 100; ++i) EXPECT_LE(trips->push_to_pop_us[i], trips->round_trip_us[i]);
}

}  // namespace
}  // namespace weft
