// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/rendezvous.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/log.h"
#include "base/random.h"
#include "bootstrap/frame.h"
#include "bootstrap/interface.h"

namespace weft {
namespace {

constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'm', 'e', 'e', 't'};
constexpr int kBacklog = 1024;
constexpr double kIdleS = 3600;  // without clients for so long, it ends

// The thread that passes everything on. It owns itself, since whoever opened the rendezvous may be gone first.
class RendezvousServer {
 public:
  RendezvousServer(FileDescriptor listener, std::string key, int size)
      : listener_(std::move(listener), std::move(key)), size_(size), is_of_rank_0_(size > 0) {}

  void run() {
    Deadline idle = Deadline::after_s(kIdleS);
    Deadline beat = Deadline::after_s(silence_.heartbeat_s);
    while (true) {
      std::vector<pollfd> entries;
      listener_.add_to(entries);
      const size_t first_peer = entries.size();
      for (const auto& [rank, peer] : peers_) entries.push_back({peer.stream.fd(), POLLIN, 0});
      if ((!listener_.is_open() && peers_.empty()) || (peers_.empty() && idle.passed())) return;
      ::poll(entries.data(), entries.size(), suspects_.empty() ? 200 : 20);
      for (size_t i = first_peer; i < entries.size(); ++i)
        if (entries[i].revents) hear(entries[i].fd);
      for (Client& client : listener_.serve()) admit(std::move(client));
      if (!peers_.empty()) idle = Deadline::after_s(kIdleS);
      judge();
      settle();
      if (had_everybody_ && peers_.empty()) return;
      if (!beat.passed()) continue;
      beat = Deadline::after_s(silence_.heartbeat_s);
      tell_all({Kind::kBeat, -1, 0, 0}, "");
    }
  }

 private:
  struct Peer {
    Stream stream;
    Inbox inbox{kMaxFrameBytes};
    bool has_given = false;
    std::string given;
  };
  struct Suspect {
    Deadline until;
    std::string how;
  };

  // Who has come in is a rank of this rendezvous, but perhaps not one that is missing.
  void admit(Client client) {
    if (size_ == 0) size_ = client.size;
    if (lost_.contains(client.rank))
      return Listener::refuse(client, text("rank {}: the others go on without it, because it {}", client.rank,
                                           lost_[client.rank]));
    if (client.size != size_)
      return Listener::refuse(
          client, text("size: got {} on rank 0, {} on rank {}, allowed: the same on all ranks", size_,
                       client.size, client.rank));
    if (client.rank < 0 || client.rank >= size_ || peers_.contains(client.rank))
      return Listener::refuse(client, text("rank: got {} twice, allowed: each rank once", client.rank));
    if (!Listener::welcome(client)) return;
    watch_network(client.stream.fd(), silence_);
    peers_[client.rank].stream = std::move(client.stream);
    if (static_cast<int>(peers_.size()) < size_) return;
    had_everybody_ = true;
    listener_.close();
  }

  void hear(int fd) {
    const auto found =
        std::find_if(peers_.begin(), peers_.end(), [&](auto& p) { return p.second.stream.fd() == fd; });
    if (found == peers_.end()) return;
    const int rank = found->first;
    int error = found->second.inbox.take(found->second.stream);
    Frame frame;
    std::string bytes;
    while (peers_.contains(rank) && peers_[rank].inbox.next(frame, bytes))
      if (!take(rank, frame, std::move(bytes))) error = EPROTO;
    if (error == 0 || !peers_.contains(rank)) return;
    peers_.erase(rank);
    suspect(rank, how_it_ended(error, silence_));
  }

  // False for what a rank does not say.
  bool take(int rank, const Frame& frame, std::string bytes) {
    Peer& peer = peers_[rank];
    switch (frame.kind) {
      case Kind::kBeat:
        return true;
      case Kind::kLost:
        if (frame.rank < 0 || frame.rank >= size_) return false;
        if (frame.number)
          suspect(frame.rank, std::move(bytes));
        else
          lose(frame.rank, std::move(bytes));
        return true;
      case Kind::kLeave: {
        tell_all({Kind::kLeave, rank, 0, 0}, "");  // also the rank itself: then it may go
        left_.insert(rank);
        peers_.erase(rank);
        if (rank == 0) host_has_gone();
        return true;
      }
      case Kind::kGive:
        if (peer.has_given) return false;
        peer.has_given = true;
        peer.given = std::move(bytes);
        if (const Deadline patience = Deadline::after_s(static_cast<double>(frame.number) / 1e3);
            !is_waiting_ || patience.left_s() < patience_.left_s())
          patience_ = patience;
        return is_waiting_ = true;
      default:
        return false;
    }
  }

  // A rank whose connection has ended, or whom another one misses: who shares its host may know more.
  void suspect(int rank, std::string how) {
    if (lost_.contains(rank)) return;
    suspects_.try_emplace(rank, Suspect{Deadline::after_s(kAccount_s), std::move(how)});
  }

