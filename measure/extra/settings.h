// SPDX-License-Identifier: Apache-2.0
//
// The settings of this house, for the table of the library (base/config.h).
#pragma once

// clang-format off: one option a line
#define WEFT_EXTRA_OPTIONS(WEFT_OPTION) \
  WEFT_OPTION(jitter_us, int64_t, 200, "longest wait of a call over the transport jitter:proxy, in us", between(1, 1'000'000)) \
  WEFT_OPTION(jitter_seed, int64_t, 1, "seed of those waits", between(0, 1 << 30))
// clang-format on
