// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/log.h"

namespace weft {
namespace {

constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'd', 'o', 'o', 'r'};
constexpr int kAcceptsPerTurn = 64;
constexpr double kYoung_s = 0.2;  // who has been let wait for less is not dropped for others
constexpr uint32_t kWordsMax = 4096;
constexpr double kTellAfter_s = 5;  // who has not reached the listener says so
constexpr double kGrace_s = 2;      // for a listener that had answered to listen again
constexpr const char* kOtherSecret =
    "secret: the one given differs from the other side's, allowed: the same WEFT_JOB_SECRET on all ranks, "
    "and the same id";

// What the listener answers: the proof that it knows the key too, or words.
struct Answer {
  uint32_t is_welcome;
  uint32_t bytes;
};

Proof prove_for(const std::string& key, std::string_view role, const Nonce& challenge, const Claim& claim) {
  return prove(key, role,
               {bytes_of(challenge),
                bytes_of(claim.nonce),
                {reinterpret_cast<const char*>(&claim.rank), sizeof claim.rank},
                {reinterpret_cast<const char*>(&claim.size), sizeof claim.size}});
}

bool answer(Stream& stream, bool is_welcome, std::string_view bytes) {
  const Answer head{is_welcome, static_cast<uint32_t>(bytes.size())};
  std::string all(reinterpret_cast<const char*>(&head), sizeof head);
  all += bytes;
  // A fresh connection has room for this: nobody can make the listener wait.
  return send_all(stream, all.data(), all.size(), Deadline::after_s(0)) == Moved::kAll;
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

// "10.0.0.7", with_port ":4711", too.
std::string name_of_peer(int socket, bool with_port) {
  SocketAddress address{};
  socklen_t bytes = sizeof address;
  char words[INET6_ADDRSTRLEN] = "?";
  if (::getpeername(socket, &address.any, &bytes) != 0) return words;
  const bool is_v6 = address.any.sa_family == AF_INET6;
  const void* host = is_v6 ? static_cast<const void*>(&address.v6.sin6_addr) : &address.v4.sin_addr;
  ::inet_ntop(address.any.sa_family, host, words, sizeof words);
  return with_port ? text("{}:{}", words, ntohs(is_v6 ? address.v6.sin6_port : address.v4.sin_port)) : words;
}

void send_at_once(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

Moved send_all(Stream& stream, const void* data, size_t bytes, Deadline until) {
  const auto* from = static_cast<const char*>(data);
  while (bytes) {
    const ssize_t sent = stream.send(from, bytes);
    if (sent > 0) {
      from += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (sent == 0 || (errno != EAGAIN && errno != EINTR)) {
      return Moved::kGone;
    } else if (!await(stream.fd(), POLLOUT, until)) {
      return Moved::kTimeout;
    }
  }
  return Moved::kAll;
}

Moved receive_all(Stream& stream, void* data, size_t bytes, Deadline until) {
  auto* to = static_cast<char*>(data);
  while (bytes) {
    const ssize_t got = stream.receive(to, bytes);
    if (got > 0) {
      to += got;
      bytes -= static_cast<size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return Moved::kGone;
    } else if (!await(stream.fd(), POLLIN, until)) {
      return Moved::kTimeout;
    }
  }
  return Moved::kAll;
}

void Listener::close() {
  socket_.close();
  pending_.clear();
}

bool Listener::has_room() const {
  return pending_.size() < kPending || pending_.front().until.left_s() < kSilence_s - kYoung_s;
}

void Listener::add_to(std::vector<pollfd>& entries) const {
  if (socket_.is_open() && has_room()) entries.push_back({socket_.get(), POLLIN, 0});
  for (const Pending& pending : pending_) entries.push_back({pending.stream.fd(), POLLIN, 0});
}

std::vector<Client> Listener::serve() {
  std::vector<Client> clients;
  if (socket_.is_open()) accept_some();
  for (auto at = pending_.begin(); at != pending_.end();)
    at = hear(*at, clients) && !at->until.passed() ? std::next(at) : pending_.erase(at);
  return clients;
}

void Listener::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn && has_room(); ++i) {
    FileDescriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      // Where no descriptor is left, one who has said nothing makes place.
      if ((errno == EMFILE || errno == ENFILE) && !pending_.empty()) pending_.pop_front();
      return;
    }
    if (pending_.size() >= kPending) pending_.pop_front();
    send_at_once(socket.get());
    auto stream = Stream::open(std::move(socket), Stream::Side::kListener, key_);
    if (stream.ok()) pending_.push_back({std::move(*stream), Deadline::after_s(kSilence_s)});
  }
}

// False when the connection has ended here: it is a client, or gone.
bool Listener::hear(Pending& pending, std::vector<Client>& clients) {
  if (!pending.is_challenged) return challenge(pending);
  Claim& claim = pending.claim;
  while (pending.bytes < sizeof claim) {
    char* const at = reinterpret_cast<char*>(&claim) + pending.bytes;
    const ssize_t got = pending.stream.receive(at, sizeof claim - pending.bytes);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    pending.bytes += static_cast<size_t>(got);
  }
  if (std::memcmp(claim.magic, kMagic, sizeof kMagic) != 0 ||
      !is_same(claim.proof, prove_for(key_, "claim", pending.nonce, claim))) {
    turn_away(pending, "it does not know this job's secret");
    answer(pending.stream, false, kOtherSecret);
    return false;
  }
  clients.push_back(
      {std::move(pending.stream), claim.rank, claim.size, prove_for(key_, "welcome", pending.nonce, claim)});
  return false;
}

// Once both sides have shaken hands; false where that fails.
bool Listener::challenge(Pending& pending) {
  const Stream::Hands hands = pending.stream.shake_hands();
  if (hands == Stream::Hands::kNotYet) return true;
  if (hands == Stream::Hands::kRefused) {
    if (pending.stream.why().code() != Code::kPeerLost) turn_away(pending, pending.stream.why().message());
    return false;
  }
  Challenge challenge{{}, random_nonce()};
  std::memcpy(challenge.magic, kMagic, sizeof kMagic);
  pending.nonce = challenge.nonce;
  return pending.is_challenged =
             send_all(pending.stream, &challenge, sizeof challenge, Deadline::after_s(0)) == Moved::kAll;
}

// Says so here, at most once a second.
void Listener::turn_away(Pending& pending, const std::string& why) {
  ++refused_;
  if (from_.size() < kAddressesTold) from_.insert(name_of_peer(pending.stream.fd(), false));
  if (const uint64_t times = turned_away_.count())
    log_warn("bootstrap: a connection from {} is refused: {} ({} so far)",
             name_of_peer(pending.stream.fd(), true), why, times);
}

std::string Listener::account() const {
  if (refused_ == 0) return "";
  std::string from;
  for (const std::string& one : from_) from += (from.empty() ? "" : ", ") + one;
  return text("; refused {} without the secret, from {}", refused_, from);
}

bool Listener::welcome(Client& client) {
  return answer(client.stream, true, bytes_of(client.welcome));
}

void Listener::refuse(Client& client, const std::string& why) {
  answer(client.stream, false, std::string_view(why).substr(0, kWordsMax));
}

namespace {

// One caller's way in: tries to connect until the deadline.
class Connecting {
 public:
  Connecting(const Caller& caller, Deadline until)
      : caller_(caller), limit_s_(until.left_s()), until_(until), patience_(until) {}

