// SPDX-License-Identifier: Apache-2.0
//
// libibverbs without hardware: two devices on one wire in this process, which check what a NIC checks (queue
// pair states, keys, bounds, datagrams that get lost). For the verbs provider's tests.
#pragma once

#include <memory>

#include "providers/verbs/verbs.h"

namespace weft::transfer::testing {

provider::ib::Library fake_verbs_library();
std::shared_ptr<provider::Provider> make_fake_verbs();

}  // namespace weft::transfer::testing
