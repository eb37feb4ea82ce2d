// SPDX-License-Identifier: Apache-2.0
//
// What the ibgda transport says of itself, and of a queue that broke.
// Threads: any.
#pragma once

#include <string>

#include "kernels/core/fault.h"
#include "transports/transport.h"

namespace weft::ibgda {

Caps ibgda_caps(Device device);
std::string ibgda_refuses(const RankFacts& self, const RankFacts& peer, const char* transport);
// Of a fault that a channel or the host raised on a queue: who, to whom, what was expected and seen, and the
// syndrome's name. kInvalid for places outside the window; kSystem for what only a wrong key or place can bring about;
// kPeerLost otherwise.
Status status_of(const FaultBox& fault);

}  // namespace weft::ibgda