  void judge() {
    for (auto at = suspects_.begin(); at != suspects_.end();) {
      auto [rank, suspect] = *at;
      if (!suspect.until.passed()) {
        ++at;
        continue;
      }
      suspects_.erase(at);
      lose(rank, suspect.how);
      at = suspects_.begin();
    }
  }

  void lose(int rank, std::string how) {
    if (!lost_.try_emplace(rank, how).second) return;
    suspects_.erase(rank);
    tell_all({Kind::kLost, rank, 0, 0}, how);
    if (rank == 0) host_has_gone();
  }

  // Nobody can meet any more where rank 0 has listened, and its address is free for the next who listens there.
  void host_has_gone() {
    if (is_of_rank_0_) listener_.close();
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
    } else if (!lost_.empty() || !left_.empty() || patience_.passed()) {
      answer_all(Code::kPeerLost, missing());
    }
  }

  std::string missing() const {
    std::string names;
    for (int rank = 0; rank < size_; ++rank) {
      const auto found = peers_.find(rank);
      if (found != peers_.end() && found->second.has_given) continue;
      const auto lost = lost_.find(rank);
      const std::string how = lost != lost_.end()    ? text(" (which {})", lost->second)
                              : left_.contains(rank) ? " (which has left)"
                                                     : "";
      names += text("{}rank {}{}", names.empty() ? "" : ", ", rank, how);
    }
    return had_everybody_ ? names : names + listener_.account();
  }

  void answer_all(Code code, const std::string& bytes) {
    for (auto& [rank, peer] : peers_) {
      if (!peer.has_given) continue;
      send_frame(peer.stream, {Kind::kAnswer, -1, 0, static_cast<uint64_t>(code)}, bytes);
      peer.has_given = false;
      peer.given.clear();
    }
    is_waiting_ = false;
  }

  void tell_all(const Frame& frame, const std::string& bytes) {
    for (auto& [rank, peer] : peers_) send_frame(peer.stream, frame, bytes);
  }

  const Silence silence_;
  Listener listener_;
  int size_;  // 0: that of the first who comes
  const bool is_of_rank_0_;
  std::map<int, Peer> peers_;
  std::map<int, std::string> lost_;  // and how
  std::map<int, Suspect> suspects_;
  std::set<int> left_;
  bool had_everybody_ = false;
  bool is_waiting_ = false;
  Deadline patience_ = Deadline::after_s(0);
};

}  // namespace

std::string key_of(const UniqueId& unique_id) {
  return std::string(reinterpret_cast<const char*>(unique_id.key), sizeof unique_id.key) +
         config().job_secret;
}

SocketAddress address_of(const UniqueId& unique_id, socklen_t& bytes) {
  SocketAddress address{};
  if (unique_id.is_ipv6) {
    address.v6.sin6_family = AF_INET6;
    address.v6.sin6_port = htons(unique_id.port);
    std::memcpy(&address.v6.sin6_addr, unique_id.address, 16);
    bytes = sizeof(address.v6);
  } else {
    address.v4.sin_family = AF_INET;
    address.v4.sin_port = htons(unique_id.port);
    std::memcpy(&address.v4.sin_addr, unique_id.address, 4);
    bytes = sizeof(address.v4);
  }
  return address;
}

FileDescriptor listen_at(const SocketAddress& address) {
  const socklen_t bytes = address.any.sa_family == AF_INET6 ? sizeof address.v6 : sizeof address.v4;
  FileDescriptor listener(::socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;  // connections of the last one who listened there may still be ending
  if (!listener.is_open() || ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(listener.get(), &address.any, bytes) != 0 || ::listen(listener.get(), kBacklog) != 0)
    return {};
  return listener;
}

Status serve_rendezvous(FileDescriptor listener, std::string key, int size) {
  WEFT_TRY(Stream::check(key));
  auto server = std::make_shared<RendezvousServer>(std::move(listener), std::move(key), size);
  std::thread([server] { server->run(); }).detach();
  return {};
}

bool UniqueId::is_valid() const {
  return std::memcmp(magic, kMagic, sizeof kMagic) == 0;
}

Result<UniqueId> open_rendezvous(const std::string& interface) {
  WEFT_TRY_ASSIGN(const Interface at, choose_interface(interface));
  log_info("a rendezvous of ranks on {} ({}): {}", at.name, at.address, at.why);
  UniqueId unique_id{};
  std::memcpy(unique_id.magic, kMagic, sizeof kMagic);
  unique_id.is_ipv6 = at.is_ipv6;
  std::memcpy(unique_id.address, at.bytes, sizeof unique_id.address);
  unique_id.key[0] = random_key();
  unique_id.key[1] = random_key();
  socklen_t bytes = 0;
  SocketAddress address = address_of(unique_id, bytes);
  FileDescriptor listener = listen_at(address);
  if (!listener.is_open() || ::getsockname(listener.get(), &address.any, &bytes) != 0)
    return logged(Status::from_errno(errno, "open a rendezvous"));
  unique_id.port = ntohs(unique_id.is_ipv6 ? address.v6.sin6_port : address.v4.sin_port);
  WEFT_TRY(serve_rendezvous(std::move(listener), key_of(unique_id), 0));
  return unique_id;
}

}  // namespace weft
