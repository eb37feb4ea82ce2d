// SPDX-License-Identifier: Apache-2.0
#include "providers/lifeline.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace weft::provider {
namespace {

constexpr int kLinesMax = 4096;  // that wait in the kernel; it may allow fewer
constexpr auto kLookEvery = std::chrono::milliseconds(100);
constexpr auto kLastWords = std::chrono::milliseconds(150);  // for what a peer sent before its process ended

// In both families the port stands at the same place.
uint16_t port_of(const SocketAddress& address) {
  sockaddr_in v4{};
  std::memcpy(&v4, &address.bytes, sizeof v4);
  return ntohs(v4.sin_port);
}

// None where half of the files that the process may open are in use: others need theirs more.
Socket open_socket(const SocketAddress& address) {
  Socket made(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && static_cast<rlim_t>(made.fd() + 1) > files.rlim_cur / 2)
    return {};
  return made;
}

}  // namespace

SocketAddress socket_address(int family, const void* ip, uint16_t port) {
  SocketAddress made;
  if (family == AF_INET) {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&v4.sin_addr, ip, sizeof v4.sin_addr);
    std::memcpy(&made.bytes, &v4, made.length = sizeof v4);
  } else if (family == AF_INET6) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    std::memcpy(&v6.sin6_addr, ip, sizeof v6.sin6_addr);
    if (!IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr)) std::memcpy(&made.bytes, &v6, made.length = sizeof v6);
  }
  return made;
}

Socket& Socket::operator=(Socket&& other) noexcept {
  close();
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Listener Listener::at(SocketAddress address) {
  Listener made;
  if (address.length == 0) return made;
  Socket socket = open_socket(address);
  auto* const at = reinterpret_cast<sockaddr*>(&address.bytes);
  if (!socket || bind(socket.fd(), at, address.length) != 0 || listen(socket.fd(), kLinesMax) != 0 ||
      getsockname(socket.fd(), at, &address.length) != 0)
    return made;
  made.port_ = port_of(address);
  made.socket_ = std::move(socket);
  return made;
}

void Lifeline::dial(const SocketAddress& there) {
  there_ = there;
  is_connected_ = false;
  if (there.length == 0 || port_of(there) == 0) return;
  socket_ = open_socket(there);
  if (!socket_) return;
  const int status = connect(socket_.fd(), reinterpret_cast<const sockaddr*>(&there.bytes), there.length);
  if (status == 0 || errno == EINPROGRESS) return;
  const bool is_refused = errno == ECONNREFUSED;
  socket_.close();
  is_refused_ = is_refused && was_connected_;
}

bool Lifeline::is_over(Clock::time_point now) {
  if (now < next_look_) return false;
  next_look_ = now + kLookEvery;
  if (!has_ended()) return false;
  if (ended_ == Clock::time_point()) ended_ = now;
  return now - ended_ > kLastWords;
}

bool Lifeline::has_ended() {
  if (is_refused_) return true;
  if (!socket_) return false;
  pollfd look{socket_.fd(), static_cast<short>(is_connected_ ? POLLIN | POLLRDHUP : POLLOUT), 0};
  if (::poll(&look, 1, 0) <= 0) return false;
  if (is_connected_) {  // nobody says a word, so this is its end
    dial(SocketAddress(there_));
    return false;
  }
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error == 0) {
    is_connected_ = was_connected_ = true;
    return false;
  }
  socket_.close();
  is_refused_ = error == ECONNREFUSED && was_connected_;
  return is_refused_;
}

}  // namespace weft::provider
