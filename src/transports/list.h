// SPDX-License-Identifier: Apache-2.0
//
// The list of transports, best first: WEFT_TRANSPORT(folder, the device type of its mesh). The folder foo has
// foo_transport() and, in channel.cuh, the mesh; its line here, with the include, is all that the rest of
// Weft needs.
#pragma once

#include "transports/ibgda/channel.cuh"
#include "transports/jitter/channel.cuh"
#include "transports/mapped/channel.cuh"
#include "transports/nccl/channel.cuh"
#include "transports/nvshmem/channel.cuh"
#include "transports/proxy/channel.cuh"
#include "transports/transport.h"

// clang-format off: one transport a line
#define WEFT_TRANSPORTS(WEFT_TRANSPORT) \
  WEFT_TRANSPORT(mapped, MappedMesh)    \
  WEFT_TRANSPORT(nccl, NcclMesh)        \
  WEFT_TRANSPORT(nvshmem, NvshmemMesh)  \
  WEFT_TRANSPORT(ibgda, IbgdaMesh)      \
  WEFT_TRANSPORT(proxy, ProxyMesh)      \
  WEFT_TRANSPORT(jitter, JitterMesh<weft::ProxyMesh>)
// clang-format on

// Those that bring the memory of windows (Caps::brings_memory). Peers that they map have MappedMesh; one that reaches
// others, too, stands in both lists.
#define WEFT_MEMORY_TRANSPORTS(WEFT_TRANSPORT) \
  WEFT_TRANSPORT(nccl)                         \
  WEFT_TRANSPORT(nvshmem)

namespace weft {

#define WEFT_TRANSPORT(folder, Mesh) const Transport& folder##_transport();
WEFT_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT
#define WEFT_TRANSPORT(folder) const Transport& folder##_transport();
WEFT_MEMORY_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT

}  // namespace weft
