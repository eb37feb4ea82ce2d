// SPDX-License-Identifier: Apache-2.0
#include "support/far_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/cuda_driver.h"
#include "memory/device_memory.h"

namespace weft::testing {
namespace {

class GpuMemory : public FarMemory {
 public:
  GpuMemory(Device device, std::unique_ptr<OwnStream> stream) : device_(device), stream_(std::move(stream)) {}
  Status read(void* to, uint64_t place, uint64_t bytes) const override {
    return copy(reinterpret_cast<CUdeviceptr>(to), place, bytes);
  }
  Status write(uint64_t place, const void* from, uint64_t bytes) override {
    return copy(place, reinterpret_cast<CUdeviceptr>(from), bytes);
  }

 private:
  Status copy(CUdeviceptr to, CUdeviceptr from, uint64_t bytes) const {
    std::lock_guard lock(mutex_);
    WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(device_.ordinal));
    auto* stream = static_cast<CUstream>(stream_->get());
    WEFT_TRY(cuda_status(current.driver().cuMemcpyAsync(to, from, bytes, stream), "copy {} bytes of {}",
                         bytes, device_));
    return stream_->wait();
  }
  const Device device_;
  const std::unique_ptr<OwnStream> stream_;
  mutable std::mutex mutex_;
};

class FileMemory : public FarMemory {
 public:
  explicit FileMemory(FileDescriptor file) : file_(std::move(file)) {}
  Status read(void* to, uint64_t place, uint64_t bytes) const override {
    return check(pread(file_.get(), to, bytes, static_cast<off_t>(place)), "read", place, bytes);
  }
  // The kernel may copy a word byte by byte, which no NIC does: a word goes to its address, once the file has it.
  Status write(uint64_t place, const void* from, uint64_t bytes) override {
    if (bytes != sizeof(uint64_t) || place % sizeof(uint64_t) != 0)
      return check(pwrite(file_.get(), from, bytes, static_cast<off_t>(place)), "write", place, bytes);
    uint64_t known = 0, value = 0;
    WEFT_TRY(read(&known, place, sizeof known));
    std::memcpy(&value, from, sizeof value);
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(place)).store(value, std::memory_order_release);
    return {};
  }

 private:
  static Status check(ssize_t done, const char* what, uint64_t place, uint64_t bytes) {
    if (done == static_cast<ssize_t>(bytes)) return {};
    return Status::from_errno(done < 0 ? errno : EFAULT, "{} {} bytes at {} of a file", what, bytes, place);
  }
  const FileDescriptor file_;
};

}  // namespace

Result<std::shared_ptr<FarMemory>> gpu_memory(Device device) {
  WEFT_TRY_ASSIGN(auto stream, OwnStream::create(device.ordinal));
  return std::shared_ptr<FarMemory>(std::make_shared<GpuMemory>(device, std::move(stream)));
}

std::shared_ptr<FarMemory> file_memory(FileDescriptor file) {
  return std::make_shared<FileMemory>(std::move(file));
}

FileDescriptor own_memory_file() {
  return FileDescriptor(open("/proc/self/mem", O_RDWR | O_CLOEXEC));
}

}  // namespace weft::testing
