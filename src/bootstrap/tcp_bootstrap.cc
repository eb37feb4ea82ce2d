// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/tcp_bootstrap.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/log.h"
#include "base/random.h"
#include "bootstrap/door.h"
#include "bootstrap/interface.h"

namespace weft {
namespace {

constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'm', 'e', 'e', 't'};
constexpr uint64_t kMaxFrameBytes = 16 << 20;
constexpr double kIdleS = 3600;     // a meeting that nobody comes to ends then
constexpr double kGraceS = 2;       // a rank waits longer than the meeting, so that it hears who is missing
constexpr double kSoon_s = 10;      // for the kernel to take what is sent
constexpr double kAccount_s = 0.2;  // for a better account of a rank that is gone: how it was killed
constexpr double kFarewell_s = 1;   // for the meeting to pass on that a rank leaves

enum class Kind : uint32_t {
  kGive = 1,  // to the meeting: bytes for everybody; number: milliseconds that the sender will wait
  kAnswer,    // from it: number is a Code; everybody's bytes, each with its length before it, or words
  kLost,      // `rank` is lost: words say how; number: 1 where that may be known better elsewhere
  kLeave,     // `rank` leaves; the meeting answers the same when it has told the others
  kBeat,      // nothing: so that a network that is gone is noticed
};
struct Frame {
  Kind kind = Kind::kBeat;
  int32_t rank = -1;
  uint64_t bytes = 0;
  uint64_t number = 0;
};
static_assert(sizeof(Frame) == 24);

bool send_frame(int socket, Frame frame, std::string_view bytes) {
  frame.bytes = bytes.size();
  std::string all(reinterpret_cast<const char*>(&frame), sizeof frame);
  all += bytes;
  return send_all(socket, all.data(), all.size(), Deadline::after_s(kSoon_s)) == Moved::kAll;
}

// Puts together the frames that come on a socket, without waiting for any.
class Inbox {
 public:
  explicit Inbox(uint64_t bytes_max) : bytes_max_(bytes_max) {}

