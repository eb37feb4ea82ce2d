// SPDX-License-Identifier: Apache-2.0
//
// Memory of a device that is exported to a NIC. Rooms are for queues: kernels write them, the NIC reads them, the host
// copies from and to them. Windows are made by others. Not run on hardware.
//   WEFT_TRY_ASSIGN(auto room, rooms.make(bytes));
//   WEFT_TRY_ASSIGN(const RoomFile file, room->file());   // for a driver that takes DMA-BUF
//   WEFT_TRY_ASSIGN(const RoomFile file, rooms.export_file(window, bytes));   // the same of a window
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/device.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace weft::ibgda {

// Memory for another driver to map: a file (DMA-BUF), and the room's offset in it.
struct RoomFile {
  FileDescriptor file;
  uint64_t offset = 0;
};

class QueueRoom {
 public:
  virtual ~QueueRoom() = default;
  virtual std::byte* data() const = 0;  // as kernels see it; page-aligned
  // Errors: kUnsupported with the driver's words.
  virtual Result<RoomFile> file() const = 0;
  // Of the host; returns when it is done. `at` lies within the room. Errors: kSystem.
  virtual Status read(void* to, const void* at, uint64_t bytes) const = 0;
  virtual Status write(void* at, const void* from, uint64_t bytes) = 0;
};

class QueueRooms {
 public:
  virtual ~QueueRooms() = default;
  virtual std::string name() const = 0;  // "cuda:0"
  // `bytes` of zeros. Errors: kSystem.
  virtual Result<std::unique_ptr<QueueRoom>> make(uint64_t bytes) = 0;
  // Memory of the device that a window lies in, [at, at + bytes), as another driver maps it. Errors: kUnsupported with the
  // driver's words.
  virtual Result<RoomFile> export_file(std::byte* at, uint64_t bytes) = 0;
  // Why kernels of the device may see what a NIC writes to its memory in another order; empty: they do not.
  virtual std::string no_order() const = 0;
  // Why a NIC cannot reach them by address (peer memory); empty: it may.
  virtual std::string no_peer_memory() const = 0;
};

// Of a GPU.
Result<std::unique_ptr<QueueRooms>> cuda_rooms(Device device);

// For `weft info`, which opens no NIC: why neither queues nor windows can lie in a GPU's memory; empty: the kernel
// decides. And why windows cannot, even if queues can.
std::string no_device_memory(Device device);
std::string no_device_windows(Device device);

}  // namespace weft::ibgda
