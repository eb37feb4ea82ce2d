// SPDX-License-Identifier: Apache-2.0
//
// Memory of a device as the model of a NIC reaches it (nic_model.h): by copies, never by address.
//   WEFT_TRY_ASSIGN(std::shared_ptr<FarMemory> gpu, gpu_memory(device));    // places are addresses of the device
//   auto file = file_memory(own_memory_file());                            // the CPU in its place
// What copies cost the model is not what a NIC would take.
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>

#include "base/device.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace weft::testing {

class FarMemory {
 public:
  virtual ~FarMemory() = default;
  // Return when it is done. 8 bytes at a place for 8 are written at once. Errors: kSystem.
  virtual Status read(void* to, uint64_t place, uint64_t bytes) const = 0;
  virtual Status write(uint64_t place, const void* from, uint64_t bytes) = 0;
};

// Of a GPU, on a stream of its own.
Result<std::shared_ptr<FarMemory>> gpu_memory(Device device);
// What a file has at a place.
std::shared_ptr<FarMemory> file_memory(FileDescriptor file);
// The memory of this process as a file, in which places are addresses.
FileDescriptor own_memory_file();

}  // namespace weft::testing
