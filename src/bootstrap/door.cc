// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/door.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace weft {
namespace {

constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'd', 'o', 'o', 'r'};
constexpr int kAcceptsPerTurn = 64;
constexpr double kYoung_s = 0.2;  // who has been let wait for less is not dropped for others
constexpr uint32_t kWordsMax = 4096;

// What the door answers: the proof that it knows the key too, or words.
struct Answer {
  uint32_t is_welcome;
  uint32_t bytes;
};

Proof prove_for(const std::string& key, std::string_view role, const Nonce& doors, const Claim& claim) {
  return prove(key, role,
               {bytes_of(doors),
                bytes_of(claim.nonce),
                {reinterpret_cast<const char*>(&claim.rank), sizeof claim.rank},
                {reinterpret_cast<const char*>(&claim.size), sizeof claim.size}});
}

bool answer(int socket, bool is_welcome, std::string_view bytes) {
  const Answer head{is_welcome, static_cast<uint32_t>(bytes.size())};
  std::string all(reinterpret_cast<const char*>(&head), sizeof head);
  all += bytes;
  // A fresh connection has room for this: nobody can make the door wait.
  return send_all(socket, all.data(), all.size(), Deadline::after_s(0)) == Moved::kAll;
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

std::string name_of_peer(int socket) {
  SocketAddress address{};
  socklen_t bytes = sizeof address;
  char words[INET6_ADDRSTRLEN] = "?";
  if (::getpeername(socket, &address.any, &bytes) != 0) return words;
  const bool is_v6 = address.any.sa_family == AF_INET6;
  const void* host = is_v6 ? static_cast<const void*>(&address.v6.sin6_addr) : &address.v4.sin_addr;
  ::inet_ntop(address.any.sa_family, host, words, sizeof words);
  return text("{}:{}", words, ntohs(is_v6 ? address.v6.sin6_port : address.v4.sin_port));
}

void send_at_once(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

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

void Door::close() {
  listener_.close();
  pending_.clear();
}

bool Door::has_room() const {
  return pending_.size() < kPending || pending_.front().until.left_s() < kSilence_s - kYoung_s;
}

void Door::add_to(std::vector<pollfd>& entries) const {
  if (listener_.is_open() && has_room()) entries.push_back({listener_.get(), POLLIN, 0});
  for (const Pending& pending : pending_) entries.push_back({pending.socket.get(), POLLIN, 0});
}

std::vector<Guest> Door::serve() {
  std::vector<Guest> guests;
  if (listener_.is_open()) accept_some();
  for (auto at = pending_.begin(); at != pending_.end();)
    at = hear(*at, guests) && !at->until.passed() ? std::next(at) : pending_.erase(at);
  return guests;
}

void Door::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn && has_room(); ++i) {
    FileDescriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      // Where no descriptor is left, one who has said nothing makes place.
      if ((errno == EMFILE || errno == ENFILE) && !pending_.empty()) pending_.pop_front();
      return;
    }
    if (pending_.size() >= kPending) pending_.pop_front();
    Challenge challenge{{}, random_nonce()};
    std::memcpy(challenge.magic, kMagic, sizeof kMagic);
    send_at_once(socket.get());
    if (send_all(socket.get(), &challenge, sizeof challenge, Deadline::after_s(0)) != Moved::kAll) continue;
    pending_.push_back({std::move(socket), challenge.nonce, {}, 0, Deadline::after_s(kSilence_s)});
  }
}

// False when the connection has ended here: it is a guest, or gone.
bool Door::hear(Pending& pending, std::vector<Guest>& guests) {
  Claim& claim = pending.claim;
  while (pending.bytes < sizeof claim) {
    char* const at = reinterpret_cast<char*>(&claim) + pending.bytes;
    const ssize_t got = ::recv(pending.socket.get(), at, sizeof claim - pending.bytes, MSG_DONTWAIT);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    pending.bytes += static_cast<size_t>(got);
  }
  if (std::memcmp(claim.magic, kMagic, sizeof kMagic) != 0 ||
      !is_same(claim.proof, prove_for(key_, "claim", pending.nonce, claim))) {
    turn_away(pending);
    return false;
  }
  guests.push_back(
      {std::move(pending.socket), claim.rank, claim.size, prove_for(key_, "welcome", pending.nonce, claim)});
  return false;
}

