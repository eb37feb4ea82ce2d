// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/tcp_bootstrap.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "base/file_descriptor.h"
#include "base/log.h"
#include "base/random.h"

namespace weft {
namespace {

constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'm', 'e', 'e', 't'};
constexpr uint64_t kMaxFrameBytes = 16 << 20;
constexpr double kIdleS = 3600;  // a meeting that nobody comes to ends then
constexpr double kGraceS = 2;    // a rank waits longer than the meeting, so that it hears who is missing

struct Hello {
  char magic[8];
  uint64_t key[2];
  int32_t rank;
  int32_t size;
};
struct Frame {
  uint64_t bytes;
  uint64_t patience_ms;  // how long the sender will wait
};
// What comes back: `bytes` of text when `code` is not kOk, else `size` times a length and that many bytes.
struct Verdict {
  uint64_t bytes;
  int64_t code;
};

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

Address address_of(const MeetingTicket& ticket, socklen_t& bytes) {
  Address address{};
  if (ticket.is_ipv6) {
    address.v6.sin6_family = AF_INET6;
    address.v6.sin6_port = htons(ticket.port);
    std::memcpy(&address.v6.sin6_addr, ticket.address, 16);
    bytes = sizeof(address.v6);
  } else {
    address.v4.sin_family = AF_INET;
    address.v4.sin_port = htons(ticket.port);
    std::memcpy(&address.v4.sin_addr, ticket.address, 4);
    bytes = sizeof(address.v4);
  }
  return address;
}

// Bridges of containers and virtual machines lead nowhere for other machines.
bool is_bridge(const std::string& name) {
  for (const char* prefix : {"docker", "virbr", "veth", "br-", "cni", "cali"})
    if (name.starts_with(prefix)) return true;
  return false;
}

// How much an interface's address is wanted; 0: not at all.
int preference(const ifaddrs& entry, const std::string& wanted) {
  if (!entry.ifa_addr || !(entry.ifa_flags & IFF_UP)) return 0;
  const int family = entry.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return 0;
  if (family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr;
    if (IN6_IS_ADDR_LINKLOCAL(&v6)) return 0;
  }
  if (!wanted.empty() && wanted != entry.ifa_name) return 0;
  const int kind = entry.ifa_flags & IFF_LOOPBACK ? 1 : is_bridge(entry.ifa_name) ? 2 : 3;
  return 2 * kind + (family == AF_INET);
}

Result<MeetingTicket> choose_address(const std::string& interface) {
  ifaddrs* entries = nullptr;
  if (getifaddrs(&entries) != 0) return Status::from_errno(errno, "list the network interfaces");
  MeetingTicket ticket{};
  int best = 0;
  for (const ifaddrs* entry = entries; entry; entry = entry->ifa_next) {
    const int wanted = preference(*entry, interface);
    if (wanted <= best) continue;
    best = wanted;
    ticket.is_ipv6 = entry->ifa_addr->sa_family == AF_INET6;
    if (ticket.is_ipv6)
      std::memcpy(ticket.address, &reinterpret_cast<sockaddr_in6*>(entry->ifa_addr)->sin6_addr, 16);
    else
      std::memcpy(ticket.address, &reinterpret_cast<sockaddr_in*>(entry->ifa_addr)->sin_addr, 4);
  }
  freeifaddrs(entries);
  if (best == 0) return Status::invalid("interface: got '{}', allowed: one that has an address", interface);
  return ticket;
}

// Waits until the socket can be read or written. False when the deadline passes.
bool await(int socket, short what, Deadline until) {
  while (true) {
    pollfd entry{socket, what, 0};
    const int left_ms = static_cast<int>(std::clamp(until.left_s() * 1e3, 0.0, 1e6));
    if (::poll(&entry, 1, left_ms) > 0) return true;
    if (until.passed()) return false;
  }
}

enum class Moved { kAll, kTimeout, kGone };

Moved send_all(int socket, const void* data, size_t bytes, Deadline until) {
  const auto* from = static_cast<const char*>(data);
  while (bytes) {
    const ssize_t sent = ::send(socket, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      from += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      return Moved::kGone;
    } else if (!await(socket, POLLOUT, until)) {
      return Moved::kTimeout;
    }
  }
  return Moved::kAll;
}

Moved receive_all(int socket, void* data, size_t bytes, Deadline until) {
  auto* to = static_cast<char*>(data);
  while (bytes) {
    const ssize_t got = ::recv(socket, to, bytes, MSG_DONTWAIT);
    if (got > 0) {
      to += got;
      bytes -= static_cast<size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return Moved::kGone;
    } else if (!await(socket, POLLIN, until)) {
      return Moved::kTimeout;
    }
  }
  return Moved::kAll;
}

// The thread that passes everything on. It owns itself: whoever opened the meeting may be gone first.
class Meeting {
 public:
  Meeting(FileDescriptor listener, const MeetingTicket& ticket)
      : listener_(std::move(listener)), ticket_(ticket) {}

