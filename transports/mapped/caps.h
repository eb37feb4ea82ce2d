// SPDX-License-Identifier: Apache-2.0
//
// What loads and stores into a peer's window can do on this machine, and between which ranks.
#pragma once

#include "transports/transport.h"

namespace weft {

Caps mapped_caps(Device device);

// Why `self` cannot map the windows of `peer`; empty when it can. Pure.
std::string mapped_refuses(const RankFacts& self, const RankFacts& peer);

}  // namespace weft
