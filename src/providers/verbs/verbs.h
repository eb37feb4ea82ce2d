// SPDX-License-Identifier: Apache-2.0
//
// The verbs provider: InfiniBand and RoCE through libibverbs, opened at run time. One reliable connection per
// peer and rail, made by a handshake of datagrams that are repeated until answered; one shared receive queue;
// port and GID are found by looking. Not run on hardware: its tests run against a fake of the library.
//   auto provider = make_verbs();
//   auto provider = make_verbs(fake_library);
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "providers/provider.h"
#include "providers/verbs/abi.h"

namespace weft::provider {

namespace ib {

// The entry points in use; a test puts its own functions here.
struct Library {
  decltype(&ibv_get_device_list) get_device_list = nullptr;
  decltype(&ibv_free_device_list) free_device_list = nullptr;
  decltype(&ibv_get_device_name) get_device_name = nullptr;
  decltype(&ibv_open_device) open_device = nullptr;
  decltype(&ibv_close_device) close_device = nullptr;
  decltype(&ibv_alloc_pd) alloc_pd = nullptr;
  decltype(&ibv_dealloc_pd) dealloc_pd = nullptr;
  decltype(&ibv_reg_mr) reg_mr = nullptr;
  decltype(&ibv_reg_mr_iova2) reg_mr_iova2 = nullptr;    // optional
  decltype(&ibv_reg_dmabuf_mr) reg_dmabuf_mr = nullptr;  // optional
  decltype(&ibv_dereg_mr) dereg_mr = nullptr;
  decltype(&ibv_create_cq) create_cq = nullptr;
  decltype(&ibv_destroy_cq) destroy_cq = nullptr;
  decltype(&ibv_create_srq) create_srq = nullptr;
  decltype(&ibv_destroy_srq) destroy_srq = nullptr;
  decltype(&ibv_create_qp) create_qp = nullptr;
  decltype(&ibv_modify_qp) modify_qp = nullptr;
  decltype(&ibv_destroy_qp) destroy_qp = nullptr;
  decltype(&ibv_create_ah) create_ah = nullptr;
  decltype(&ibv_destroy_ah) destroy_ah = nullptr;
  decltype(&ibv_query_device) query_device = nullptr;
  // Upstream declares it for the attributes of its oldest release, which begin as today's.
  int (*query_port)(ibv_context*, uint8_t port, ibv_port_attr*) = nullptr;
  decltype(&ibv_query_gid) query_gid = nullptr;
  decltype(&ibv_query_pkey) query_pkey = nullptr;
  decltype(&ibv_wc_status_str) wc_status_str = nullptr;
  // "RoCE v2", "IB/RoCE v1", or empty where the kernel does not say; from sysfs.
  std::function<std::string(const std::string& device, int port, int index)> gid_type;
};

struct GidEntry {
  int index = 0;
  ibv_gid gid{};
  std::string type;
};
// The index to use: not empty, not link-local, RoCE v2 before v1, IPv4-mapped before IPv6; -1 when none will
// do.
int choose_gid(const std::vector<GidEntry>& entries);

}  // namespace ib

std::shared_ptr<Provider> make_verbs();
std::shared_ptr<Provider> make_verbs(const ib::Library& library);

}  // namespace weft::provider
