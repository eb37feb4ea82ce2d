// SPDX-License-Identifier: Apache-2.0
//
// The shared parts of an mlx5 NIC's queues in host or GPU memory: the opened NIC, addresses, doorbells.
// Threads: one at a time, but for Doorbell::ring().
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "memory/host_visible.h"
#include "providers/verbs/connect.h"
#include "transports/ibgda/mlx5_library.h"
#include "transports/ibgda/pinned_pages.h"
#include "transports/ibgda/queue_room.h"

namespace weft::ibgda {

namespace ib = provider::ib;

// How a NIC reaches queues in memory of a device.
enum class RoomWay { kNone, kDmabuf, kPeerMemory };

struct Opened {
  ib::Library verbs;
  mlx5::Library direct;
  std::string name;
  Device device;
  ib::PortChoice port;
  ibv_gid gid{};
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  uint32_t pd_number = 0;
  std::unique_ptr<PinnedPages> pages;  // null on the CPU
  std::unique_ptr<QueueRooms> rooms;   // null: queues lie in memory of the host
  RoomWay way = RoomWay::kNone;

  ~Opened() {
    if (pd) verbs.dealloc_pd(pd);
    if (context) verbs.close_device(context);
  }
};

// kSystem with the text of errno. Logged.
Status failed(const char* what, const std::string& nic);

struct QueueAddress {
  char tag[4] = {'m', 'l', 'x', '5'};
  uint32_t number = 0, psn = 0;
  ibv_gid gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0, is_ethernet = 0;
  uint32_t unused = 0;
};
static_assert(sizeof(QueueAddress) == 40);

std::string address_of(const Opened& nic, uint32_t number, uint32_t psn);
Result<QueueAddress> read_address(std::string_view bytes);
// The settings that both ends agree on, and the path between them.
struct Route {
  ibv_ah_attr way;
  uint8_t mtu;
};
Route route_to(const Opened& nic, const QueueAddress& peer);

// The NIC's register of a queue, as kernels reach it: itself, mapped for a GPU, or a word that the host passes on.
class Doorbell {
 public:
  Status open(Opened& nic, void* reg);
  void close();
  uint64_t* at() const { return at_; }
  bool is_rung_by_host() const { return word_ != nullptr; }
  void ring(uint64_t doorbell) const;

 private:
  Opened* nic_ = nullptr;
  uint64_t *register_ = nullptr, *at_ = nullptr;
  std::unique_ptr<HostVisible> word_;  // where the register cannot be mapped
  bool is_pinned_ = false;
};

}  // namespace weft::ibgda
