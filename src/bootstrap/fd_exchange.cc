// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/fd_exchange.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <system_error>
#include <thread>

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
  uint32_t bytes;  // that follow
};
static_assert(sizeof(Header) == 32);
constexpr uint64_t kProbe =
    0;  // of a datagram that only asks whether the socket is there: no call has this number

struct SocketName {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit SocketName(const char* name) {
    address.sun_family = AF_UNIX;
    const size_t chars = strnlen(name, sizeof(FdAddress::socket_name));
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

// Has the kernel drop, in the sender's call, what does not begin with `head`: the descriptors that come with it never
// reach this process, and nobody fills its queue.
bool attach_filter(int socket, const Header& head) {
  constexpr unsigned kWords = offsetof(Header, sequence) / sizeof(uint32_t);
  uint32_t words[kWords];
  std::memcpy(words, &head, sizeof words);
  sock_filter program[2 * kWords + 2];
  for (unsigned i = 0; i < kWords; ++i) {
    const auto to_drop = static_cast<uint8_t>(2 * (kWords - 1 - i) + 1);  // a short datagram is dropped, too
    program[2 * i] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, i * 4);
    program[2 * i + 1] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(words[i]), 0, to_drop);
  }
  program[2 * kWords] = BPF_STMT(BPF_RET | BPF_K, UINT32_MAX);
  program[2 * kWords + 1] = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog filter{2 * kWords + 2, program};
  return setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0;
}

// Closing what a stranger sent may take as long as the stranger likes: a socket that lingers, a file of a file system
// that does not answer. So a thread of its own does it; a rank has few of them at a time.
void close_in_thread(std::vector<FileDescriptor> strangers) {
  static std::atomic<int> threads{0};
  constexpr int kMostThreads = 16;
  if (threads.fetch_add(1) < kMostThreads) {
    try {
      std::thread([strangers = std::move(strangers)]() mutable {
        strangers.clear();
        --threads;
      }).detach();
      return;
    } catch (const std::system_error&) {  // no thread to be had
    }
  }
  --threads;
}

// An exchange orders memory: what a rank wrote before it is seen by its peers after it. The kernel sees to
// that; race detectors do not follow datagrams, so ranks that are threads of one process also meet at an
// atomic.
void order_threads() {
  static std::atomic<uint64_t> rendezvous_point{0};
  rendezvous_point.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace

// One that has come, with all that came along.
struct FdExchange::Datagram {
  Header header{};
  char bytes[kMaxBytes];
  size_t got = 0;
  uid_t user = static_cast<uid_t>(-1);
  std::vector<FileDescriptor> descriptors;
  bool is_complete = false;  // nothing of it was left out

  // False where none is there; errno says why.
  bool receive(int socket);
};

bool FdExchange::Datagram::receive(int socket) {
  constexpr size_t kMostDescriptors = 253;  // that Linux lets a datagram have: all of them are to be closed
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(kMostDescriptors * sizeof(int))];
  iovec parts[2] = {{&header, sizeof header}, {bytes, sizeof bytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t length = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (length < 0) return false;
  got = static_cast<size_t>(length);
  is_complete = !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET) continue;
    if (part->cmsg_type == SCM_CREDENTIALS) {
      ucred sender{};
      std::memcpy(&sender, CMSG_DATA(part), sizeof sender);
      user = sender.uid;
    } else if (part->cmsg_type == SCM_RIGHTS) {
      for (size_t at = CMSG_LEN(0); at + sizeof(int) <= part->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, reinterpret_cast<const char*>(part) + at, sizeof fd);
        descriptors.emplace_back(fd);
      }
    }
  }
  return true;
}

Result<std::unique_ptr<FdExchange>> FdExchange::open(int rank) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) return logged(Status::from_errno(errno, "rank {}: open a Unix socket", rank));
  FdAddress address;
  const std::string name = text("weft-{}", random_key());
  std::memcpy(address.socket_name, name.data(), name.size());
  address.key = random_key();
  const int on = 1;
  if (setsockopt(socket.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0)
    return logged(Status::from_errno(errno, "rank {}: ask for the users of datagrams", rank));
  if (!attach_filter(socket.get(), {kMagic, address.key, 0, 0, 0}))
    log_info("rank {}: no socket filter ({}): strangers of this host can fill the queue", rank,
             std::strerror(errno));
  const SocketName own(address.socket_name);
  if (bind(socket.get(), own.get(), own.length) != 0)
    return logged(Status::from_errno(errno, "rank {}: bind Unix socket @{}", rank, name));
  auto exchange = std::unique_ptr<FdExchange>(new FdExchange(rank, std::move(socket)));
  exchange->address_ = address;
  return exchange;
}

Status FdExchange::connect(const std::vector<FdAddress>& peers) {
  peers_ = std::vector<Peer>(peers.size());
  for (int peer = 0; peer < static_cast<int>(peers.size()); ++peer) {
    peers_[peer].key = peers[peer].key;
    if (!takes_part(peer)) continue;
    FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket.is_open())
      return logged(Status::from_errno(errno, "rank {}: open a Unix socket to rank {}", rank_, peer));
    const SocketName name(peers[peer].socket_name);
    if (::connect(socket.get(), name.get(), name.length) == 0)
      peers_[peer].socket = std::move(socket);
    else if (errno != ECONNREFUSED && errno != ENOENT)
      return logged(Status::from_errno(errno, "rank {}: connect to the Unix socket of rank {}", rank_, peer));
  }
  return {};
}

