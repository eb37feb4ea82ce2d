// SPDX-License-Identifier: Apache-2.0
//
// The host half of the mapped transport: a peer's window becomes addresses of this process.
//   const Transport& t = mapped_transport();                       // its row in the list of transports
//   WEFT_TRY_ASSIGN(Sharing sharing, choose_sharing(facts, self, peers, "auto"));
// The mapping itself is MappedRange (range.h); src/memory/window.h puts the ranges of all ranks together.
// Threads: any; pure functions.
#pragma once

#include <string_view>
#include <vector>

#include "base/status.h"
#include "topology/topology.h"
#include "transports/mapped/range.h"
#include "transports/transport.h"

namespace weft {

Transport mapped_transport();

// How the ranks in `members` share memory; the same answer on every rank. `wanted`: "auto" takes VMM handles
// when every GPU has them, else CUDA IPC; "vmm" and "ipc" insist. Ignored on the host. Errors: kInvalid for
// another word, kUnsupported when a rank cannot, naming it.
Result<Sharing> choose_sharing(const std::vector<RankFacts>& facts, const std::vector<int>& members,
                               std::string_view wanted);

}  // namespace weft
