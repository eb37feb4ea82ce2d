// SPDX-License-Identifier: Apache-2.0
//
// The network under the proxy transport: which provider and NICs, and how much may be under way on them.
//   WEFT_TRY_ASSIGN(const Network network, choose_network(config().proxy_provider, config().proxy_nics, place));
// Threads: any.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "providers/provider.h"
#include "topology/rdma_devices.h"

namespace weft::proxy {

// What a NIC takes at a time without falling behind.
struct Pace {
  const char* family;
  uint64_t bytes_in_flight;
  uint32_t writes_in_flight;
};

// Of a NIC, by its name; the last row fits every NIC. Pure.
const Pace& pace_of(std::string_view nic_name);
// Every family, for people and tests.
const std::vector<Pace>& paces();

struct Network {
  std::shared_ptr<provider::Provider> provider;
  std::vector<provider::Nic> nics;
  Pace pace;
  std::string why_provider, why_nics;  // for people: why these
  std::string if_unreached = {};       // ... and what to do where a peer cannot be reached
};

// What a rank is near to, and which of its host's ranks it is.
struct RankPlace {
  DevicePlace place;   // of its GPU; without one, the processor's node
  uint32_t index = 0;  // among the ranks of its host
};

// Of the usable NICs the rank's own GPU, where that is one (`cuda:0`); else those that are nearest to the rank, of these
// the fastest, and of these one by turns: so the ranks of a host spread over its NICs. The first one where nobody knows
// where they sit, as of interfaces of TCP. Reads nothing but sysfs.
const provider::Nic& nearest_nic(const std::vector<provider::Nic>& usable, const RankPlace& rank,
                                 const std::string& sysfs = "/sys");

// `wanted` is a provider's name or "auto". `nics` has names with commas between; a semicolon begins those of the host's
// next rank; empty: nearest_nic(). Errors: kInvalid for a name that does not exist, kUnsupported where no NIC is usable,
// with the reasons.
Result<Network> choose_network(const std::string& wanted, const std::string& nics,
                               const RankPlace& rank = {});

}  // namespace weft::proxy
