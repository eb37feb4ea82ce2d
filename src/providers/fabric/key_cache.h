// SPDX-License-Identifier: Apache-2.0
//
// Whether memory that was given back stays within peers' reach. A cache of registrations keeps it there, and returns its
// key when the same memory comes again. A NIC may return a key, too, which it has given out anew; but not while another
// registration has come in between, and not time after time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "providers/provider.h"

namespace weft::provider::fi {

// `enroll(data, bytes)` gives a Result<Registration>, `release(registration)` takes it back. Errors: of enroll.
template <class Enroll, class Release>
Result<bool> caches_keys(Enroll enroll, Release release) {
  constexpr size_t kPage = 4096;
  constexpr int kTimes = 3;
  const auto pages = std::make_unique<char[]>(2 * kPage);
  for (int i = 0; i < kTimes; ++i) {
    WEFT_TRY_ASSIGN(Registration first, enroll(pages.get(), kPage));
    const uint64_t key = first.rkey;
    release(first);
    WEFT_TRY_ASSIGN(Registration other, enroll(pages.get() + kPage, kPage));
    auto again = enroll(pages.get(), kPage);
    release(other);
    if (!again.ok()) return again.status();
    const bool is_new = again->rkey != key;
    release(*again);
    if (is_new) return false;
  }
  return true;
}

}  // namespace weft::provider::fi
