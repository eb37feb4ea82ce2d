// SPDX-License-Identifier: Apache-2.0
//
// Chooses the network address of this machine that other machines connect to.
//   WEFT_TRY_ASSIGN(const Interface at, choose_interface(config().interface));   // at.name, at.address, at.why
// Threads: any.
#pragma once

#include <string>

#include "base/status.h"

namespace weft {

struct Interface {
  std::string name;     // "eth0"
  std::string address;  // "10.0.0.1"
  std::string why;      // for people: why this one
  bool is_ipv6 = false;
  unsigned char bytes[16] = {};  // of the address; IPv4: the first four
};

// `wanted` names the interface. Empty: the first that is up; bridges of containers and the loopback, which lead
// nowhere for other machines, where there is no better one. IPv4 goes before IPv6. Errors: kSystem; kInvalid when
// `wanted` has no address.
Result<Interface> choose_interface(const std::string& wanted);

}  // namespace weft
