// SPDX-License-Identifier: Apache-2.0
#include "providers/verbs/lifeline.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace weft::provider::ib {
namespace {

constexpr int kLinesMax = 4096;  // that wait in the kernel; it may allow fewer

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t length = 0;  // 0: the GID is no address of IP, or one that needs an interface
};

SocketAddress address_of(const ibv_gid& gid, uint16_t port) {
  SocketAddress made;
  const auto is_zero = [&](int from, int to) {
    return std::all_of(gid.raw + from, gid.raw + to, [](uint8_t byte) { return byte == 0; });
  };
  if (is_zero(0, 16) || (gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80)) return made;
  if (is_zero(0, 10) && gid.raw[10] == 0xff && gid.raw[11] == 0xff) {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&v4.sin_addr, gid.raw + 12, 4);
    std::memcpy(&made.bytes, &v4, made.length = sizeof v4);
  } else {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    std::memcpy(&v6.sin6_addr, gid.raw, 16);
    std::memcpy(&made.bytes, &v6, made.length = sizeof v6);
  }
  return made;
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

Socket& Socket::operator=(Socket&& other) noexcept {
  close();
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Listener Listener::at(const ibv_gid& gid) {
  Listener made;
  SocketAddress address = address_of(gid, 0);
  if (address.length == 0) return made;
  Socket socket = open_socket(address);
  auto* const at = reinterpret_cast<sockaddr*>(&address.bytes);
  if (!socket || bind(socket.fd(), at, address.length) != 0 || listen(socket.fd(), kLinesMax) != 0 ||
      getsockname(socket.fd(), at, &address.length) != 0)
    return made;
  made.port_ = ntohs(address.bytes.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(at)->sin_port
                                                        : reinterpret_cast<sockaddr_in6*>(at)->sin6_port);
  made.socket_ = std::move(socket);
  return made;
}

void Lifeline::dial(const ibv_gid& gid, uint16_t port) {
  gid_ = gid;
  port_ = port;
  is_connected_ = false;
  const SocketAddress address = address_of(gid, port);
  if (port == 0 || address.length == 0) return;
  socket_ = open_socket(address);
  if (!socket_) return;
  const int status = connect(socket_.fd(), reinterpret_cast<const sockaddr*>(&address.bytes), address.length);
  if (status == 0 || errno == EINPROGRESS) return;
  const bool is_refused = errno == ECONNREFUSED;
  socket_.close();
  is_refused_ = is_refused && was_connected_;
}

bool Lifeline::has_ended() {
  if (is_refused_) return true;
  if (!socket_) return false;
  pollfd look{socket_.fd(), static_cast<short>(is_connected_ ? POLLIN | POLLRDHUP : POLLOUT), 0};
  if (::poll(&look, 1, 0) <= 0) return false;
  if (is_connected_) {  // nobody says a word, so this is its end
    dial(gid_, port_);
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

}  // namespace weft::provider::ib
