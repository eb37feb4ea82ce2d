// SPDX-License-Identifier: Apache-2.0
//
// The host half of the mapped transport: what device code is given to reach every peer by loads and stores.
//   const MappedMesh mesh = mapped_mesh(window, rank, ranks);    // pass it to a kernel by value
// Exporting and mapping memory is the window's business (src/memory/range.h).
// Threads: any. Lifetime: the window must outlive every kernel that was given its mesh.
#pragma once

#include "transports/mapped/channel.cuh"
#include "transports/transport.h"

namespace weft {

const Transport& mapped_transport();

// The mesh over what is mapped of a window.
MappedMesh mapped_mesh(const WindowView& window, int rank, int ranks);

}  // namespace weft
