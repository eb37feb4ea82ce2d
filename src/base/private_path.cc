// SPDX-License-Identifier: Apache-2.0
#include "base/private_path.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <climits>
#include <deque>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace weft {
namespace {

constexpr int kMostLinks = 40;  // as the kernel
constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

std::string octal(mode_t mode) {
  std::ostringstream out;
  out << "0" << std::oct << (mode & 07777);
  return out.str();
}

// Who stands for the users that this process's user namespace has no number for; 0 in a namespace that has all.
uid_t find_unnamed_user() {
  std::ifstream map("/proc/self/uid_map");
  uint64_t first = 0, outside = 0, count = 0;
  if (map >> first >> outside >> count && count >= UINT32_MAX) return 0;
  uid_t user = 0;
  std::ifstream("/proc/sys/kernel/overflowuid") >> user;
  return user;
}

bool is_trusted(uid_t owner, bool is_last) {
  static const uid_t unnamed = find_unnamed_user();
  return owner == geteuid() || owner == 0 || (!is_last && owner == unnamed);
}

Status refused(const std::string& part, std::string_view why, const std::string& link) {
  const std::string advice =
      link.empty() ? "" : text(", or point the link {} elsewhere: ln -sfn FOLDER {}", link, link);
  return Status::make(Code::kCapacity, "{}: {}{}", part, why, advice);
}

// `link` led to the part, if any did.
Status check(const struct stat& facts, const std::string& part, bool is_last, const std::string& link) {
  if (!is_trusted(facts.st_uid, is_last))
    return refused(part, text("owned by user {}, allowed: this user or root", facts.st_uid), link);
  const bool is_sticky = (facts.st_mode & S_ISVTX) && S_ISDIR(facts.st_mode) && !is_last;
  if (S_ISLNK(facts.st_mode) || !(facts.st_mode & kOthersWrite) || is_sticky) return {};
  return refused(
      part, text("mode {}, allowed: writable by its owner alone; chmod go-w {}", octal(facts.st_mode), part),
      link);
}

// The steps of a walk that are still to come, without those that stay where they are.
void add_before(std::deque<std::string>& steps, const std::filesystem::path& path) {
  std::deque<std::string> added;
  for (const auto& step : path)
    if (const std::string name = step.string(); !name.empty() && name != "/" && name != ".")
      added.push_back(name);
  steps.insert(steps.begin(), added.begin(), added.end());
}

class Walk {
 public:
  explicit Walk(const std::string& path) : asked_(path) {}

  Result<FileDescriptor> to_the_end() {
    std::error_code error;
    add_before(steps_, std::filesystem::absolute(asked_, error));
    if (error) return Status::make(Code::kSystem, "{}: {}", asked_, error.message());
    WEFT_TRY(begin());
    while (!steps_.empty()) WEFT_TRY(step());
    // A walk opens no folder for reading: on the way, a folder may be one that this user cannot list.
    FileDescriptor folder(openat(at_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder.is_open()) return Status::from_errno(errno, "{}", where_);
    return folder;
  }

 private:
  Status begin() {
    at_ = FileDescriptor(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC));
    where_ = "/";
    return at_.is_open() ? arrived() : Status::from_errno(errno, "/");
  }

  Status step() {
    const std::string name = steps_.front();
    steps_.pop_front();
    const std::string part = std::filesystem::path(where_) / name;
    FileDescriptor next(openat(at_.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    struct stat facts{};
    if (!next.is_open() || fstat(next.get(), &facts) != 0) return Status::from_errno(errno, "{}", part);
    if (S_ISLNK(facts.st_mode)) return follow(next, facts, part);
    if (!S_ISDIR(facts.st_mode)) return Status::make(Code::kSystem, "{}: not a folder", part);
    at_ = std::move(next);
    where_ = name == ".." ? std::filesystem::path(where_).parent_path().string() : part;
    return arrived();
  }

  Status arrived() {
    struct stat facts{};
    if (fstat(at_.get(), &facts) != 0) return Status::from_errno(errno, "{}", where_);
    return check(facts, where_, steps_.empty(), link_);
  }

  Status follow(const FileDescriptor& link, const struct stat& facts, const std::string& part) {
    WEFT_TRY(check(facts, part, false, part));
    if (++links_ > kMostLinks) return Status::from_errno(ELOOP, "{}", asked_);
    char target[PATH_MAX];
    const ssize_t length = readlinkat(link.get(), "", target, sizeof target);
    if (length < 0) return Status::from_errno(errno, "{}", part);
    link_ = part;
    const std::filesystem::path path(std::string(target, static_cast<size_t>(length)));
    add_before(steps_, path);
    if (path.is_absolute()) return begin();
    return steps_.empty() ? arrived() : Status();
  }

  const std::string asked_;
  std::deque<std::string> steps_;
  FileDescriptor at_;
  std::string where_;  // the path of at_, without links
  std::string link_;   // the last one that was followed
  int links_ = 0;
};

}  // namespace

Result<FileDescriptor> open_private_folder(const std::string& path) {
  return Walk(path).to_the_end();
}

Result<FileDescriptor> open_private_file(const FileDescriptor& folder, const std::string& path,
                                         const std::string& name) {
  const std::string part = path + "/" + name;
  // It could be a pipe, which nobody opens at the other end.
  FileDescriptor file(
      openat(folder.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (!file.is_open() && errno == ELOOP)
    return refused(part, text("a link, allowed: a file; rm {}", part), "");
  struct stat facts{};
  if (!file.is_open() || fstat(file.get(), &facts) != 0) return Status::from_errno(errno, "{}", part);
  if (!S_ISREG(facts.st_mode)) return refused(part, "not a file", "");
  WEFT_TRY(check(facts, part, true, ""));
  return file;
}

Result<std::string> read_private(const std::string& path, uint64_t bytes_max) {
  const std::filesystem::path whole(path);
  const std::string folder = whole.parent_path().string();
  WEFT_TRY_ASSIGN(const FileDescriptor opened, open_private_folder(folder.empty() ? "." : folder));
  WEFT_TRY_ASSIGN(const FileDescriptor file, open_private_file(opened, folder, whole.filename().string()));
  struct stat facts{};
  if (fstat(file.get(), &facts) != 0) return Status::from_errno(errno, "{}", path);
  if (static_cast<uint64_t>(facts.st_size) > bytes_max)
    return Status::make(Code::kCapacity, "{}: {} bytes, allowed: at most {}", path, facts.st_size, bytes_max);
  return read_all(file, path);
}

Result<std::string> read_all(const FileDescriptor& file, const std::string& name) {
  std::string all;
  char some[1 << 16];
  while (true) {
    const ssize_t got = read(file.get(), some, sizeof some);
    if (got > 0) all.append(some, static_cast<size_t>(got));
    if (got == 0) return all;
    if (got < 0 && errno != EINTR) return Status::from_errno(errno, "reading {}", name);
  }
}

}  // namespace weft
