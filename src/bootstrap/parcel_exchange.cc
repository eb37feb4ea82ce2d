// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/parcel_exchange.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "base/log.h"
#include "base/random.h"

namespace weft {
namespace {

constexpr uint64_t kMagic = 0x3154464557ull;  // "WEFT1", little endian: changes with Header

struct Header {
  uint64_t magic;
  uint64_t key;  // the receiver's
  uint64_t sequence;
  uint32_t sender;
  uint32_t bytes;  // that follow; a datagram without header and bytes only asks whether the socket is there
};
static_assert(sizeof(Header) == 32);

struct SocketName {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit SocketName(const char* name) {
    address.sun_family = AF_UNIX;
    const size_t chars = strnlen(name, sizeof(ParcelAddress::socket_name));
    std::memcpy(address.sun_path + 1, name, chars);  // sun_path[0] == 0 makes it abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + chars);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

// Room for one descriptor in a message's control area.
struct alignas(cmsghdr) Control {
  char bytes[CMSG_SPACE(sizeof(int))] = {};
};

void attach(msghdr& message, Control& control, int fd) {
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(part), &fd, sizeof fd);
}

FileDescriptor detach(msghdr& message) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(part), sizeof fd);
    return FileDescriptor(fd);
  }
  return FileDescriptor();
}

// An exchange orders memory: what a rank wrote before it is seen by its peers after it. The kernel sees to
// that; race detectors do not follow datagrams, so ranks that are threads of one process also meet at an
// atomic.
void order_threads() {
  static std::atomic<uint64_t> meeting_point{0};
  meeting_point.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace

Result<std::unique_ptr<ParcelExchange>> ParcelExchange::open(int rank) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) return logged(Status::from_errno(errno, "rank {}: open a Unix socket", rank));
  ParcelAddress address;
  const std::string name = text("weft-{}", random_key());
  std::memcpy(address.socket_name, name.data(), name.size());
  address.key = random_key();
  const SocketName own(address.socket_name);
  if (bind(socket.get(), own.get(), own.length) != 0)
    return logged(Status::from_errno(errno, "rank {}: bind Unix socket @{}", rank, name));
  auto exchange = std::unique_ptr<ParcelExchange>(new ParcelExchange(rank, std::move(socket)));
  exchange->address_ = address;
  return exchange;
}

Result<ParcelExchange::Sent> ParcelExchange::try_send(int peer, const Parcel& parcel) {
  Header header{kMagic, peers_[peer].key, sequence_, static_cast<uint32_t>(rank_),
                static_cast<uint32_t>(parcel.bytes.size())};
  iovec parts[2] = {{&header, sizeof header}, {const_cast<char*>(parcel.bytes.data()), parcel.bytes.size()}};
  SocketName name(peers_[peer].socket_name);
  msghdr message{};
  message.msg_name = &name.address;
  message.msg_namelen = name.length;
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  Control control;
  if (parcel.fd.is_open()) attach(message, control, parcel.fd.get());
  if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL) >= 0) return Sent::kDone;
  switch (errno) {
    case EAGAIN:  // the peer's queue is full: it holds few datagrams
    case EINTR:
    case ENOBUFS:
    case ETOOMANYREFS:  // too many descriptors in flight
      return Sent::kLater;
    case ECONNREFUSED:
    case ENOENT:
      return Sent::kPeerGone;
    default:
      return logged(Status::from_errno(errno, "rank {}: send to rank {}", rank_, peer));
  }
}

// Takes every datagram that has arrived; drops what does not carry our key, and what belongs to a past call.
Status ParcelExchange::receive_waiting() {
  for (;;) {
    Header header{};
    char bytes[kMaxBytes];
    iovec parts[2] = {{&header, sizeof header}, {bytes, sizeof bytes}};
    Control control;
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    const ssize_t got = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    if (got < 0) {
      if (errno == EAGAIN) return Status();
      if (errno == EINTR) continue;
      return logged(Status::from_errno(errno, "rank {}: receive from peers", rank_));
    }
    FileDescriptor fd = detach(message);
    const bool is_ours = got >= static_cast<ssize_t>(sizeof header) && header.magic == kMagic &&
                         header.key == address_.key && header.sender < peers_.size() &&
                         header.bytes == static_cast<size_t>(got) - sizeof header;
    if (!is_ours || header.sequence < sequence_) continue;
    received_[{header.sequence, static_cast<int>(header.sender)}] = {std::string(bytes, header.bytes),
                                                                     std::move(fd)};
  }
}