  void run() {
    Deadline idle = Deadline::after_s(kIdleS);
    while (true) {
      std::vector<pollfd> entries;
      if (listener_.is_open()) entries.push_back({listener_.get(), POLLIN, 0});
      for (const auto& [rank, peer] : peers_)
        entries.push_back({peer.socket.get(), static_cast<short>(peer.has_given ? 0 : POLLIN), 0});
      if (entries.empty() || (peers_.empty() && idle.passed())) return;
      ::poll(entries.data(), entries.size(), 200);
      if (listener_.is_open() && entries[0].revents) admit();
      for (const pollfd& entry : entries)
        if (entry.revents) hear(entry.fd);
      if (!peers_.empty()) idle = Deadline::after_s(kIdleS);
      settle();
      if (had_everybody_ && peers_.empty()) return;
    }
  }

 private:
  struct Peer {
    FileDescriptor socket;
    bool has_given = false;
    std::string given;
  };

  // Lets a rank of ours in; drops whoever is not.
  void admit() {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    Hello hello{};
    if (!socket.is_open() ||
        receive_all(socket.get(), &hello, sizeof hello, Deadline::after_s(1)) != Moved::kAll ||
        std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0 || hello.key[0] != ticket_.key[0] ||
        hello.key[1] != ticket_.key[1])
      return;
    if (size_ == 0) size_ = hello.size;
    if (hello.size != size_ || hello.rank < 0 || hello.rank >= size_ || peers_.contains(hello.rank)) {
      answer(
          socket.get(), Code::kInvalid,
          text("rank and size: got {} of {}, allowed: each rank once, of {}", hello.rank, hello.size, size_));
      return;
    }
    const int on = 1;
    ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    peers_[hello.rank].socket = std::move(socket);
    if (static_cast<int>(peers_.size()) < size_) return;
    had_everybody_ = true;
    listener_.close();
  }

  void hear(int fd) {
    const auto found =
        std::find_if(peers_.begin(), peers_.end(), [&](auto& p) { return p.second.socket.get() == fd; });
    if (found == peers_.end()) return;
    Peer& peer = found->second;
    Frame frame{};
    // A frame that has begun comes at once: these are hundreds of bytes. Who has given is only watched for
    // errors.
    const Deadline soon = Deadline::after_s(10);
    bool is_here = !peer.has_given && receive_all(fd, &frame, sizeof frame, soon) == Moved::kAll &&
                   frame.bytes <= kMaxFrameBytes;
    if (is_here) {
      peer.given.resize(frame.bytes);
      is_here = receive_all(fd, peer.given.data(), frame.bytes, soon) == Moved::kAll;
    }
    if (!is_here) {
      lost_.push_back(found->first);
      peers_.erase(found);
      return;
    }
    peer.has_given = true;
    const Deadline patience = Deadline::after_s(static_cast<double>(frame.patience_ms) / 1e3);
    if (!is_waiting_ || patience.left_s() < patience_.left_s()) patience_ = patience;
    is_waiting_ = true;
  }

  // Answers when everybody has given something, or when it is clear that not everybody will.
  void settle() {
    if (!is_waiting_) return;
    const bool all_gave =
        static_cast<int>(peers_.size()) == size_ &&
        std::all_of(peers_.begin(), peers_.end(), [](auto& p) { return p.second.has_given; });
    if (all_gave) {
      std::string everything;
      for (auto& [rank, peer] : peers_) {
        const uint64_t bytes = peer.given.size();
        everything.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
        everything += peer.given;
      }
      answer_all(Code::kOk, everything);
    } else if (!lost_.empty() || patience_.passed()) {
      answer_all(Code::kPeerLost, missing());
    }
  }

  std::string missing() const {
    std::string names;
    for (int rank = 0; rank < size_; ++rank) {
      const auto found = peers_.find(rank);
      if (found != peers_.end() && found->second.has_given) continue;
      const bool is_gone = std::find(lost_.begin(), lost_.end(), rank) != lost_.end();
      names += text("{}rank {}{}", names.empty() ? "" : ", ", rank, is_gone ? " (which is gone)" : "");
    }
    return names;
  }

  void answer_all(Code code, const std::string& bytes) {
    for (auto& [rank, peer] : peers_) {
      if (!peer.has_given) continue;
      answer(peer.socket.get(), code, bytes);
      peer.has_given = false;
      peer.given.clear();
    }
    is_waiting_ = false;
  }

  static void answer(int socket, Code code, const std::string& bytes) {
    const Verdict verdict{bytes.size(), static_cast<int64_t>(code)};
    const Deadline soon = Deadline::after_s(10);
    if (send_all(socket, &verdict, sizeof verdict, soon) == Moved::kAll)
      send_all(socket, bytes.data(), bytes.size(), soon);
  }

  FileDescriptor listener_;
  const MeetingTicket ticket_;
  int size_ = 0;
  std::map<int, Peer> peers_;
  std::vector<int> lost_;
  bool had_everybody_ = false;
  bool is_waiting_ = false;
  Deadline patience_ = Deadline::after_s(0);
};

class TcpBootstrap : public Bootstrap {
 public:
  TcpBootstrap(int rank, int size, FileDescriptor socket)
      : rank_(rank), size_(size), socket_(std::move(socket)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) override {
    if (!socket_.is_open()) return Status(Code::kClosed, "bootstrap: used after it had failed");
    Result<std::vector<std::string>> all = exchange(mine, until);
    if (!all.ok()) socket_.close();  // the ranks no longer agree on what comes next
    return all;
  }

