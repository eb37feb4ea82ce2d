// SPDX-License-Identifier: Apache-2.0
//
// Turns the records of kernels, of faults and of traces, into the words that users read.
#pragma once

#include <string_view>

#include "base/status.h"
#include "bootstrap/peer_watch.h"
#include "kernels/core/trace.h"
#include "moe/room.h"

namespace weft {

// kPeerLost for a dead or silent peer, kInvalid for ranks that disagree, kCapacity for too many rows.
// "rank 3, dispatch.recv, waited 30.0 s for rank 5: expected epoch 41, saw 40; rank 5 (pid 7 on a) is
// stopped"
Status fault_status(const FaultBox& box, PeerWatch& peers);

// What a kernel gave up for, if one did; logged. A lost peer stays in the box, and every later look says that it was
// refused for it. Anything else is cleared: all ranks gave that call up and still count calls alike, so the next may
// succeed. So is a mistake of this rank's caller, with which the call went on.
Status take_fault(FaultBox& box, PeerWatch& peers);

// The error for sizes on which ranks disagree: `word` counts the members of CountHeader.
Status disagreement(uint64_t word, uint32_t self, uint64_t mine, uint32_t peer, uint64_t theirs);

// The error of a call that a rank has no room for, alike on all ranks.
Status no_room(uint32_t rank, std::string_view call, const Lacking& lacking);

// What TraceSpan::what stands for: "combine.push", or "wait dispatch.rendezvous" for a Site.
std::string span_name(uint32_t what);

}  // namespace weft
