// SPDX-License-Identifier: Apache-2.0
//
// LocalMemory is zero-filled memory of one rank's device that peers never touch: tables, counters, scratch.
//   WEFT_TRY_ASSIGN(auto memory, LocalMemory::create(device, bytes));
//   WEFT_TRY(memory->write(0, table.data(), table.size() * sizeof(table[0])));
// Threads: const methods may run concurrently. Lifetime: outlive every kernel that was given data().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/device.h"
#include "base/status.h"

namespace weft {

class LocalMemory {
 public:
  // `bytes` at least 1. Errors: kSystem when the device has no room.
  static Result<std::unique_ptr<LocalMemory>> create(Device device, uint64_t bytes);
  ~LocalMemory();
  LocalMemory(const LocalMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }
  // Copies host memory to [offset, offset + bytes); returns when it is there. Not while a graph is captured.
  Status write(uint64_t offset, const void* src, uint64_t bytes);
  // The same in the order of `stream`: kernels launched there before see the old bytes. `src` may change when
  // this returns; of a stream that is captured it must live as long as the graph, which copies it again.
  Status write_in_order(uint64_t offset, const void* src, uint64_t bytes, void* stream);

 private:
  LocalMemory(Device device, std::byte* data, uint64_t bytes) : device_(device), data_(data), bytes_(bytes) {}
  Device device_;
  std::byte* data_;
  uint64_t bytes_;
};

}  // namespace weft
