// SPDX-License-Identifier: Apache-2.0
//
// Lifelines: how a rail learns at once that the process of a peer has ended. A queue pair whose process is gone looks like
// a cable that is out: nothing answers. But the kernel that outlives a process closes its TCP sockets. So every rail
// listens on the address of its GID, its peers dial, and nobody says a word.
//   Listener listener = Listener::at(gid);          // port() goes into the rail's address
//   Lifeline line; line.dial(gid, port);
//   if (line.has_ended()) ...                       // now and then
// A line that is cut says nothing yet, as firewalls cut idle ones: it is dialled again, and only a host that refuses, where
// it took the first line, has no such process any more. Where lines cannot be had (InfiniBand, a firewall), or the process
// has left a forked child, silence tells, after WEFT_PEER_DEAD_S. Threads: one at a time.
#pragma once

#include <cstdint>

#include "providers/verbs/abi.h"

namespace weft::provider::ib {

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
  static Listener at(const ibv_gid& gid);
  uint16_t port() const { return port_; }

 private:
  Socket socket_;
  uint16_t port_ = 0;
};

class Lifeline {
 public:
  void dial(const ibv_gid& gid, uint16_t port);
  // Whether the process at the other end is gone for certain.
  bool has_ended();

 private:
  Socket socket_;
  ibv_gid gid_{};
  uint16_t port_ = 0;
  bool is_connected_ = false;
  bool was_connected_ = false;
  bool is_refused_ = false;  // after it was connected
};

}  // namespace weft::provider::ib
