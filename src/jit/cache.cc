// SPDX-License-Identifier: Apache-2.0
#include "jit/cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>

#include "base/config.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/private_path.h"
#include "base/status.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// A file is: this line, 64 hexadecimal digits of the payload's SHA-256, a newline, the payload.
constexpr std::string_view kMagic = "weft kernel 1\n";
constexpr size_t kHeaderBytes = kMagic.size() + 64 + 1;
constexpr char kExtension[] = ".cubin";

std::string header_of(const std::string& payload) {
  return std::string(kMagic) + Digest().bytes(payload).hex() + "\n";
}

// A name that no other process or thread writes to.
std::string temporary_name_for(const std::string& path) {
  static std::atomic<unsigned> count{0};
  return text("{}.{}.{}.tmp", path, getpid(), count.fetch_add(1));
}

Status write_all(const std::string& path, const std::string& bytes) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
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
  WEFT_TRY(prepare_cache(folder));
  remove_leftovers(folder);
  const std::string aside = temporary_name_for(path);
  Status status = write_all(aside, header_of(payload) + payload);
  if (status.ok() && rename(aside.c_str(), path.c_str()) != 0)
    status = Status::from_errno(errno, "renaming to {}", path);
  if (!status.ok()) unlink(aside.c_str());
  return status;
}

// A cache that is not what it should be is said once, not for every kernel.
void warn_once(const Status& status) {
  static std::mutex mutex;
  static std::set<std::string> said;
  std::lock_guard lock(mutex);
  if (said.insert(status.message()).second)
    log_warn(
        "jit: compiled kernels are not kept, so every process compiles them again: {} (set WEFT_CACHE_DIR)",
        status.message());
}

// `file` of `folder`, or nothing: silently where it is not there, with a warning where it may not be loaded.
std::optional<KernelCache::File> open_in(const std::string& folder, const std::string& file) {
  Result<FileDescriptor> opened_folder = open_private_folder(folder);
  Result<FileDescriptor> opened = opened_folder.ok() ? open_private_file(*opened_folder, folder, file)
                                                     : Result<FileDescriptor>(opened_folder.status());
  if (opened.ok()) return KernelCache::File{std::move(*opened), folder + "/" + file};
  // A folder that may not be used is one worth a word only where it has the file.
  const bool is_refused = opened.status().code() == Code::kCapacity;
  if (is_refused && access((folder + "/" + file).c_str(), F_OK) == 0) warn_once(opened.status());
  return std::nullopt;
}

// Makes the folders on the way to `folder`: none that others can write, whatever the umask.
void make_parents(const fs::path& folder) {
  fs::path made;
  for (const fs::path& part : folder.parent_path()) mkdir((made /= part).c_str(), 0755);
}

}  // namespace

Status prepare_cache(const std::string& folder) {
  make_parents(folder);
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    return Status::make(Code::kCapacity, "{}: {}", folder, std::strerror(errno));
  const Status is_private = open_private_folder(folder).status();
  if (!is_private.ok()) return Status(Code::kCapacity, is_private.message());
  if (access(folder.c_str(), W_OK | X_OK) != 0)
    return Status::make(Code::kCapacity, "{}: {}", folder, std::strerror(errno));
  return Status();
}

void remove_leftovers(const std::string& folder) {
  static std::atomic<bool> is_done{false};
  if (is_done.exchange(true)) return;
  const auto old = fs::file_time_type::clock::now() - std::chrono::hours(1);
  std::error_code error;
  fs::directory_iterator files(folder, error), end;
  for (; !error && files != end; files.increment(error)) {
    std::error_code ignored;
    if (files->path().extension() == ".tmp" && files->last_write_time(ignored) < old && !ignored)
      fs::remove_all(files->path(), ignored);
  }
}

KernelCache::KernelCache(std::string_view folder, std::string_view read_only)
    : folders_{expand_home(folder)} {
  while (!read_only.empty()) {
    const std::string_view next = read_only.substr(0, read_only.find(':'));
    if (!next.empty()) folders_.push_back(expand_home(next));
    read_only.remove_prefix(std::min(next.size() + 1, read_only.size()));
  }
}

std::string KernelCache::path(const std::string& name) const {
  return folder() + "/" + name + kExtension;
}

std::optional<KernelCache::File> KernelCache::open(const std::string& file) const {
  for (const std::string& folder : folders_)
    if (std::optional<File> found = open_in(folder, file)) return found;
  return std::nullopt;
}

std::optional<std::string> KernelCache::load(const std::string& name) const {
  for (const std::string& folder : folders_) {
    const std::optional<File> found = open_in(folder, name + kExtension);
    if (!found) continue;
    Result<std::string> file = read_all(found->descriptor, found->path);
    if (!file.ok()) continue;
    if (file->size() > kHeaderBytes) {
      std::string payload = file->substr(kHeaderBytes);
      if (file->compare(0, kHeaderBytes, header_of(payload)) == 0) return payload;
    }
    log_info("jit: {} is damaged and will be replaced", found->path);
  }
  return std::nullopt;
}

std::optional<std::string> KernelCache::load_like(const std::string& prefix) const {
  std::set<std::string> names;
  for (const std::string& folder : folders_) {
    std::error_code error;
    fs::directory_iterator files(folder, error), end;
    for (; !error && files != end; files.increment(error))
      if (const fs::path& file = files->path();
          file.extension() == kExtension && file.stem().string().starts_with(prefix))
        names.insert(file.stem().string());
  }
  for (const std::string& name : names)
    if (std::optional<std::string> payload = load(name)) return payload;
  return std::nullopt;
}

void KernelCache::store(const std::string& name, const std::string& payload) const {
  const Status status = store_file(folder(), path(name), payload);
  if (!status.ok()) warn_once(status);
}

}  // namespace weft