Result<bool> ParcelExchange::all_sent(const Parcel& mine, std::vector<bool>& sent,
                                      std::string_view operation) {
  bool all = true;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (!takes_part(peer) || sent[peer]) continue;
    WEFT_TRY_ASSIGN(const Sent now, try_send(peer, mine));
    if (now == Sent::kPeerGone) WEFT_TRY(check_alive(operation));
    sent[peer] = now != Sent::kLater;  // who is gone, but gave its bytes before, needs none of ours
    all = all && sent[peer];
  }
  return all;
}

bool ParcelExchange::all_received() const {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (takes_part(peer) && !has_received(peer)) return false;
  return true;
}

// An empty datagram to a closed socket is refused. A forked child of a dead peer may keep the socket open.
bool ParcelExchange::is_gone(int peer) const {
  if (watch_ && watch_->is_over(peer)) return true;
  const SocketName name(peers_[peer].socket_name);
  const ssize_t sent = sendto(socket_.get(), "", 0, MSG_NOSIGNAL, name.get(), name.length);
  return sent < 0 && (errno == ECONNREFUSED || errno == ENOENT);
}

// Finds dead peers long before the deadline. Names all that are gone: one of them may only have left because
// it noticed first.
Status ParcelExchange::check_alive(std::string_view operation) {
  std::vector<int> gone;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (takes_part(peer) && !has_received(peer) && is_gone(peer)) gone.push_back(peer);
  if (gone.empty()) return Status();
  WEFT_TRY(receive_waiting());  // what they sent just before they left
  std::erase_if(gone, [&](int peer) { return has_received(peer); });
  if (gone.empty()) return Status();
  std::string fates = watch_ ? watch_->fates(gone, "is gone (its socket is closed)") : std::string();
  for (size_t i = 0; !watch_ && i < gone.size(); ++i)
    fates += text("{}rank {} is gone (its socket is closed)", i ? ", " : "", gone[i]);
  return logged(Status::make(Code::kPeerLost, "rank {}, {}: {}", rank_, operation, fates));
}

std::string ParcelExchange::missing() const {
  std::string names;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (takes_part(peer) && !has_received(peer)) names += text("{}rank {}", names.empty() ? "" : ", ", peer);
  return names.empty() ? "room in peers' queues" : names;
}

Result<std::vector<Parcel>> ParcelExchange::all_gather(const Parcel& mine, std::string_view operation,
                                                       Deadline until) {
  if (mine.bytes.size() > kMaxBytes)
    return Status::invalid("parcel: got {} bytes, allowed: at most {}", mine.bytes.size(), kMaxBytes);
  ++sequence_;
  order_threads();
  const double limit_s = until.left_s();
  std::vector<bool> sent(peers_.size(), false);
  Status failure;
  constexpr auto kProbeEvery = std::chrono::milliseconds(100);
  auto next_probe = Deadline::Clock::now() + kProbeEvery;
  auto progress = [&]() -> Result<bool> {
    WEFT_TRY_ASSIGN(const bool is_sent, all_sent(mine, sent, operation));
    WEFT_TRY(receive_waiting());
    if (is_sent && all_received()) return true;
    if (Deadline::Clock::now() >= next_probe) {
      next_probe = Deadline::Clock::now() + kProbeEvery;
      WEFT_TRY(check_alive(operation));
    }
    return false;
  };
  const bool finished = wait_until(until, [&] {
    Result<bool> done = progress();
    if (!done.ok()) failure = done.status();
    return !done.ok() || *done;
  });
  WEFT_TRY(failure);
  if (!finished)
    return logged(Status::make(Code::kPeerLost, "rank {}, {}, waited {} s for {}", rank_, operation, limit_s,
                               missing()));
  order_threads();
  std::vector<Parcel> all(peers_.size());
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (takes_part(peer)) all[peer] = std::move(received_[{sequence_, peer}]);
  all[rank_].bytes = mine.bytes;
  received_.erase(received_.begin(), received_.lower_bound({sequence_ + 1, 0}));
  return all;
}

}  // namespace weft
