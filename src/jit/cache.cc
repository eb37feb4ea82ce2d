// SPDX-License-Identifier: Apache-2.0
#include "jit/cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>

#include "base/config.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/status.h"
#include "jit/source.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// A file is: this line, 64 hexadecimal digits of the payload's SHA-256, a newline, the payload.
constexpr std::string_view kMagic = "weft kernel 1\n";
constexpr size_t kHeaderBytes = kMagic.size() + 64 + 1;

std::string header_of(const std::string& payload) {
  return std::string(kMagic) + Digest().bytes(payload).hex() + "\n";
}

// A name that no other process or thread writes to.
std::string temporary_beside(const std::string& path) {
  static std::atomic<unsigned> count{0};
  return text("{}.{}.{}.tmp", path, getpid(), count.fetch_add(1));
}

Status write_whole(const std::string& path, const std::string& bytes) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return Status::from_errno(errno, "creating {}", path);
  size_t done = 0;
  int failed = 0;
  while (done < bytes.size() && !failed) {
    const ssize_t wrote = write(file, bytes.data() + done, bytes.size() - done);
    if (wrote >= 0)
      done += static_cast<size_t>(wrote);
    else if (errno != EINTR)
      failed = errno;
  }
  if (close(file) != 0 && !failed) failed = errno;
  return failed ? Status::from_errno(failed, "writing {}", path) : Status();
}

Status store_file(const std::string& folder, const std::string& path, const std::string& payload) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return Status::from_errno(error.value(), "creating {}", folder);
  const std::string aside = temporary_beside(path);
  Status status = write_whole(aside, header_of(payload) + payload);
  if (status.ok() && rename(aside.c_str(), path.c_str()) != 0)
    status = Status::from_errno(errno, "renaming to {}", path);
  if (!status.ok()) unlink(aside.c_str());
  return status;
}

}  // namespace

KernelCache::KernelCache(std::string_view folder) : folder_(expand_home(folder)) {}

std::string KernelCache::path(const std::string& name) const {
  return folder_ + "/" + name + ".cubin";
}

std::optional<std::string> KernelCache::load(const std::string& name) const {
  Result<std::string> file = read_file(path(name));
  if (!file.ok()) return std::nullopt;
  if (file->size() > kHeaderBytes) {
    std::string payload = file->substr(kHeaderBytes);
    if (file->compare(0, kHeaderBytes, header_of(payload)) == 0) return payload;
  }
  log_info("jit: {} is damaged and will be replaced", path(name));
  return std::nullopt;
}

void KernelCache::store(const std::string& name, const std::string& payload) const {
  const Status status = store_file(folder_, path(name), payload);
  if (status.ok()) return;
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true))
    log_warn(
        "jit: compiled kernels are not kept, so every process compiles them again: {} (set WEFT_CACHE_DIR)",
        status.message());
}

}  // namespace weft
