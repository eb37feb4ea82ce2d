// SPDX-License-Identifier: Apache-2.0
//
// The host half of the mapped transport: what device code is given to reach every peer by loads and stores.
//   const Transport row = mapped_transport();                       // its row in the list of transports
//   WEFT_TRY_ASSIGN(const MappedMesh mesh, mapped_mesh(*window));    // pass it to a kernel by value
// Exporting and mapping memory is the window's business (src/memory/range.h).
// Threads: any. Lifetime: the window must outlive every kernel that was given its mesh.
#pragma once

#include "base/status.h"
#include "memory/window.h"
#include "transports/mapped/channel.cuh"
#include "transports/transport.h"

namespace weft {

Transport mapped_transport();

// The mesh over a window all of whose ranks are mapped. Errors: kUnsupported naming a rank that is not.
Result<MappedMesh> mapped_mesh(const Window& window);

}  // namespace weft
