// SPDX-License-Identifier: Apache-2.0
#include "transports/mapped/connection.h"

namespace weft {

Result<MappedMesh> mapped_mesh(const Window& window) {
  const Communicator& comm = *window.communicator();
  for (int peer = 0; peer < comm.size(); ++peer)
    if (!window.base(peer))
      return Status::make(Code::kUnsupported, "mapped: rank {} cannot load and store rank {}'s window",
                          comm.rank(), peer);
  return MappedMesh::of(window.bases(), window.table(), static_cast<uint32_t>(comm.rank()),
                        static_cast<uint32_t>(comm.size()));
}

}  // namespace weft
