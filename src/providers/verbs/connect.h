// SPDX-License-Identifier: Apache-2.0
//
// A port that a NIC can be used through, and how reliable connections come up on it, by the settings (WEFT_IB_PORT,
// WEFT_GID_INDEX, WEFT_PKEY, WEFT_SERVICE_LEVEL, ...). Shared by the verbs provider and the ibgda transport.
// Threads: any.
#pragma once

#include <string>

#include "providers/lifeline.h"
#include "providers/verbs/verbs.h"

namespace weft::provider::ib {

struct PortChoice {
  uint8_t port = 0;
  int gid_index = -1;       // -1: addressed by LID alone
  uint16_t pkey_index = 0;  // in the port's table of partitions
  ibv_port_attr attr{};
  std::string unusable_because;
};
// The first active port, or the one that was asked for, its GID and its P_Key. `device` names it for sysfs.
PortChoice choose_port(const Library& library, ibv_context* context, const std::string& device);

// Where a port is reached.
struct PortPlace {
  ibv_gid gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;
  bool is_ethernet = false;
};
ibv_ah_attr route_to(uint8_t port, int gid_index, const PortPlace& there);
// None where the GID is no address of IP, or one that needs an interface.
SocketAddress socket_address_of(const ibv_gid& gid, uint16_t port);

inline constexpr uint8_t kReadDepth = 16;
// What a device says of reads, as attributes of queue pairs take it: from 1 to kReadDepth.
uint8_t reads_of(int limit);

// The two ends of a reliable connection.
struct Connection {
  uint32_t qpn = 0;          // theirs
  uint32_t receive_psn = 0;  // what they send begins with
  uint32_t send_psn = 0;     // ... and what is sent to them
  uint8_t reads_out =
      kReadDepth;                 // that are under way at a time: as many as this NIC makes and theirs takes,
  uint8_t reads_in = kReadDepth;  // and of theirs
};
// Reset to init, and init to ready to send. False: errno says why.
bool to_init(const Library& library, ibv_qp* qp, const PortChoice& port, int access);
bool to_ready(const Library& library, ibv_qp* qp, const ibv_ah_attr& route, uint8_t mtu,
              const Connection& connection);

}  // namespace weft::provider::ib
