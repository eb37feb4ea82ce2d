// SPDX-License-Identifier: Apache-2.0
//
// SharedMemory is memory that processes of one host share. It has no name in the file system, so nothing is
// left behind when a process is killed; another process opens it by the value of name().
//   Result<SharedMemory> mine = SharedMemory::create(bytes);  give(mine->name());
//   Result<SharedMemory> same = SharedMemory::open(name, bytes);  // over there; kSystem where it is not
//   allowed
// Threads: a value; move it to hand it over.
#pragma once

#include <cstdint>
#include <string>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace weft {

class SharedMemory {
 public:
  struct Name {
    uint32_t pid = 0;
    uint32_t fd = 0;
    uint64_t key = 0;  // what the memory begins with until its owner writes there: tells it from any other
  };

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { release(); }

  // Zero but for the key. `label` is what it is called among the descriptors of the process.
  static Result<SharedMemory> create(uint64_t bytes, const char* label = "weft-shared");
  static Result<SharedMemory> open(const Name& name, uint64_t bytes);
  // The same memory by a descriptor that came from there instead: see descriptor().
  static Result<SharedMemory> open(FileDescriptor fd, uint64_t bytes);

  char* data() const { return data_; }  // null: none
  Name name() const { return name_; }
  Result<FileDescriptor> descriptor() const;  // one more, to send to another process
  void release();

 private:
  Status map(uint64_t bytes);
  Status map_sealed(uint64_t bytes, const std::string& what);
  FileDescriptor fd_;
  char* data_ = nullptr;
  uint64_t bytes_ = 0;
  Name name_;
};

}  // namespace weft