  // Takes what is there; 0, or the error that ended the connection, ENOTCONN where the other side closed it.
  int take(int socket) {
    char some[16384];
    while (true) {
      const ssize_t got = ::recv(socket, some, sizeof some, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno == EAGAIN ? 0 : errno;
      if (got == 0) return ENOTCONN;
      bytes_.append(some, static_cast<size_t>(got));
      if (!is_sound()) return EPROTO;
    }
  }
  // The next whole frame.
  bool next(Frame& frame, std::string& bytes) {
    if (bytes_.size() < sizeof frame) return false;
    std::memcpy(static_cast<void*>(&frame), bytes_.data(), sizeof frame);
    if (bytes_.size() - sizeof frame < frame.bytes) return false;
    bytes = bytes_.substr(sizeof frame, frame.bytes);
    bytes_.erase(0, sizeof frame + frame.bytes);
    return true;
  }

 private:
  bool is_sound() const {
    Frame frame;
    if (bytes_.size() < sizeof frame) return true;
    std::memcpy(static_cast<void*>(&frame), bytes_.data(), sizeof frame);
    return frame.kind >= Kind::kGive && frame.kind <= Kind::kBeat && frame.bytes <= bytes_max_;
  }

  const uint64_t bytes_max_;
  std::string bytes_;
};

// The settings of silence, as they were when a thread was started.
struct Silence {
  double heartbeat_s = config().heartbeat_s;
  double peer_dead_s = config().peer_dead_s;
};

// A peer whose host does not even acknowledge heartbeats is gone; one that is only stopped is not, as its
// kernel does.
void watch_network(int socket, const Silence& silence) {
  const auto limit_ms = static_cast<unsigned>(silence.peer_dead_s * 1e3);
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
}

std::string how_it_ended(int error, const Silence& silence) {
  const bool is_silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return is_silent ? text("has not been heard of for {} s", silence.peer_dead_s) : "closed its connection";
}

std::string key_of(const MeetingTicket& ticket) {
  return std::string(reinterpret_cast<const char*>(ticket.key), sizeof ticket.key) + config().job_secret;
}

SocketAddress address_of(const MeetingTicket& ticket, socklen_t& bytes) {
  SocketAddress address{};
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

// The thread that passes everything on. It owns itself: whoever opened the meeting may be gone first.
class Meeting {
 public:
  Meeting(FileDescriptor listener, const MeetingTicket& ticket)
      : door_(std::move(listener), key_of(ticket)) {}

  void run() {
    Deadline idle = Deadline::after_s(kIdleS);
    Deadline beat = Deadline::after_s(silence_.heartbeat_s);
    while (true) {
      std::vector<pollfd> entries;
      door_.add_to(entries);
      const size_t first_peer = entries.size();
      for (const auto& [rank, peer] : peers_) entries.push_back({peer.socket.get(), POLLIN, 0});
      if ((!door_.is_open() && peers_.empty()) || (peers_.empty() && idle.passed())) return;
      ::poll(entries.data(), entries.size(), suspects_.empty() ? 200 : 20);
      for (size_t i = first_peer; i < entries.size(); ++i)
        if (entries[i].revents) hear(entries[i].fd);
      for (Guest& guest : door_.serve()) admit(std::move(guest));
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
    FileDescriptor socket;
    Inbox inbox{kMaxFrameBytes};
    bool has_given = false;
    std::string given;
  };
  struct Suspect {
    Deadline until;
    std::string how;
  };

  // Who has come in is a rank of this meeting, but perhaps not one that is missing.
  void admit(Guest guest) {
    if (size_ == 0) size_ = guest.size;
    if (lost_.contains(guest.rank))
      return Door::refuse(
          guest, text("rank {}: the others go on without it, because it {}", guest.rank, lost_[guest.rank]));
    if (guest.size != size_ || guest.rank < 0 || guest.rank >= size_ || peers_.contains(guest.rank))
      return Door::refuse(guest, text("rank and size: got {} of {}, allowed: each rank once, of {}",
                                      guest.rank, guest.size, size_));
    if (!Door::welcome(guest)) return;
    watch_network(guest.socket.get(), silence_);
    peers_[guest.rank].socket = std::move(guest.socket);
    if (static_cast<int>(peers_.size()) < size_) return;
    had_everybody_ = true;
    door_.close();
  }

  void hear(int fd) {
    const auto found =
        std::find_if(peers_.begin(), peers_.end(), [&](auto& p) { return p.second.socket.get() == fd; });
    if (found == peers_.end()) return;
    const int rank = found->first;
    int error = found->second.inbox.take(fd);
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
    return names;
  }

  void answer_all(Code code, const std::string& bytes) {
    for (auto& [rank, peer] : peers_) {
      if (!peer.has_given) continue;
      send_frame(peer.socket.get(), {Kind::kAnswer, -1, 0, static_cast<uint64_t>(code)}, bytes);
      peer.has_given = false;
      peer.given.clear();
    }
    is_waiting_ = false;
  }

  void tell_all(const Frame& frame, const std::string& bytes) {
    for (auto& [rank, peer] : peers_) send_frame(peer.socket.get(), frame, bytes);
  }

  const Silence silence_;
  Door door_;
  int size_ = 0;
  std::map<int, Peer> peers_;
  std::map<int, std::string> lost_;  // and how
  std::map<int, Suspect> suspects_;
  std::set<int> left_;
  bool had_everybody_ = false;
  bool is_waiting_ = false;
  Deadline patience_ = Deadline::after_s(0);
};

class TcpBootstrap;

// The meetings that this process takes part in, for its exit. Never destroyed: ranks may end after everything
// else.
struct OwnMeetings {
  std::mutex mutex;
  std::set<TcpBootstrap*> all;
};
OwnMeetings& own_meetings() {
  static auto* meetings = new OwnMeetings;
  return *meetings;
}

// One rank's connection, which a thread of its own listens to.
class TcpBootstrap : public MeetingBootstrap {
 public:
  TcpBootstrap(int rank, int size, FileDescriptor socket)
      : rank_(rank),
        size_(size),
        owner_(getpid()),
        socket_(std::move(socket)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        inbox_(kMaxFrameBytes * static_cast<uint64_t>(size)) {
    watch_network(socket_.get(), silence_);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    thread_ = std::make_unique<std::thread>([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    static const int at_exit = std::atexit([] {
      std::lock_guard lock(own_meetings().mutex);
      for (TcpBootstrap* meeting : own_meetings().all) meeting->leave();
    });
    (void)at_exit;
    std::lock_guard lock(own_meetings().mutex);
    own_meetings().all.insert(this);
  }

  ~TcpBootstrap() override {
    {
      std::lock_guard lock(own_meetings().mutex);
      own_meetings().all.erase(this);
    }
    if (owner_ != getpid()) {  // a forked child: neither the rank nor the thread is its own
      (void)thread_.release();
      return;
    }
    leave();
    {
      std::lock_guard lock(mutex_);
      stops_ = true;
    }
    wake();
    thread_->join();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) override {
    std::unique_lock lock(mutex_);
    if (is_failed_) return Status(Code::kClosed, "bootstrap: used after it had failed");
    Result<std::vector<std::string>> all = exchange(mine, until, lock);
    is_failed_ = !all.ok();  // the ranks no longer agree on what comes next
    return all;
  }

  void on_lost(std::function<void(int, const std::string&)> tell) override {
    std::lock_guard telling(telling_);
    tell_ = std::move(tell);
    std::vector<std::pair<int, std::string>> before;
    {
      std::lock_guard lock(mutex_);
      before = lost_;
    }
    for (const auto& [peer, how] : before)
      if (tell_) tell_(peer, how);
  }

  void report(int peer, const std::string& how, bool is_sure) override {
    {
      std::lock_guard lock(mutex_);
      reports_.push_back({peer, how, is_sure});
    }
    wake();
  }

 private:
  struct Report {
    int peer;
    std::string how;
    bool is_sure;
  };

  Result<std::vector<std::string>> exchange(const std::string& mine, Deadline until,
                                            std::unique_lock<std::mutex>& lock) {
    const double limit_s = until.left_s();
    has_answer_ = false;
    lock.unlock();
    const bool is_sent =
        send({Kind::kGive, rank_, 0, static_cast<uint64_t>(std::max(limit_s, 0.0) * 1e3)}, mine);
    lock.lock();
    // What cannot be sent has no answer, but the thread is about to say why.
    const double patience_s = is_sent ? std::min(limit_s, kLongestWait_s) + kGraceS : kFarewell_s;
    const bool came = answered_.wait_for(lock, std::chrono::duration<double>(patience_s),
                                         [&] { return has_answer_ || is_over_; });
    if (!has_answer_)
      return Status::make(
          Code::kPeerLost,
          "rank {}, bootstrap.all_gather, waited {} s: the process that made the id (rank 0's, "
          "unless an id of NCCL was made elsewhere) {}",
          rank_, limit_s, came || !is_sent ? "is gone" : "does not answer");
    if (code_ == Code::kPeerLost)
      return Status::make(Code::kPeerLost, "rank {}, bootstrap.all_gather, waited {} s for {}", rank_,
                          limit_s, answer_);
    if (code_ != Code::kOk) return Status(Code::kInvalid, answer_);
    return split(answer_);
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

  bool send(const Frame& frame, std::string_view bytes) {
    std::lock_guard lock(sending_);
    return send_frame(socket_.get(), frame, bytes);
  }

  // Says that nothing is to be expected of this rank any more, and waits until the others know.
  void leave() {
    if (owner_ != getpid()) return;
    std::unique_lock lock(mutex_);
    if (is_over_ || std::exchange(is_leaving_, true)) return;
    lock.unlock();
    if (!send({Kind::kLeave, rank_, 0, 0}, "")) return;
    lock.lock();
    answered_.wait_for(lock, std::chrono::duration<double>(kFarewell_s), [&] { return is_over_; });
  }

  void wake() const {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);
  }

  void run() {
    const int beat_ms = std::max(1, static_cast<int>(silence_.heartbeat_s * 1e3));
    while (true) {
      pollfd entries[] = {{wake_.get(), POLLIN, 0}, {is_over() ? -1 : socket_.get(), POLLIN, 0}};
      const int ready = ::poll(entries, 2, beat_ms);
      uint64_t count = 0;
      if (entries[0].revents) (void)!read(wake_.get(), &count, sizeof count);
      if (is_stopped()) return;
      send_reports();
      if (entries[1].revents) hear();
      if (ready == 0 && !is_over()) send({Kind::kBeat, rank_, 0, 0}, "");
    }
  }

  bool is_stopped() {
    std::lock_guard lock(mutex_);
    return stops_;
  }
  bool is_over() {
    std::lock_guard lock(mutex_);
    return is_over_;
  }

  void send_reports() {
    std::vector<Report> reports;
    bool is_alone = false;
    {
      std::lock_guard lock(mutex_);
      reports.swap(reports_);
      is_alone = is_over_;
    }
    for (const Report& report : reports)
      if (is_alone || !send({Kind::kLost, report.peer, 0, !report.is_sure}, report.how))
        lose(report.peer, report.how);
  }

  void hear() {
    const int error = inbox_.take(socket_.get());
    Frame frame;
    std::string bytes;
    while (inbox_.next(frame, bytes)) take(frame, bytes);
    if (error) end(error);
  }

  void take(const Frame& frame, std::string& bytes) {
    if (frame.kind == Kind::kLost && frame.rank >= 0 && frame.rank < size_) return lose(frame.rank, bytes);
    std::lock_guard lock(mutex_);
    if (frame.kind == Kind::kLeave && frame.rank == kHost) host_has_left_ = true;
    if (frame.kind == Kind::kLeave && frame.rank == rank_) is_over_ = true;
    if (frame.kind == Kind::kAnswer) {
      code_ = static_cast<Code>(frame.number);
      answer_ = std::move(bytes);
      has_answer_ = true;
    }
    answered_.notify_all();
  }

  // The connection is over: with it the process that made the meeting, rank 0 where a communicator did. Who
  // waits for an answer hears of it after on_lost() has; and who shares its host may know more by then.
  void end(int error) {
    bool is_expected = false;
    {
      std::lock_guard lock(mutex_);
      is_expected = host_has_left_ || is_leaving_ || rank_ == kHost;
    }
    if (!is_expected) {
      std::this_thread::sleep_for(std::chrono::duration<double>(kAccount_s));
      lose(kHost, how_it_ended(error, silence_));
    }
    std::lock_guard lock(mutex_);
    is_over_ = true;
    answered_.notify_all();
  }

  void lose(int peer, const std::string& how) {
    {
      std::lock_guard lock(mutex_);
      lost_.emplace_back(peer, how);
    }
    std::lock_guard telling(telling_);
    if (tell_) tell_(peer, how);
  }

  static constexpr int kHost = 0;
  const int rank_, size_;
  const pid_t owner_;
  const Silence silence_;
  FileDescriptor socket_, wake_;
  Inbox inbox_;  // of the thread
  std::mutex sending_, telling_, mutex_;
  std::condition_variable answered_;
  bool has_answer_ = false, is_failed_ = false, is_over_ = false, is_leaving_ = false, stops_ = false;
  bool host_has_left_ = false;
  Code code_ = Code::kOk;
  std::string answer_;
  std::vector<Report> reports_;
  std::vector<std::pair<int, std::string>> lost_;
  std::function<void(int, const std::string&)> tell_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace

bool MeetingTicket::is_valid() const {
  return std::memcmp(magic, kMagic, sizeof kMagic) == 0;
}

Result<MeetingTicket> open_meeting(const std::string& interface) {
  WEFT_TRY_ASSIGN(const Interface at, choose_interface(interface));
  log_info("a meeting of ranks on {} ({}): {}", at.name, at.address, at.why);
  MeetingTicket ticket{};
  std::memcpy(ticket.magic, kMagic, sizeof kMagic);
  ticket.is_ipv6 = at.is_ipv6;
  std::memcpy(ticket.address, at.bytes, sizeof ticket.address);
  ticket.key[0] = random_key();
  ticket.key[1] = random_key();
  socklen_t bytes = 0;
  SocketAddress address = address_of(ticket, bytes);
  FileDescriptor listener(::socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.is_open() || ::bind(listener.get(), &address.any, bytes) != 0 ||
      ::listen(listener.get(), 1024) != 0 || ::getsockname(listener.get(), &address.any, &bytes) != 0)
    return logged(Status::from_errno(errno, "open a meeting"));
  ticket.port = ntohs(ticket.is_ipv6 ? address.v6.sin6_port : address.v4.sin_port);
  auto meeting = std::make_shared<Meeting>(std::move(listener), ticket);
  std::thread([meeting] { meeting->run(); }).detach();
  return ticket;
}

Result<std::shared_ptr<MeetingBootstrap>> join_meeting(const MeetingTicket& ticket, int rank, int size,
                                                       Deadline until) {
  if (!ticket.is_valid()) return Status::invalid("ticket: got the bytes of something else");
  if (size < 1 || rank < 0 || rank >= size)
    return Status::invalid("rank and size: got {} and {}, allowed: 0 <= rank < size", rank, size);
  socklen_t bytes = 0;
  WEFT_TRY_ASSIGN(FileDescriptor socket, knock(address_of(ticket, bytes), key_of(ticket), rank, size, until));
  return std::shared_ptr<MeetingBootstrap>(std::make_shared<TcpBootstrap>(rank, size, std::move(socket)));
}

}  // namespace weft
