// SPDX-License-Identifier: Apache-2.0
//
// HostVisible is a little zero-filled memory that both the host and the device's kernels read and write while
// a kernel runs: fault boxes, counts. On CUDA it is pinned host memory; on the host plain memory.
//   WEFT_TRY_ASSIGN(auto boxes, HostVisible::create(device, sizeof(FaultBox)));
// Threads: the object is immutable. Lifetime: outlive every kernel that was given data().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/device.h"
#include "base/status.h"

namespace weft {

class HostVisible {
 public:
  static Result<std::unique_ptr<HostVisible>> create(Device device, uint64_t bytes);
  ~HostVisible();
  HostVisible(const HostVisible&) = delete;

  // The same address for host and device.
  std::byte* data() const { return data_; }
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  HostVisible(Device device, std::byte* data) : device_(device), data_(data) {}
  Device device_;
  std::byte* data_;
};

}  // namespace weft
