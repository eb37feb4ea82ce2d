// SPDX-License-Identifier: Apache-2.0
#include "providers/verbs/connect.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstdio>
#include <optional>

#include "base/config.h"

namespace weft::provider::ib {
namespace {

constexpr uint8_t kRnrRetriesForEver = 7, kHopLimit = 255;
constexpr uint16_t kFullMember = 0x8000;
constexpr int64_t kRoceServiceLevel = 3, kRoceTrafficClass = 104;

uint8_t given_or(int64_t given, int64_t usual) {
  return static_cast<uint8_t>(given >= 0 ? given : usual);
}

std::string hex(uint16_t number) {
  char digits[8];
  snprintf(digits, sizeof digits, "%#x", number);
  return digits;
}

// Where a port's table has a partition. Its members are full ones, or limited ones, which reach full ones alone: the
// top bit says which, and does not name a partition.
std::optional<uint16_t> find_partition(const Library& library, ibv_context* context, uint8_t port,
                                       int entries, uint16_t wanted) {
  std::optional<uint16_t> found;
  for (int i = entries - 1; i >= 0; --i) {
    uint16_t key = 0;
    if (library.query_pkey(context, port, i, &key) != 0) continue;
    key = ntohs(key);
    if (((key ^ wanted) & ~kFullMember) == 0 && (!found || key & kFullMember))
      found = static_cast<uint16_t>(i);
  }
  return found;
}

}  // namespace

PortChoice choose_port(const Library& library, ibv_context* context, const std::string& device) {
  PortChoice choice;
  const auto refuse = [&](std::string why) {
    choice.unusable_because = std::move(why);
    return choice;
  };
  ibv_port_attr& attr = choice.attr;
  uint8_t& port = choice.port;
  const int64_t wanted = config().ib_port;
  for (port = 1; library.query_port(context, port, &attr) == 0; ++port)
    if (attr.state == IBV_PORT_ACTIVE && (wanted == 0 || wanted == port)) break;
  if (library.query_port(context, port, &attr) != 0 || attr.state != IBV_PORT_ACTIVE)
    return refuse(wanted ? text("port {} (WEFT_IB_PORT) is not active", wanted) : "no port is active");
  std::vector<GidEntry> gids;
  for (int i = 0; i < attr.gid_tbl_len; ++i) {
    GidEntry entry{i, {}, library.gid_type(device, port, i)};
    if (library.query_gid(context, port, i, &entry.gid) == 0) gids.push_back(entry);
  }
  choice.gid_index = config().gid_index >= 0 ? static_cast<int>(config().gid_index) : choose_gid(gids);
  if (choice.gid_index >= attr.gid_tbl_len)
    return refuse(text("GID {} (WEFT_GID_INDEX) is beyond its {}", choice.gid_index, attr.gid_tbl_len));
  if (choice.gid_index < 0 && attr.link_layer == IBV_LINK_LAYER_ETHERNET)
    return refuse("its port has no usable GID");
  if (const auto pkey = static_cast<uint16_t>(config().pkey)) {
    const auto found = find_partition(library, context, port, attr.pkey_tbl_len, pkey);
    if (!found)
      return refuse(
          text("port {} is not in the partition of P_Key {} (WEFT_PKEY)", static_cast<int>(port), hex(pkey)));
    choice.pkey_index = *found;
  }
  return choice;
}

ibv_ah_attr route_to(uint8_t port, int gid_index, const PortPlace& there) {
  ibv_ah_attr ah{};
  ah.port_num = port;
  ah.dlid = there.lid;
  ah.sl = given_or(config().service_level, there.is_ethernet ? kRoceServiceLevel : 0);
  ah.is_global = gid_index >= 0 && (there.is_ethernet || there.lid == 0);
  if (ah.is_global) {
    ah.grh.dgid = there.gid;
    ah.grh.sgid_index = static_cast<uint8_t>(gid_index);
    ah.grh.hop_limit = kHopLimit;
    ah.grh.traffic_class = given_or(config().traffic_class, there.is_ethernet ? kRoceTrafficClass : 0);
  }
  return ah;
}

uint8_t reads_of(int limit) {
  return static_cast<uint8_t>(std::clamp<int>(limit, 1, kReadDepth));
}

bool to_init(const Library& library, ibv_qp* qp, const PortChoice& port, int access) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = port.port;
  attr.pkey_index = port.pkey_index;
  attr.qp_access_flags = static_cast<unsigned>(access);
  return library.modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ==
         0;
}

bool to_ready(const Library& library, ibv_qp* qp, const ibv_ah_attr& route, uint8_t mtu,
              const Connection& connection) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = mtu;
  attr.dest_qp_num = connection.qpn;
  attr.rq_psn = connection.receive_psn;
  attr.max_dest_rd_atomic = connection.reads_in;
  attr.min_rnr_timer = static_cast<uint8_t>(config().rnr_timer);
  attr.ah_attr = route;
  int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  if (library.modify_qp(qp, &attr, mask) != 0) return false;
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = static_cast<uint8_t>(config().rc_timeout);
  attr.retry_cnt = static_cast<uint8_t>(config().rc_retry);
  attr.rnr_retry = kRnrRetriesForEver;  // a receiver that is behind is not an error
  attr.sq_psn = connection.send_psn;
  attr.max_rd_atomic = connection.reads_out;
  mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
         IBV_QP_MAX_QP_RD_ATOMIC;
  return library.modify_qp(qp, &attr, mask) == 0;
}

SocketAddress socket_address_of(const ibv_gid& gid, uint16_t port) {
  const auto is_zero = [&](int from, int to) {
    return std::all_of(gid.raw + from, gid.raw + to, [](uint8_t byte) { return byte == 0; });
  };
  if (is_zero(0, 16)) return {};
  const bool is_mapped_v4 = is_zero(0, 10) && gid.raw[10] == 0xff && gid.raw[11] == 0xff;
  return is_mapped_v4 ? socket_address(AF_INET, gid.raw + 12, port) : socket_address(AF_INET6, gid.raw, port);
}

}  // namespace weft::provider::ib