Result<FdExchange::Sent> FdExchange::try_send(int peer, const FdMessage& mine) {
  if (!peers_[peer].socket.is_open()) return Sent::kPeerGone;
  Header header{kMagic, peers_[peer].key, sequence_, static_cast<uint32_t>(rank_),
                static_cast<uint32_t>(mine.bytes.size())};
  iovec parts[2] = {{&header, sizeof header}, {const_cast<char*>(mine.bytes.data()), mine.bytes.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  Control control;
  if (mine.fd.is_open()) attach(message, control, mine.fd.get());
  if (sendmsg(peers_[peer].socket.get(), &message, MSG_NOSIGNAL) >= 0) return Sent::kDone;
  switch (errno) {
    case EAGAIN:  // the peer's queue is full: it holds few datagrams
    case EINTR:
    case ENOBUFS:
    case ETOOMANYREFS:  // too many descriptors in flight
      return Sent::kLater;
    case ECONNREFUSED:  // and from then on:
    case ENOTCONN:
      return Sent::kPeerGone;
    default:
      return logged(Status::from_errno(errno, "rank {}: send to rank {}", rank_, peer));
  }
}

// Takes every datagram that has arrived.
Status FdExchange::receive_waiting() {
  for (;;) {
    Datagram datagram;
    if (datagram.receive(socket_.get())) {
      take(datagram);
    } else if (errno == EAGAIN) {
      return Status();
    } else if (errno != EINTR) {
      return logged(Status::from_errno(errno, "rank {}: receive from peers", rank_));
    }
  }
}

// Keeps what a peer gave; drops what belongs to a past call, and refuses what is no peer's. Who sent it is asked first.
void FdExchange::take(Datagram& datagram) {
  const Header& header = datagram.header;
  if (datagram.user != getuid()) return refuse(datagram, "another user sent it");
  if (datagram.got < sizeof header || header.magic != kMagic || header.key != address_.key)
    return refuse(datagram, "it does not carry this rank's key");
  const size_t bytes = datagram.got - sizeof header;
  if (!datagram.is_complete || header.bytes != bytes || header.sender >= peers_.size() ||
      datagram.descriptors.size() > 1)
    return refuse(datagram, "it is not one of this version's");
  if (header.sequence < sequence_) return;
  FileDescriptor fd = datagram.descriptors.empty() ? FileDescriptor() : std::move(datagram.descriptors[0]);
  received_[{header.sequence, static_cast<int>(header.sender)}] = {std::string(datagram.bytes, bytes),
                                                                   std::move(fd)};
}

void FdExchange::refuse(Datagram& datagram, std::string_view why) {
  const size_t descriptors = datagram.descriptors.size();
  if (descriptors) close_in_thread(std::move(datagram.descriptors));
  if (const uint64_t times = refused_.count())
    log_warn("rank {}: a datagram of user {} with {} descriptors is refused: {} ({} so far)", rank_,
             datagram.user, descriptors, why, times);
}

Result<bool> FdExchange::all_sent(const FdMessage& mine, std::vector<bool>& sent,
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

bool FdExchange::all_received() const {
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (takes_part(peer) && !has_received(peer)) return false;
  return true;
}

// A datagram to a closed socket is refused. A forked child of a dead peer may keep the socket open.
bool FdExchange::is_gone(int peer) const {
  if (watch_ && watch_->is_over(peer)) return true;
  if (!peers_[peer].socket.is_open()) return true;
  const Header probe{kMagic, peers_[peer].key, kProbe, static_cast<uint32_t>(rank_), 0};
  const ssize_t sent = send(peers_[peer].socket.get(), &probe, sizeof probe, MSG_NOSIGNAL);
  return sent < 0 && (errno == ECONNREFUSED || errno == ENOTCONN);
}

// Finds dead peers long before the deadline. Names all that are gone: one of them may only have left because
// it noticed first.
Status FdExchange::check_alive(std::string_view operation) {
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

std::string FdExchange::missing() const {
  std::string names;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (takes_part(peer) && !has_received(peer)) names += text("{}rank {}", names.empty() ? "" : ", ", peer);
  return names.empty() ? "room in peers' queues" : names;
}

Result<std::vector<FdMessage>> FdExchange::all_gather(const FdMessage& mine, std::string_view operation,
                                                      Deadline until) {
  if (mine.bytes.size() > kMaxBytes)
    return Status::invalid("message: got {} bytes, allowed: at most {}", mine.bytes.size(), kMaxBytes);
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
  std::vector<FdMessage> all(peers_.size());
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (takes_part(peer)) all[peer] = std::move(received_[{sequence_, peer}]);
  all[rank_].bytes = mine.bytes;
  received_.erase(received_.begin(), received_.lower_bound({sequence_ + 1, 0}));
  return all;
}

}  // namespace weft
