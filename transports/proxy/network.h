// SPDX-License-Identifier: Apache-2.0
//
// The network under the proxy transport: which provider and NICs, and how much may be under way on them.
//   WEFT_TRY_ASSIGN(const Network network, choose_network(config().proxy_provider, config().proxy_nics));
// Threads: any.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/device.h"
#include "base/status.h"
#include "providers/provider.h"

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
};

// `wanted` is a provider's name or "auto", `nics` names with commas between, or empty for the first usable
// one. Errors: kInvalid for a name that does not exist, kUnsupported where no NIC is usable, with the
// reasons.
// Where NICs are GPUs themselves (`cuda:0`) and none is named, that of `device` is taken.
Result<Network> choose_network(const std::string& wanted, const std::string& nics, Device device = {});

}  // namespace weft::proxy
