// SPDX-License-Identifier: Apache-2.0
//
// What libfabric says of a NIC, as the library's Nic: name, abilities, speed, place in the machine.
#pragma once

#include <string>

#include "providers/fabric/library.h"
#include "providers/provider.h"

namespace weft::provider {

// The interface's address in words; empty where the network is not of sockets.
std::string interface_address(const fi_info& info);

// The name by which a NIC is chosen again: the domain, and for sockets the interface's address. libfabric lists an RDMA
// device once for each way to address it; here it is one NIC, by the device's name.
std::string nic_name(const fi_info& info, const std::string& kind);

// Why an entry of libfabric's list cannot be used as it is; empty: it can.
std::string why_unfit(const fi_info& info, const std::string& kind);

// `kind`: libfabric's name of the network, such as "tcp".
Nic describe(const fi_info& info, const std::string& kind);

}  // namespace weft::provider
