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
  Device** (*get_device_list)(int* count) = nullptr;
  void (*free_device_list)(Device**) = nullptr;
  const char* (*get_device_name)(Device*) = nullptr;
  Context* (*open_device)(Device*) = nullptr;
  int (*close_device)(Context*) = nullptr;
  Pd* (*alloc_pd)(Context*) = nullptr;
  int (*dealloc_pd)(Pd*) = nullptr;
  Mr* (*reg_mr)(Pd*, void*, size_t, int access) = nullptr;
  Mr* (*reg_mr_iova2)(Pd*, void*, size_t, uint64_t iova, unsigned access) = nullptr;  // optional
  Mr* (*reg_dmabuf_mr)(Pd*, uint64_t offset, size_t, uint64_t iova, int fd,
                       int access) = nullptr;  // optional
  int (*dereg_mr)(Mr*) = nullptr;
  Cq* (*create_cq)(Context*, int entries, void* context, void* channel, int vector) = nullptr;
  int (*destroy_cq)(Cq*) = nullptr;
  Srq* (*create_srq)(Pd*, SrqInitAttr*) = nullptr;
  int (*destroy_srq)(Srq*) = nullptr;
  Qp* (*create_qp)(Pd*, QpInitAttr*) = nullptr;
  int (*modify_qp)(Qp*, QpAttr*, int mask) = nullptr;
  int (*destroy_qp)(Qp*) = nullptr;
  Ah* (*create_ah)(Pd*, AhAttr*) = nullptr;
  int (*destroy_ah)(Ah*) = nullptr;
  int (*query_device)(Context*, DeviceAttr*) = nullptr;
  int (*query_port)(Context*, uint8_t port, PortAttr*) = nullptr;
  int (*query_gid)(Context*, uint8_t port, int index, Gid*) = nullptr;
  int (*query_pkey)(Context*, uint8_t port, int index, uint16_t* big_endian) = nullptr;
  const char* (*wc_status_str)(int) = nullptr;
  // "RoCE v2", "IB/RoCE v1", or empty where the kernel does not say; from sysfs.
  std::function<std::string(const std::string& device, int port, int index)> gid_type;
};

struct GidEntry {
  int index = 0;
  Gid gid{};
  std::string type;
};
// The index to use: not empty, not link-local, RoCE v2 before v1, IPv4-mapped before IPv6; -1 when none will
// do.
int choose_gid(const std::vector<GidEntry>& entries);

}  // namespace ib

std::shared_ptr<Provider> make_verbs();
std::shared_ptr<Provider> make_verbs(const ib::Library& library);

}  // namespace weft::provider
