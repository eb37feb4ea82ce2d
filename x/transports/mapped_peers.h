// SPDX-License-Identifier: Apache-2.0
//
// What loads and stores into a peer's window can do on this machine, and between which ranks: the same for every
// transport with mapped peers, whoever brings the memory.
//   Caps caps = mapped_caps(device);
//   const std::string why = why_not_mapped(self, peer);    // empty: they can
#pragma once

#include <vector>

#include "transports/transport.h"

namespace weft {

Caps mapped_caps(Device device);

// Those of transports() that bring the memory of windows. Taken by name alone, so nobody need open their libraries to
// know that.
const std::vector<const Transport*>& memory_transports();

// Why `self` cannot load from and store to memory of `peer`; empty when it can. Pure.
std::string why_not_mapped(const RankFacts& self, const RankFacts& peer);

}  // namespace weft
