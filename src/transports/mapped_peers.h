// SPDX-License-Identifier: Apache-2.0
//
// The capabilities of loads and stores into peers' windows on this machine, and the ranks between which they
// work: the same for every transport with mapped peers.
//   Caps caps = mapped_caps(device);
//   const std::string why = why_not_mapped(self, peer);    // empty: they can
#pragma once

#include <vector>

#include "transports/transport.h"

namespace weft {

Caps mapped_caps(Device device);

// Those of transports() that bring the memory of windows. Their names are fixed, so no library has to be opened to
// know them.
const std::vector<const Transport*>& memory_transports();

// Why `self` cannot load from and store to memory of `peer`; empty when it can. Pure.
std::string why_not_mapped(const RankFacts& self, const RankFacts& peer);

}  // namespace weft
