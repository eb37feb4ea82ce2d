// SPDX-License-Identifier: Apache-2.0
//
// Turns the record of a kernel that gave up into the sentence that users read.
#pragma once

#include "base/status.h"
#include "kernels/core/fault.h"

namespace weft {

// kPeerLost for a silent peer, kInvalid for ranks that disagree, kCapacity for too many rows.
// "rank 3, dispatch.recv, waited 30.0 s for rank 5: expected epoch 41, saw 40"
Status fault_status(const FaultBox& box);

// The error for sizes on which ranks disagree: `word` counts the members of CountHeader.
Status disagreement(uint64_t word, uint32_t self, uint64_t mine, uint32_t peer, uint64_t theirs);

}  // namespace weft
