// SPDX-License-Identifier: Apache-2.0
//
// The capabilities of the ibgda transport, and the Status of a broken queue.
// Threads: any.
#pragma once

#include <string>

#include "kernels/core/fault.h"
#include "transports/transport.h"

namespace weft::ibgda {

Caps ibgda_caps(Device device);
std::string ibgda_refuses(const RankFacts& self, const RankFacts& peer, const char* transport);
// The Status of a fault that a channel or the host raised on a queue: rank, peer, expected, seen, and the syndrome's
// name. kInvalid for places outside the window; kSystem for a refusal that only a wrong key or place can cause;
// kPeerLost otherwise.
Status status_of(const FaultBox& fault);

}  // namespace weft::ibgda