// Says so here too, at most once a second.
void Door::turn_away(const Pending& pending) {
  if (const uint64_t times = turned_away_.count())
    log_warn("bootstrap: a connection from {} is refused: it does not know this job's secret ({} so far)",
             name_of_peer(pending.socket.get()), times);
  answer(pending.socket.get(), false,
         "secret: the id or WEFT_JOB_SECRET of this rank is not the other side's, allowed: the same on all "
         "ranks");
}

bool Door::welcome(const Guest& guest) {
  return answer(guest.socket.get(), true, bytes_of(guest.welcome));
}

void Door::refuse(const Guest& guest, const std::string& why) {
  answer(guest.socket.get(), false, std::string_view(why).substr(0, kWordsMax));
}

namespace {

struct Knocking {
  int rank;
  double limit_s;
  Deadline until;
};

Status lost(const Knocking& who, std::string_view why) {
  return Status::make(Code::kPeerLost, "rank {}, meeting, waited {} s for the process that made the id: {}",
                      who.rank, who.limit_s, why);
}

Result<FileDescriptor> dial(const SocketAddress& address, const Knocking& who) {
  const socklen_t bytes = address.any.sa_family == AF_INET6 ? sizeof address.v6 : sizeof address.v4;
  FileDescriptor socket(::socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) return logged(Status::from_errno(errno, "open a socket"));
  int error = ::connect(socket.get(), &address.any, bytes) == 0 ? 0 : errno;
  if (error == EINPROGRESS && await(socket.get(), POLLOUT, who.until)) {
    socklen_t error_bytes = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &error_bytes);
  }
  if (error == EINPROGRESS) return lost(who, "does not answer");
  if (error) return lost(who, std::strerror(error));
  send_at_once(socket.get());
  return socket;
}

// One try on a connection: what the door answered, in `words` if it is a refusal.
Moved introduce(int socket, const std::string& key, Claim claim, Deadline until, std::string& words,
                bool& is_welcome) {
  Challenge challenge{};
  if (Moved got = receive_all(socket, &challenge, sizeof challenge, until); got != Moved::kAll) return got;
  if (std::memcmp(challenge.magic, kMagic, sizeof kMagic) != 0) {
    words = "address: something else listens there";
    return Moved::kAll;
  }
  claim.nonce = random_nonce();
  claim.proof = prove_for(key, "claim", challenge.nonce, claim);
  if (Moved sent = send_all(socket, &claim, sizeof claim, until); sent != Moved::kAll) return sent;
  Answer head{};
  if (Moved got = receive_all(socket, &head, sizeof head, until); got != Moved::kAll) return got;
  words.resize(std::min(head.bytes, kWordsMax));
  if (Moved got = receive_all(socket, words.data(), words.size(), until); got != Moved::kAll) return got;
  if (!head.is_welcome) return Moved::kAll;
  is_welcome = words == bytes_of(prove_for(key, "welcome", challenge.nonce, claim));
  if (!is_welcome) words = "secret: the other side does not know it";
  return Moved::kAll;
}

}  // namespace

Result<FileDescriptor> knock(const SocketAddress& address, const std::string& key, int rank, int size,
                             Deadline until) {
  Claim claim{{}, rank, size, {}, {}};
  std::memcpy(claim.magic, kMagic, sizeof kMagic);
  const Knocking who{rank, until.left_s(), until};
  while (true) {
    WEFT_TRY_ASSIGN(FileDescriptor socket, dial(address, who));
    std::string words;
    bool is_welcome = false;
    const Moved moved = introduce(socket.get(), key, claim, until, words, is_welcome);
    if (moved == Moved::kAll && is_welcome) return socket;
    // Whoever listens there chose them: nothing has been proven.
    if (moved == Moved::kAll) return Status(Code::kInvalid, printable(words));
    if (moved == Moved::kTimeout || until.passed()) return lost(who, "does not answer");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // dropped: many want to come in
  }
}

}  // namespace weft
