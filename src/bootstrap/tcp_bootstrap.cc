// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/tcp_bootstrap.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/eventfd.h>

#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/owner_process.h"
#include "bootstrap/frame.h"
#include "bootstrap/rendezvous.h"

namespace weft {
namespace {

constexpr double kGraceS = 2;    // a rank waits longer than the rendezvous, so that it hears who is missing
constexpr double kLate_s = 0.2;  // who wakes up so much later than it wanted to was stopped, or had no core
constexpr const char* kMaker =
    "the process that made the id (rank 0's, unless an id of NCCL was made elsewhere)";
constexpr double kFarewell_s = 1;  // for the rendezvous to pass on that a rank leaves

class TcpBootstrap;

// The rendezvous that this process takes part in, for its exit. Never destroyed: ranks may end after everything
// else.
struct OwnRendezvous {
  std::mutex mutex;
  std::set<TcpBootstrap*> all;
};
OwnRendezvous& own_rendezvous() {
  static OnePerProcess<OwnRendezvous> rendezvous;
  return rendezvous.get();
}

// One rank's connection, which a thread of its own listens to.
class TcpBootstrap : public RendezvousBootstrap {
 public:
  // `host`: how messages call the process that serves the rendezvous.
  TcpBootstrap(int rank, int size, Stream stream, std::string host)
      : rank_(rank),
        size_(size),
        host_(std::move(host)),
        stream_(std::move(stream)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        inbox_(kMaxFrameBytes * static_cast<uint64_t>(size)) {
    watch_network(stream_.fd(), silence_);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    thread_ = std::make_unique<std::thread>([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    static const int at_exit = std::atexit([] {
      std::lock_guard lock(own_rendezvous().mutex);
      for (TcpBootstrap* rendezvous : own_rendezvous().all) rendezvous->leave();
    });
    (void)at_exit;
    std::lock_guard lock(own_rendezvous().mutex);
    own_rendezvous().all.insert(this);
  }

  ~TcpBootstrap() override {
    {
      std::lock_guard lock(own_rendezvous().mutex);
      own_rendezvous().all.erase(this);
    }
    if (!is_of_this_process()) {  // neither the rank nor the thread is its own
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
    return all_gather(mine, until, until.left_s());
  }
  // `limit_s`: how long the caller waits in all, some of which may have passed.
  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until, double limit_s) {
    std::unique_lock lock(mutex_);
    if (is_failed_) return Status(Code::kClosed, "bootstrap: used after it had failed");
    Result<std::vector<std::string>> all = exchange(mine, until, limit_s, lock);
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

  Result<std::vector<std::string>> exchange(const std::string& mine, Deadline until, double limit_s,
                                            std::unique_lock<std::mutex>& lock) {
    has_answer_ = false;
    lock.unlock();
    const bool is_sent =
        send({Kind::kGive, rank_, 0, static_cast<uint64_t>(std::max(until.left_s(), 0.0) * 1e3)}, mine);
    lock.lock();
    // What cannot be sent has no answer, but the thread is about to say why.
    const double patience_s = is_sent ? std::min(until.left_s(), kLongestWait_s) + kGraceS : kFarewell_s;
    const auto wait = [&](double most_s) {
      return answered_.wait_for(lock, std::chrono::duration<double>(most_s),
                                [&] { return has_answer_ || is_over_; });
    };
    // A process that was stopped wakes up late: its thread has yet to read the answer, which the rendezvous, where this
    // process serves it, has yet to give.
    const double most_s = std::max(limit_s, 0.0) + kGraceS + kLate_s;
    const bool came =
        wait(patience_s) || ((rank_ == kHost || limit_s - until.left_s() > most_s) && wait(kGraceS));
    const double waited_s = std::round((until.passed() ? limit_s : limit_s - until.left_s()) * 100) / 100;
    if (!has_answer_)
      return Status::make(Code::kPeerLost, "rank {}, bootstrap.all_gather, waited {} s: {} {}", rank_,
                          waited_s, host_, came || !is_sent ? "is gone" : "does not answer");
    if (code_ == Code::kPeerLost)
      return Status::make(Code::kPeerLost, "rank {}, bootstrap.all_gather, waited {} s for {}", rank_,
                          waited_s, answer_);
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
    return send_frame(stream_, frame, bytes);
  }

  // Says that nothing is to be expected of this rank any more, and waits until the others know.
  void leave() {
    if (!is_of_this_process()) return;
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
      pollfd entries[] = {{wake_.get(), POLLIN, 0}, {is_over() ? -1 : stream_.fd(), POLLIN, 0}};
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
    bool has_ended = false;
    {
      std::lock_guard lock(mutex_);
      reports.swap(reports_);
      has_ended = is_over_;
    }
    for (const Report& report : reports)
      if (has_ended || !send({Kind::kLost, report.peer, 0, !report.is_sure}, report.how))
        lose(report.peer, report.how);
  }

  void hear() {
    const int error = inbox_.take(stream_);
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

  // The connection is over: with it the process that made the rendezvous, rank 0 where a communicator did. Who
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
  const std::string host_;
  const Silence silence_;
  Stream stream_;
  FileDescriptor wake_;
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

// What getaddrinfo() found of an address.
Result<std::vector<SocketAddress>> resolve(const std::string& host, uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), text("{}", port).c_str(), &hints, &found);
  if (error)
    return Status::invalid("address: got '{}', allowed: a host that can be resolved ({})", host,
                           gai_strerror(error));
  std::vector<SocketAddress> all;
  for (const addrinfo* one = found; one; one = one->ai_next)
    if (one->ai_addrlen <= sizeof(SocketAddress))
      std::memcpy(&all.emplace_back(), one->ai_addr, one->ai_addrlen);
  freeaddrinfo(found);
  return all;
}

bool is_loopback(const SocketAddress& address) {
  if (address.any.sa_family == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&address.v6.sin6_addr);
  return ntohl(address.v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

class PlaceBootstrap : public AddressBootstrap {
 public:
  explicit PlaceBootstrap(RendezvousAddress place) : place_(std::move(place)) {}

  int rank() const override { return place_.rank; }
  int size() const override { return place_.size; }
  void close() override {
    is_closed_ = true;
    ranks_.reset();
  }

  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) override {
    WEFT_TRY(check_owner());
    if (is_closed_) return Status(Code::kClosed, "bootstrap: used after it was closed or had failed");
    if (place_.size == 1) return std::vector<std::string>{mine};
    Result<std::vector<std::string>> all = ranks_ ? ranks_->all_gather(mine, until) : meet(mine, until);
    if (!all.ok()) close();  // the ranks no longer agree on what comes next
    return all;
  }

 private:
  std::string where() const { return text("{}:{}", place_.host, place_.port); }

  Result<std::vector<std::string>> meet(const std::string& mine, Deadline until) {
    const double limit_s = until.left_s();
    WEFT_TRY(Stream::check(place_.secret));
    WEFT_TRY_ASSIGN(std::vector<SocketAddress> addresses, resolve(place_.host, place_.port));
    if (place_.rank == 0) {
      addresses.resize(1);
      WEFT_TRY(serve(addresses[0]));
    }
    const Caller caller{std::move(addresses),
                        place_.secret,
                        place_.rank,
                        place_.size,
                        text("rank 0 at {}", where()),
                        place_.rank != 0,
                        "; is it the address of rank 0's machine, and is the way to it open?"};
    WEFT_TRY_ASSIGN(Stream stream, connect_to(caller, until));
    ranks_ = std::make_unique<TcpBootstrap>(place_.rank, place_.size, std::move(stream), "rank 0");
    return ranks_->all_gather(mine, until, limit_s);
  }

  Status serve(const SocketAddress& address) {
    FileDescriptor listener = listen_at(address);
    if (!listener.is_open()) return logged(Status::from_errno(errno, "rank 0: cannot listen at {}", where()));
    if (place_.secret.empty() && !is_loopback(address))
      log_warn("rank 0 takes whoever connects to {} for a rank of this job: WEFT_JOB_SECRET is not set",
               where());
    return serve_rendezvous(std::move(listener), place_.secret, place_.size);
  }

  const RendezvousAddress place_;
  std::unique_ptr<TcpBootstrap> ranks_;
  bool is_closed_ = false;
};

}  // namespace

std::shared_ptr<AddressBootstrap> bootstrap_at(RendezvousAddress place) {
  return std::make_shared<PlaceBootstrap>(std::move(place));
}

Result<std::shared_ptr<RendezvousBootstrap>> join_rendezvous(const UniqueId& unique_id, int rank, int size,
                                                             Deadline until) {
  if (!unique_id.is_valid()) return Status::invalid("unique id: got the bytes of something else");
  if (size < 1 || rank < 0 || rank >= size)
    return Status::invalid("rank and size: got {} and {}, allowed: 0 <= rank < size", rank, size);
  socklen_t bytes = 0;
  WEFT_TRY_ASSIGN(Stream stream,
                  connect_to({{address_of(unique_id, bytes)}, key_of(unique_id), rank, size, kMaker}, until));
  return std::shared_ptr<RendezvousBootstrap>(
      std::make_shared<TcpBootstrap>(rank, size, std::move(stream), kMaker));
}

}  // namespace weft
