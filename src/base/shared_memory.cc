// SPDX-License-Identifier: Apache-2.0
#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "base/random.h"

namespace weft {

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this == &other) return *this;
  release();
  fd_ = std::move(other.fd_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  name_ = std::exchange(other.name_, {});
  return *this;
}

void SharedMemory::release() {
  if (data_) munmap(data_, bytes_);
  data_ = nullptr;
  fd_.close();
  name_ = {};
}

Status SharedMemory::map(uint64_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (at == MAP_FAILED) return Status::from_errno(errno, text("map {} shared bytes", bytes));
  data_ = static_cast<char*>(at);
  bytes_ = bytes;
  return {};
}

// Only sealed memory is mapped: a file of that size could be cut short, or not be memory at all.
Status SharedMemory::map_sealed(uint64_t bytes, const std::string& what) {
  struct stat info{};
  const int seals = fcntl(fd_.get(), F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd_.get(), &info) != 0 ||
      static_cast<uint64_t>(info.st_size) != bytes)
    return Status::make(Code::kSystem, "shared memory: {} is not the {} bytes that a peer offered", what,
                        bytes);
  return map(bytes);
}

Result<SharedMemory> SharedMemory::create(uint64_t bytes, const char* label) {
  SharedMemory made;
  made.fd_ = FileDescriptor(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.fd_.is_open() || ftruncate(made.fd_.get(), static_cast<off_t>(bytes)) != 0)
    return Status::from_errno(errno, text("make {} shared bytes", bytes));
  // A sealed size: nobody can shrink the memory under another's loads.
  fcntl(made.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  WEFT_TRY(made.map(bytes));
  made.name_ = {static_cast<uint32_t>(getpid()), static_cast<uint32_t>(made.fd_.get()), random_key()};
  std::memcpy(made.data_, &made.name_.key, sizeof made.name_.key);
  return made;
}

Result<SharedMemory> SharedMemory::open(const Name& name, uint64_t bytes) {
  SharedMemory made;
  const std::string path = text("/proc/{}/fd/{}", name.pid, name.fd);
  made.fd_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!made.fd_.is_open()) return Status::from_errno(errno, "open a peer's shared memory");
  WEFT_TRY(made.map_sealed(bytes, path));
  if (std::memcmp(made.data_, &name.key, sizeof name.key) != 0)
    return Status::make(Code::kSystem, "shared memory: {} does not begin with its key", path);
  made.name_ = name;
  return made;
}

Result<SharedMemory> SharedMemory::open(FileDescriptor fd, uint64_t bytes) {
  SharedMemory made;
  made.fd_ = std::move(fd);
  WEFT_TRY(made.map_sealed(bytes, "the descriptor"));
  made.fd_.close();  // a job has one of these for every two ranks
  return made;
}

Result<FileDescriptor> SharedMemory::descriptor() const {
  FileDescriptor copy(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy.is_open()) return Status::from_errno(errno, "name shared memory once more");
  return copy;
}

}  // namespace weft
