// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/listener_guard.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/log.h"

namespace weft::provider {
namespace {

constexpr int kSilentFor_s =
    60;  // callers that have said nothing, in the kernel; then it hands them over all the same
constexpr uint32_t kSilent_ms = 5000;
constexpr uint64_t kLeastBytes = 16;  // of libfabric's own handshake
constexpr uint8_t kListening = 10;    // TCP_LISTEN
constexpr int kManyFiles = 128;       // fewer are nothing to worry about
constexpr auto kPause = std::chrono::seconds(1), kPauseMax = std::chrono::seconds(16);
using Pause = std::chrono::steady_clock::duration;

// Of what has talked before: longer than a living peer is silent; with few descriptors left, as long.
uint32_t idle_ms(bool is_urgent) {
  return static_cast<uint32_t>(1000 * config().peer_dead_s * (is_urgent ? 1 : 3));
}

uint64_t files_allowed() {
  rlimit limit{};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

std::vector<int> open_files() {
  std::vector<int> files;
  DIR* const folder = opendir("/proc/self/fd");
  if (!folder) return files;
  while (const dirent* entry = readdir(folder))
    if (entry->d_name[0] != '.') files.push_back(std::atoi(entry->d_name));
  closedir(folder);
  return files;
}

bool is_at(int fd, const sockaddr_in& address) {
  sockaddr_in here{};
  socklen_t bytes = sizeof here;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&here), &bytes) == 0 && here.sin_family == AF_INET &&
         here.sin_port == address.sin_port && here.sin_addr.s_addr == address.sin_addr.s_addr;
}

// Whether nothing has come for long: since the connection was made, where nothing has come at all.
bool is_idle(int fd, uint32_t most_ms) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return false;
  if (info.tcpi_state == kListening) return false;
  const bool has_talked = info.tcpi_bytes_received >= kLeastBytes;
  return info.tcpi_last_data_recv > (has_talked ? most_ms : std::min(most_ms, kSilent_ms));
}

// A socket's is its own as long as it is open.
ino_t inode_of(int fd) {
  struct stat facts{};
  return fstat(fd, &facts) == 0 && S_ISSOCK(facts.st_mode) ? facts.st_ino : 0;
}

bool listens(int fd) {
  int is_listening = 0;
  socklen_t bytes = sizeof is_listening;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &bytes) == 0 && is_listening;
}

}  // namespace

std::unique_ptr<ListenerGuard> ListenerGuard::of(const std::string& address) {
  sockaddr_in self{};
  std::memcpy(&self, address.data(), std::min(address.size(), sizeof self));
  for (const int fd : open_files()) {
    if (!is_at(fd, self) || !listens(fd)) continue;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, &kSilentFor_s, sizeof kSilentFor_s);
    std::unique_ptr<ListenerGuard> guard(new ListenerGuard(fd, self));
    guard->open_reserve();
    return guard;
  }
  return nullptr;
}

// Nobody is let in any more, so that these are all.
void ListenerGuard::end_of_listener() {
  (void)shutdown(listener_, SHUT_RDWR);
  for (const int fd : open_files())
    if (fd != listener_ && is_at(fd, address_)) last_.push_back(inode_of(fd));
}

// libfabric has closed the connections of peers, and forgotten those of callers that were still introducing themselves.
ListenerGuard::~ListenerGuard() {
  if (!last_.empty())
    for (const int fd : open_files())
      if (std::ranges::find(last_, inode_of(fd)) != last_.end() && is_at(fd, address_)) ::close(fd);
  if (reserve_ >= 0) ::close(reserve_);
}

void ListenerGuard::open_reserve() {
  if (reserve_ < 0) reserve_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void ListenerGuard::look_now() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  const int free = fcntl(listener_, F_DUPFD_CLOEXEC, 0);  // the lowest: all below are open
  if (free >= 0) ::close(free);
  const bool has_many = free < 0 || free >= kManyFiles;
  const bool is_urgent = free < 0 || static_cast<uint64_t>(free) > files_allowed() / 4 * 3;
  const bool is_in_vain = has_many && shut_down_idle(is_urgent) == 0;
  pause_ = is_in_vain ? std::min<Pause>(2 * pause_, kPauseMax) : kPause;
  next_ = now + pause_;
}

// How many were.
uint64_t ListenerGuard::shut_down_idle(bool is_urgent) {
  if (reserve_ >= 0) ::close(std::exchange(reserve_, -1));
  uint64_t count = 0;
  for (const int fd : open_files()) {
    if (fd == listener_ || !is_at(fd, address_)) continue;
    // Another thread may close this number and open it again: what is held here stays what it is.
    const int held = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (held < 0) break;
    if (is_at(held, address_) && is_idle(held, idle_ms(is_urgent))) {
      (void)shutdown(held, SHUT_RDWR);
      ++count;
    }
    ::close(held);
  }
  open_reserve();
  if (count > 0)
    refusals_.warn("fabric: shuts down {} connections that strangers keep open and do not use", count);
  return count;
}

}  // namespace weft::provider
