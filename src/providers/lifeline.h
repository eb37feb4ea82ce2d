// SPDX-License-Identifier: Apache-2.0
//
// Lifelines: how a rail learns at once that the process of a peer has ended. Over RDMA that looks like a cable that is out:
// nothing answers. And a network stack that hides its connections says nothing while nothing is under way. But the kernel
// that outlives a process closes its TCP sockets. So a rail with an address of IP listens there, its peers dial, and nobody
// says a word.
//   Listener listener = Listener::at(socket_address(AF_INET, &ip, 0));    // port() goes into the rail's address
//   Lifeline line; line.dial(socket_address(AF_INET, &ip, port));
//   if (line.is_over(Clock::now())) ...                                   // now and then
// A line that is cut says nothing yet, as firewalls cut idle ones: it is dialled again, and only a host that refuses, where
// it took the first line, has no such process any more. Where lines cannot be had (InfiniBand, a firewall), or the process
// has left a forked child, silence tells, after WEFT_PEER_DEAD_S. Threads: one at a time.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>

namespace weft::provider {

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t length = 0;  // 0: none
};
// Of the 4 bytes of an AF_INET or the 16 of an AF_INET6 address. None of one that needs an interface (link-local).
SocketAddress socket_address(int family, const void* ip, uint16_t port);

// Movable, as links lie in containers.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  void close();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Takes lines for as long as it lives. They stay in the kernel's queue: nobody has to accept them.
class Listener {
 public:
  // On an address of this host; port 0 where that is none, or no address at all.
  static Listener at(SocketAddress address);
  uint16_t port() const { return port_; }

 private:
  Socket socket_;
  uint16_t port_ = 0;
};

class Lifeline {
 public:
  using Clock = std::chrono::steady_clock;

  // Where nobody listens (port 0, no address) the line is never over.
  void dial(const SocketAddress& there);
  // Whether the process at the other end is gone for certain, and what it said last has had the time to come.
  bool is_over(Clock::time_point now);

 private:
  bool has_ended();

  Socket socket_;
  SocketAddress there_;
  bool is_connected_ = false;
  bool was_connected_ = false;
  bool is_refused_ = false;  // after it was connected
  Clock::time_point next_look_{};
  Clock::time_point ended_{};  // when that was first seen
};
inline constexpr const char* kLineIsOver = "its process has ended, or its engine was closed";

}  // namespace weft::provider
