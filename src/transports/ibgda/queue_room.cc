// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/queue_room.h"

#include <filesystem>

#include "base/cuda_driver.h"
#include "memory/device_memory.h"

namespace weft::ibgda {
namespace {

constexpr uint64_t kGpuPage = 64 << 10;

uint64_t address(const void* at) {
  return reinterpret_cast<uint64_t>(at);
}

Result<RoomFile> export_memory(const char* what, int ordinal, const std::byte* at, uint64_t bytes) {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));
  int made = -1;
  WEFT_TRY(cuda_status(current.driver().cuMemGetHandleForAddressRange(&made, address(at), bytes,
                                                                      CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
                       "export {} of cuda:{} as a DMA-BUF", what, ordinal));
  return RoomFile{FileDescriptor(made), 0};
}

class CudaRoom : public QueueRoom {
 public:
  CudaRoom(Device device, CUdeviceptr held, uint64_t bytes) : device_(device), held_(held), bytes_(bytes) {}
  ~CudaRoom() override {
    auto current = CudaContext::enter(device_.ordinal);
    if (current.ok()) current->driver().cuMemFree(held_);
  }
  std::byte* data() const override {
    return reinterpret_cast<std::byte*>((held_ + kGpuPage - 1) / kGpuPage * kGpuPage);
  }
  Result<RoomFile> file() const override { return export_memory("queues", device_.ordinal, data(), bytes_); }
  Status read(void* to, const void* at, uint64_t bytes) const override {
    return copy_from_device(device_.ordinal, to, static_cast<const std::byte*>(at), bytes);
  }
  Status write(void* at, const void* from, uint64_t bytes) override {
    return copy_to_device(device_.ordinal, static_cast<std::byte*>(at), from, bytes);
  }

 private:
  const Device device_;
  const CUdeviceptr held_;
  const uint64_t bytes_;
};

class CudaRooms : public QueueRooms {
 public:
  explicit CudaRooms(Device device) : device_(device) {}
  std::string name() const override { return text("cuda:{}", device_.ordinal); }
  Result<std::unique_ptr<QueueRoom>> make(uint64_t bytes) override {
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(device_.ordinal));
    const uint64_t whole = (bytes + kGpuPage - 1) / kGpuPage * kGpuPage;
    CUdeviceptr held = 0;
    WEFT_TRY(cuda_status(current.driver().cuMemAlloc(&held, whole + kGpuPage),
                         "allocate {} bytes for queues on cuda:{}", whole, device_.ordinal));
    auto room = std::make_unique<CudaRoom>(device_, held, whole);
    // What the driver copies is in order with what a NIC writes there.
    const int yes = 1;
    WEFT_TRY(cuda_status(
        current.driver().cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address(room->data())),
        "prepare queues on cuda:{} for a NIC", device_.ordinal));
    WEFT_TRY(zero_device_memory(device_.ordinal, room->data(), whole));
    return std::unique_ptr<QueueRoom>(std::move(room));
  }
  Result<RoomFile> export_file(std::byte* at, uint64_t bytes) override {
    return export_memory("a window", device_.ordinal, at, bytes);
  }
  // Below "owner", the host has to flush after a NIC has written, before kernels of the GPU look.
  std::string no_order() const override {
    const Result<int> order =
        cuda_device_attribute(device_.ordinal, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
    if (!order.ok()) return order.status().message();
    if (*order >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) return "";
    return text("cuda:{} does not order what a NIC writes (GPU_DIRECT_RDMA_WRITES_ORDERING)",
                device_.ordinal);
  }
  std::string no_peer_memory() const override {
    std::error_code ignored;
    for (const char* module : {"nvidia_peermem", "nv_peer_mem"})
      if (std::filesystem::exists(std::string("/sys/module/") + module, ignored)) return "";
    return "the kernel module nvidia_peermem is not loaded";
  }

 private:
  const Device device_;
};

}  // namespace

Result<std::unique_ptr<QueueRooms>> cuda_rooms(Device device) {
  WEFT_TRY(Status(cuda_driver().status()));
  return std::unique_ptr<QueueRooms>(std::make_unique<CudaRooms>(device));
}

std::string no_device_windows(Device device) {
  const auto driver = cuda_driver();
  return driver.ok() ? CudaRooms(device).no_order() : driver.status().message();
}

std::string no_device_memory(Device device) {
  const auto driver = cuda_driver();
  if (!driver.ok()) return driver.status().message();
  CUdevice id = 0;
  int exports = 0;
  const bool is_known =
      (*driver)->cuDeviceGet(&id, device.ordinal) == CUDA_SUCCESS &&
      (*driver)->cuDeviceGetAttribute(&exports, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, id) == CUDA_SUCCESS;
  const std::string no_peers = CudaRooms(device).no_peer_memory();
  if ((is_known && exports != 0) || no_peers.empty()) return "";
  return text("cuda:{} exports no memory (DMA-BUF: open kernel modules of the driver), {}", device.ordinal,
              no_peers);
}

}  // namespace weft::ibgda
