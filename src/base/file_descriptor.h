// SPDX-License-Identifier: Apache-2.0
//
// FileDescriptor owns an open descriptor and closes it at the end of its life.
//   FileDescriptor fd(memfd_create("weft", MFD_CLOEXEC));
//   if (!fd.is_open()) return Status::from_errno(errno, "memfd_create");
// Threads: a value; move it to hand it over.
#pragma once

#include <unistd.h>

#include <utility>

namespace weft {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { close(); }

  bool is_open() const { return fd_ >= 0; }
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace weft
