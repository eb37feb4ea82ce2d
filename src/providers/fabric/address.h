// SPDX-License-Identifier: Apache-2.0
//
// The address of a rail, as its peers read it.
#pragma once

#include <netinet/in.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "providers/lifeline.h"

namespace weft::provider {

// What address() gives: this, then libfabric's own bytes.
struct AddressHead {
  char tag[4] = {'f', 'a', 'b', '4'};
  uint32_t pid = 0;
  uint64_t host = 0;
  uint64_t witness_at = 0;
  uint64_t witness = 0;
  uint64_t grants_at = 0;
  uint32_t page_port = 0;  // where it takes pages; 0: nowhere
  uint32_t line_port = 0;  // where it takes lifelines; 0: nowhere
};

// Of an address as libfabric gives it for sockets.
inline in_addr interface_of(const std::string& bytes) {
  sockaddr_in address{};
  std::memcpy(&address, bytes.data(), std::min(bytes.size(), sizeof address));
  return address.sin_addr;
}

// The same, for its lifelines. None of a NIC that is no interface of IP.
inline SocketAddress line_address_of(const std::string& bytes, uint32_t port) {
  sockaddr_in6 v6{};
  sockaddr_in v4{};
  std::memcpy(&v6, bytes.data(), std::min(bytes.size(), sizeof v6));
  std::memcpy(&v4, &v6, sizeof v4);
  const void* const ip = v4.sin_family == AF_INET ? static_cast<const void*>(&v4.sin_addr)
                                                  : static_cast<const void*>(&v6.sin6_addr);
  return socket_address(v4.sin_family, ip, static_cast<uint16_t>(port));
}

}  // namespace weft::provider
