// SPDX-License-Identifier: Apache-2.0
//
// The part of libmlx5 that hands commands to a NIC (DevX), without hardware: queues of a model of a NIC in memory that the
// caller registered. A DMA-BUF is a file here that this side maps for itself, so a wrong place in it shows. Commands are read
// byte by byte, and every bit that has no meaning must be 0.
//   FakeDevx devx([](uint32_t pd) { return nic; });  library.devx = FakeDevx::calls();
// Threads: any. One at a time: its functions find it by themselves.
#pragma once

#include <cerrno>
#include <functional>
#include <memory>
#include <string>

#include "support/nic_model.h"
#include "transports/ibgda/mlx5_library.h"
#include "transports/ibgda/queue_room.h"

namespace weft::testing {

// What a kernel or a NIC refuses, by errno; 0: it takes it.
struct DevxPlan {
  int context = 0, dmabuf = 0, peer_memory = EFAULT, queue_pair = 0;
  int window = 0;  // by DMA-BUF
};

class FakeDevx {
 public:
  using NicOf = std::function<ModelNic*(uint32_t pd)>;
  struct State;

  explicit FakeDevx(NicOf nic_of);
  ~FakeDevx();
  FakeDevx(const FakeDevx&) = delete;
  static ibgda::mlx5::Devx calls();
  // Addresses of peers, which the commands need.
  static ibv_ah* create_ah(ibv_pd*, ibv_ah_attr* attr);
  static int destroy_ah(ibv_ah* ah);
  static int init_ah(mlx5dv_obj* object);

  void set_plan(const DevxPlan& plan);
  std::string failures() const;
  size_t left_over() const;
  size_t queues_made() const;  // so far
  int refuses_window() const;

 private:
  const std::unique_ptr<State> state_;
};

// Rooms in files, some pages from their beginning; file() is wrong by `error` bytes. What lies around a room is of no use to
// anybody.
class FileRooms : public ibgda::QueueRooms {
 public:
  explicit FileRooms(int64_t error = 0, std::string no_peers = "", std::string no_order = "")
      : error_(error), no_peers_(std::move(no_peers)), no_order_(std::move(no_order)) {}
  std::string name() const override { return "file:0"; }
  Result<std::unique_ptr<ibgda::QueueRoom>> make(uint64_t bytes) override;
  // The memory of this process as a file; the place in it is wrong by `error`, too.
  Result<ibgda::RoomFile> export_file(std::byte* at, uint64_t bytes) override;
  std::string no_order() const override { return no_order_; }
  std::string no_peer_memory() const override { return no_peers_; }

 private:
  const int64_t error_;
  const std::string no_peers_, no_order_;
};

}  // namespace weft::testing
