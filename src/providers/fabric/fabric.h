// SPDX-License-Identifier: Apache-2.0
//
// The fabric provider: any network that libfabric 1.14 or newer reaches, opened at run time.
//   auto provider = make_fabric("tcp");   // efa, verbs, cxi, tcp, shm
// Nothing of libfabric is needed to build Weft: abi.h declares the part of its binary interface that is used
// here. See README.md in this folder for what was run and what was not.
#pragma once

#include <memory>
#include <string>

#include "providers/provider.h"

namespace weft {
struct fid_ep;
struct fid_cq;
}  // namespace weft

namespace weft::provider {

std::shared_ptr<Provider> make_fabric(const std::string& kind);

// libfabric's own objects under a fabric rail, for the raw baseline of the benchmark; null for other rails.
struct FabricObjects {
  fid_ep* endpoint = nullptr;
  fid_cq* cq = nullptr;
};
FabricObjects fabric_objects(Rail& rail);
uint64_t fabric_address(Rail& rail, Route route);  // what libfabric calls the peer

}  // namespace weft::provider
