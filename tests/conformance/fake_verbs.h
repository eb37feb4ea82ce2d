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

// What becomes of an operation of a reliable connection that the wire cuts: it is not executed, or it is and nobody hears
// of it, as after retries; or it fails where it is received, which ends the connection there first.
enum class FakeVerbsCut { kNone, kBefore, kAfter, kReceive };

// While it lives, `cut` says what becomes of each such operation, by its number.
class FakeVerbsCuts {
 public:
  explicit FakeVerbsCuts(std::function<FakeVerbsCut(uint32_t)> cut);
  ~FakeVerbsCuts();
};

// The next queue pair that is to reach `state` does not, as when a neighbour cannot be resolved.
void fake_verbs_refuse_once(int state);

// What an interface that goes down does: every queue pair stops, those for datagrams too, and gives back what it had.
void fake_verbs_stop();

// How many there are now, over all devices.
size_t fake_verbs_queue_pairs();

}  // namespace weft::transfer::testing
