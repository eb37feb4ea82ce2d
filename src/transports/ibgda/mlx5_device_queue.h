// SPDX-License-Identifier: Apache-2.0
//
// A queue pair of an mlx5 NIC whose ring, record and completions lie in memory of a device, so that kernels write and
// poll their own memory. Made by commands (DevX), as libibverbs puts queues in memory of the host. Not run on hardware.
//   const std::string why = choose_room_way(nic);         // sets nic.way; why it is not the best one
//   auto queue = std::make_unique<DeviceQueue>(nic, blocks); WEFT_TRY(queue->open());
// Threads: as QueuePair.
#pragma once

#include <memory>
#include <string>

#include "transports/ibgda/mlx5_opened.h"
#include "transports/ibgda/nic.h"

namespace weft::ibgda {

// Tries each way to register a room of nic.rooms: DMA-BUF, then peer memory. Returns why those before the chosen one
// are none, with "; " between.
std::string choose_room_way(Opened& nic);

class DeviceQueue : public QueuePair {
 public:
  DeviceQueue(std::shared_ptr<Opened> nic, uint32_t blocks) : nic_(std::move(nic)), blocks_(blocks) {}
  ~DeviceQueue() override { close(); }
  DeviceQueue(const DeviceQueue&) = delete;

  Status open();
  const QueueMemory& memory() const override { return at_; }
  std::string address() const override { return address_of(*nic_, at_.number, psn_); }
  Status connect(std::string_view address) override;
  Status reset() override;
  bool is_rung_by_host() const override { return doorbell_.is_rung_by_host(); }
  void ring(uint64_t doorbell) override { doorbell_.ring(doorbell); }
  bool is_far() const override { return true; }
  uint32_t posted() const override;
  Completion completion(uint32_t index) const override;
  Status put_entry(uint32_t index, const Entry& entry) override;

 private:
  Status make_room();
  Status create_cq();
  Status create_qp();
  Status to_init();
  Status to_ready(const QueueAddress& peer);
  Status change(const char* what, void* command);
  void close();

  const std::shared_ptr<Opened> nic_;
  const uint32_t blocks_;
  QueueMemory at_;
  std::unique_ptr<QueueRoom> room_;
  mlx5dv_devx_umem* umem_ = nullptr;
  mlx5dv_devx_uar* uar_ = nullptr;
  mlx5dv_devx_obj *cq_ = nullptr, *qp_ = nullptr;
  uint32_t cq_number_ = 0, psn_ = 0;
  Doorbell doorbell_;
};

}  // namespace weft::ibgda