 private:
  Result<std::vector<std::string>> exchange(const std::string& mine, Deadline until) {
    const double limit_s = until.left_s();
    const Frame frame{mine.size(), static_cast<uint64_t>(std::max(limit_s, 0.0) * 1e3)};
    const Deadline patience = Deadline::after_s(limit_s + kGraceS);
    Verdict verdict{};
    std::string bytes;
    Moved moved = send_all(socket_.get(), &frame, sizeof frame, patience);
    if (moved == Moved::kAll) moved = send_all(socket_.get(), mine.data(), mine.size(), patience);
    if (moved == Moved::kAll) moved = receive_all(socket_.get(), &verdict, sizeof verdict, patience);
    if (moved == Moved::kAll && verdict.bytes <= kMaxFrameBytes * static_cast<uint64_t>(size_)) {
      bytes.resize(verdict.bytes);
      moved = receive_all(socket_.get(), bytes.data(), bytes.size(), patience);
    }
    if (moved != Moved::kAll)
      return Status::make(Code::kPeerLost,
                          "rank {}, bootstrap.all_gather, waited {} s: the process that made the id {}",
                          rank_, limit_s, moved == Moved::kGone ? "is gone" : "does not answer");
    if (verdict.code == static_cast<int64_t>(Code::kPeerLost))
      return Status::make(Code::kPeerLost, "rank {}, bootstrap.all_gather, waited {} s for {}", rank_,
                          limit_s, bytes);
    if (verdict.code != static_cast<int64_t>(Code::kOk)) return Status(Code::kInvalid, bytes);
    return split(bytes);
  }

  Result<std::vector<std::string>> split(const std::string& bytes) const {
    std::vector<std::string> all;
    size_t at = 0;
    for (int rank = 0; rank < size_; ++rank) {
      uint64_t length = 0;
      if (bytes.size() - at < sizeof length) break;
      std::memcpy(&length, bytes.data() + at, sizeof length);
      at += sizeof length;
      if (length > bytes.size() - at) break;
      all.push_back(bytes.substr(at, length));
      at += length;
    }
    if (static_cast<int>(all.size()) != size_)
      return Status::make(Code::kSystem, "rank {}, bootstrap.all_gather: an answer that ends too soon",
                          rank_);
    return all;
  }

  const int rank_, size_;
  FileDescriptor socket_;
};

}  // namespace

bool MeetingTicket::is_valid() const {
  return std::memcmp(magic, kMagic, sizeof kMagic) == 0;
}

Result<MeetingTicket> open_meeting(const std::string& interface) {
  WEFT_TRY_ASSIGN(MeetingTicket ticket, choose_address(interface));
  std::memcpy(ticket.magic, kMagic, sizeof kMagic);
  ticket.key[0] = random_key();
  ticket.key[1] = random_key();
  socklen_t bytes = 0;
  Address address = address_of(ticket, bytes);
  FileDescriptor listener(::socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.is_open() || ::bind(listener.get(), &address.any, bytes) != 0 ||
      ::listen(listener.get(), 1024) != 0 || ::getsockname(listener.get(), &address.any, &bytes) != 0)
    return logged(Status::from_errno(errno, "open a meeting"));
  ticket.port = ntohs(ticket.is_ipv6 ? address.v6.sin6_port : address.v4.sin_port);
  auto meeting = std::make_shared<Meeting>(std::move(listener), ticket);
  std::thread([meeting] { meeting->run(); }).detach();
  return ticket;
}

Result<std::shared_ptr<Bootstrap>> join_meeting(const MeetingTicket& ticket, int rank, int size,
                                                Deadline until) {
  if (!ticket.is_valid()) return Status::invalid("ticket: got the bytes of something else");
  if (size < 1 || rank < 0 || rank >= size)
    return Status::invalid("rank and size: got {} and {}, allowed: 0 <= rank < size", rank, size);
  const double limit_s = until.left_s();
  socklen_t bytes = 0;
  const Address address = address_of(ticket, bytes);
  FileDescriptor socket(::socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) return logged(Status::from_errno(errno, "open a socket"));
  int error = ::connect(socket.get(), &address.any, bytes) == 0 ? 0 : errno;
  if (error == EINPROGRESS && await(socket.get(), POLLOUT, until)) {
    socklen_t error_bytes = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &error_bytes);
  }
  Hello hello{{}, {ticket.key[0], ticket.key[1]}, rank, size};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  if (error != 0 || send_all(socket.get(), &hello, sizeof hello, until) != Moved::kAll)
    return Status::make(Code::kPeerLost, "rank {}, meeting, waited {} s for the process that made the id: {}",
                        rank, limit_s, std::strerror(error ? error : EPIPE));
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return std::shared_ptr<Bootstrap>(std::make_shared<TcpBootstrap>(rank, size, std::move(socket)));
}

}  // namespace weft