  Result<Stream> run() {
    while (true) {
      WEFT_TRY_ASSIGN(FileDescriptor socket, reach());
      WEFT_TRY_ASSIGN(Stream stream, Stream::open(std::move(socket), Stream::Side::kCaller, caller_.key));
      Status refusal;
      const Moved moved = introduce(stream, refusal);
      if (moved == Moved::kAll && refusal.ok()) return stream;
      if (moved == Moved::kAll) return refusal;
      if (moved == Moved::kTimeout || until_.passed()) return lost("does not answer");
      // Dropped: many want to come in. Or whoever listened is gone.
      patience_ = Deadline::after_s(std::min(until_.left_s(), kGrace_s));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

 private:
  Status lost(std::string_view why) const {
    const double waited_s = until_.passed() ? limit_s_ : limit_s_ - until_.left_s();
    return Status::make(Code::kPeerLost, "rank {}, bootstrap.all_gather, waited {} s for {} ({}{})",
                        caller_.rank, std::round(waited_s * 100) / 100, caller_.listener, why, caller_.hint);
  }

  // A connection to any of the addresses.
  Result<FileDescriptor> reach() {
    while (true) {
      int error = 0;
      for (const SocketAddress& address : caller_.addresses) {
        FileDescriptor socket = dial(address, error);
        if (socket.is_open()) return socket;
      }
      if (!caller_.is_early || patience_.passed() || (has_no_way(error) && report_at_.passed()))
        return lost(std::strerror(error));
      if (!is_reported_ && report_at_.passed()) {
        is_reported_ = true;
        log_warn("rank {} has not reached {} yet ({})", caller_.rank, caller_.listener, std::strerror(error));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  static bool has_no_way(int error) { return error == ENETUNREACH || error == EHOSTUNREACH; }

  FileDescriptor dial(const SocketAddress& address, int& error) const {
    const socklen_t bytes = address.any.sa_family == AF_INET6 ? sizeof address.v6 : sizeof address.v4;
    FileDescriptor socket(::socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    error = socket.is_open() && ::connect(socket.get(), &address.any, bytes) == 0 ? 0 : errno;
    const Deadline soon = Deadline::after_s(std::min(until_.left_s(), kTellAfter_s));
    if (error == EINPROGRESS && await(socket.get(), POLLOUT, caller_.is_early ? soon : until_)) {
      socklen_t error_bytes = sizeof error;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &error_bytes);
    }
    if (error == EINPROGRESS) error = ETIMEDOUT;
    if (error) return {};
    send_at_once(socket.get());
    return socket;
  }

  // One try on a connection; `refusal` is what the listener, or TLS, has against this caller.
  Moved introduce(Stream& stream, Status& refusal) const {
    Stream::Hands hands;
    while ((hands = stream.shake_hands()) == Stream::Hands::kNotYet)
      if (!await(stream.fd(), POLLIN, until_)) return Moved::kTimeout;
    if (hands == Stream::Hands::kRefused) {
      refusal = stream.why();
      return refusal.code() == Code::kPeerLost ? Moved::kGone : Moved::kAll;
    }
    Challenge challenge{};
    if (Moved got = receive_all(stream, &challenge, sizeof challenge, until_); got != Moved::kAll) return got;
    if (std::memcmp(challenge.magic, kMagic, sizeof kMagic) != 0) {
      refusal = Status::invalid("address: something else listens there");
      return Moved::kAll;
    }
    Claim claim{{}, caller_.rank, caller_.size, random_nonce(), {}};
    std::memcpy(claim.magic, kMagic, sizeof kMagic);
    claim.proof = prove_for(caller_.key, "claim", challenge.nonce, claim);
    if (Moved sent = send_all(stream, &claim, sizeof claim, until_); sent != Moved::kAll) return sent;
    Answer head{};
    if (Moved got = receive_all(stream, &head, sizeof head, until_); got != Moved::kAll) return got;
    std::string words(std::min(head.bytes, kWordsMax), '\0');
    if (Moved got = receive_all(stream, words.data(), words.size(), until_); got != Moved::kAll) return got;
    if (!head.is_welcome)  // Whoever listens there chose the words: nothing has been proven.
      refusal = Status(Code::kInvalid, printable(words));
    else if (words != bytes_of(prove_for(caller_.key, "welcome", challenge.nonce, claim)))
      refusal = Status::invalid("secret: the other side does not know it");
    return Moved::kAll;
  }

  const Caller& caller_;
  const double limit_s_;
  const Deadline until_;
  Deadline patience_;
  const Deadline report_at_ = Deadline::after_s(kTellAfter_s);
  bool is_reported_ = false;
};

}  // namespace

Result<Stream> connect_to(const Caller& caller, Deadline until) {
  return Connecting(caller, until).run();
}

}  // namespace weft
