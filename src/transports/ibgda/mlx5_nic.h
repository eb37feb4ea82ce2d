// SPDX-License-Identifier: Apache-2.0
//
// mlx5 NICs through libibverbs and libmlx5, opened at run time. Not run on hardware: its tests run against a fake of
// the libraries. Queues lie in memory of the GPU where its driver, the kernel and the NIC's library allow it (DMA-BUF, or
// peer memory), else in memory of the host, where libmlx5 puts them, pinned for GPUs. Which, and why, is logged.
// Doorbells: the NIC's register, mapped for the GPU; where its driver does not map it, a thread of the host rings.
//   NicSource& source = mlx5_nics();
//   Mlx5Nics source(fake_verbs_library(), fake_mlx5_library());
#pragma once

#include <functional>

#include "providers/verbs/verbs.h"
#include "transports/ibgda/mlx5_library.h"
#include "transports/ibgda/nic.h"
#include "transports/ibgda/queue_room.h"

namespace weft::ibgda {

struct Opened;

class Mlx5Nics : public NicSource {
 public:
  // Memory of a device that queues may lie in; null where they lie in memory of the host anyway.
  using MakeRooms = std::function<Result<std::unique_ptr<QueueRooms>>(Device)>;
  static Result<std::unique_ptr<QueueRooms>> gpu_rooms(Device device);

  Mlx5Nics(Result<provider::ib::Library> verbs, Result<mlx5::Library> direct,
           MakeRooms make_rooms = gpu_rooms)
      : verbs_(std::move(verbs)), direct_(std::move(direct)), make_rooms_(std::move(make_rooms)) {}
  // The first usable one, or the first of WEFT_PROXY_NICS that is. Says of each device why it is of no use.
  NicFinding find(Device device) override;
  Result<std::unique_ptr<Nic>> open(Device device) override;

 private:
  std::string where_memory_lies(Device device) const;
  std::string prepare_rooms(Opened& opened) const;
  void open_context(Opened& opened, ibv_device* device, std::string& why_host) const;

  const Result<provider::ib::Library> verbs_;
  const Result<mlx5::Library> direct_;
  const MakeRooms make_rooms_;
};

NicSource& mlx5_nics();

}  // namespace weft::ibgda
