// SPDX-License-Identifier: Apache-2.0
//
// A little GPU memory with known contents, set up outside any stream of the user.
//   WEFT_TRY(zero_device_memory(ordinal, at, bytes));
//   WEFT_TRY_ASSIGN(auto copy, DeviceCopy::create(ordinal, table.data(), table_bytes));
// Each call runs on a stream of its own and returns when it is done. Threads: any. Errors: kSystem,
// kUnsupported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"

namespace weft {

Status zero_device_memory(int ordinal, std::byte* at, uint64_t bytes);
Status copy_from_device(int ordinal, void* dst, const std::byte* src, uint64_t bytes);
Status copy_to_device(int ordinal, std::byte* dst, const void* src, uint64_t bytes);

// Bytes copied once into memory of a GPU, which kernels read. Must outlive those kernels.
class DeviceCopy {
 public:
  static Result<std::unique_ptr<DeviceCopy>> create(int ordinal, const void* src, uint64_t bytes);
  ~DeviceCopy();
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  std::byte* data() const { return data_; }

 private:
  DeviceCopy(int ordinal, std::byte* data) : ordinal_(ordinal), data_(data) {}
  const int ordinal_;
  std::byte* const data_;
};

// A stream that waits for nobody's work but its own. Threads: one at a time.
class OwnStream {
 public:
  static Result<std::unique_ptr<OwnStream>> create(int ordinal);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  void* get() const { return stream_; }  // CUstream
  Status wait() const;                   // until what it got is done

 private:
  OwnStream(int ordinal, void* stream) : ordinal_(ordinal), stream_(stream) {}
  const int ordinal_;
  void* const stream_;
};

// Waits for everything that was queued on a GPU by this process. For memory that is about to be unmapped.
Status wait_for_device(int ordinal);

}  // namespace weft
