// SPDX-License-Identifier: Apache-2.0
//
// libibverbs without hardware: two devices on one wire in this process, which check what a NIC checks (queue
// pair states, keys, bounds, datagrams that get lost). For the verbs provider's tests.
#pragma once

#include <functional>
#include <memory>

#include "providers/verbs/verbs.h"

namespace weft::transfer::testing {

provider::ib::Library fake_verbs_library();
std::shared_ptr<provider::Provider> make_fake_verbs();

// While it lives, the wire loses the datagrams that `is_lost` picks by their number; otherwise every third.
class FakeVerbsLoss {
 public:
  explicit FakeVerbsLoss(std::function<bool(uint32_t)> is_lost);
  ~FakeVerbsLoss();
};

// How many there are now, over all devices.
size_t fake_verbs_queue_pairs();

}  // namespace weft::transfer::testing
