// SPDX-License-Identifier: Apache-2.0
//
// The address of a rail, as its peers read it.
#pragma once

#include <netinet/in.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace weft::provider {

// What address() gives: this, then libfabric's own bytes.
struct AddressHead {
  char tag[4] = {'f', 'a', 'b', '3'};
  uint32_t pid = 0;
  uint64_t host = 0;
  uint64_t witness_at = 0;
  uint64_t witness = 0;
  uint64_t grants_at = 0;
  uint64_t page_port = 0;  // where it takes pages; 0: nowhere
};

// Of an address as libfabric gives it for sockets.
inline in_addr interface_of(const std::string& bytes) {
  sockaddr_in address{};
  std::memcpy(&address, bytes.data(), std::min(bytes.size(), sizeof address));
  return address.sin_addr;
}

}  // namespace weft::provider
