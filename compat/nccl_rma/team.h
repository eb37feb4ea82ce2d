// SPDX-License-Identifier: Apache-2.0
//
// A Team is the ranks of one NCCL communicator that reach each other over one NIC: what NCCL calls collComm.
//   WEFT_TRY_ASSIGN(std::shared_ptr<Team> team, Team::connect(nic, unique_id, rank, ranks));      // every rank
//   WEFT_TRY_ASSIGN(uint32_t region, team->enroll(data, bytes, kPointerHost, 0));              // every rank, in one order
//   WEFT_TRY_ASSIGN(uint32_t context, team->create_context(channels, 1));
//   WEFT_TRY_ASSIGN(uint64_t request, team->put(context, {.channel = 0, .rank = 1, .src = region, ...}));
//   WEFT_TRY_ASSIGN(bool done, team->test(request));          // true: the request is gone
// Order: puts and signals of one channel to one rank happen there in the order of the calls, so every signal is a
// strong one. A request is done when its rank has taken it: the bytes are there and the signal is added.
// Threads: every method from any thread; connect() and enroll() wait for the other ranks, and no other method is held
// up by that. The caller of test() or progress() does the work; otherwise a thread of the team does it every
// millisecond.
// Errors: what a call is refused for is its own Status. A rank that is lost fails what goes to it, and status() says so.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "bootstrap/tcp_bootstrap.h"
#include "compat/nccl_rma/stream.h"
#include "transports/proxy/network.h"

namespace weft::nccl_rma {

constexpr uint32_t kNoRegion = UINT32_MAX;

// A put, a signal, or both. Offsets and bytes in bytes.
struct Get {
  uint32_t channel = 0;
  uint32_t rank = 0;  // the peer: whose memory is read, or, of a put, written
  uint32_t src = kNoRegion;
  uint64_t src_offset = 0;
  uint64_t bytes = 0;
  uint32_t dst = kNoRegion;
  uint64_t dst_offset = 0;
};
struct Put : Get {
  uint32_t signal = kNoRegion;
  uint64_t signal_offset = 0;
  uint64_t value = 0;  // that is added to the signal
};

class Team {
 public:
  // `unique_id` is that of rank 0's rendezvous. Errors: kPeerLost when ranks stay away, kInvalid when they use another
  // network or version.
  static Result<std::shared_ptr<Team>> connect(const proxy::Network& network, const provider::Nic& nic,
                                               const UniqueId& unique_id, int rank, int ranks);
  ~Team() { close(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  Result<uint32_t> enroll(void* data, uint64_t bytes, int pointer_kind, uint64_t flags);
  // Peers let go of it first. Not collective.
  Status withdraw(uint32_t region);

  // `stride`: only ranks at multiples of it are put to.
  Result<uint32_t> create_context(int channels, int stride);
  // Waits until what was asked of it has been taken, 5 s at most; the rest is dropped.
  Status destroy_context(uint32_t context);

  Result<uint64_t> put(uint32_t context, const Put& put);
  Result<uint64_t> get(uint32_t context, const Get& get);
  Result<uint64_t> done_already(uint32_t context);  // a request of something that needs no work
  Result<bool> test(uint64_t request);
  // One round of sending and receiving. Returns status().
  Status progress();
  // Not ok once a rank was lost, or said what cannot be: the first such failure.
  Status status();

  // Waits until what was asked for has been taken, 5 s at most, and leaves; later calls are kClosed. Idempotent.
  void close();

  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(links_.size()); }

 private:
  struct Link {
    std::shared_ptr<transfer::Peer> peer;  // null: this rank
    Status status;
    std::vector<std::unique_ptr<Outgoing>> out;
    std::vector<Outgoing*> spare;
    std::unordered_map<uint32_t, std::unique_ptr<Incoming>> in;
  };
  struct Context {
    int channels, stride;
    std::vector<Outgoing*> streams;  // by channel and rank; null: not used yet
  };
  struct Serving {                                 // of a get
    std::shared_ptr<transfer::Transfer> transfer;  // null: refused
    uint64_t request;
    int rank;
  };
  using Lock = std::unique_lock<std::mutex>;

  Team(int rank, int ranks, std::unique_ptr<transfer::Engine> engine,
       std::shared_ptr<RendezvousBootstrap> rendezvous);
  Status meet(const std::string& introduction);
  Result<std::vector<std::string>> exchange(const char* what, const Result<std::string>& mine);
  Status open_slots(const Region& region, int peer, const std::shared_ptr<transfer::Remote>& remote,
                    Deadline until);
  Status attach(Region& region, const std::vector<std::string>& descriptors);
  void run();
  static Status closed();

  // Under the mutex:
  bool turn();
  void take(const std::shared_ptr<transfer::Peer>& from, std::string_view bytes);
  Status read(int rank, std::string_view bytes);
  Status carry_out(int rank, std::string_view units);
  Status serve(int rank, const Unit& unit, const GetTail& tail);
  bool advance(int rank);
  void tell_credits(int rank);
  bool answer_gets();
  void check(int rank);
  void lose(int rank, const Status& why);
  Result<std::shared_ptr<Region>> region(const char* argument, uint32_t number) const;
  Status check_range(const char* argument, const Region& region, int rank, uint64_t offset,
                     uint64_t bytes) const;
  Result<Context*> context(uint32_t number, uint32_t channel, uint32_t rank);
  Outgoing& stream(Context& context, uint32_t channel, uint32_t rank);
  Status put_here(const Put& put, const std::shared_ptr<Region>& src, const std::shared_ptr<Region>& dst,
                  const std::shared_ptr<Region>& signal);
  bool is_idle(const Context& context) const;
  void drain(Lock& lock, const std::function<bool()>& is_done);

  const int rank_;
  const double timeout_s_;
  std::unique_ptr<transfer::Engine> engine_;
  std::shared_ptr<RendezvousBootstrap> rendezvous_;
  std::mutex collective_;  // calls that all ranks make: one at a time
  std::mutex mutex_;
  std::unique_ptr<Mail> mail_;
  Requests requests_;
  std::unique_ptr<Ways> ways_;
  Placer placer_;
  std::vector<Link> links_;  // by rank
  std::unordered_map<const transfer::Peer*, int> rank_of_;
  std::set<int>
      slots_open_;  // under collective_: peers whose slots for staged writes are made, here and there
  std::unordered_map<uint32_t, std::shared_ptr<Region>> regions_;
  uint32_t regions_made_ = 0;
  std::map<uint32_t, Context> contexts_;
  uint32_t contexts_made_ = 0;
  std::deque<Serving> serving_;
  std::unordered_map<uint64_t, std::pair<int, Deadline>> gets_;  // that wait for an answer, by request
  Status status_;
  uint32_t tests_ = 0, turns_ = 0;
  bool has_mail_ = false;  // in this turn
  bool is_closed_ = false;
  std::atomic<uint64_t> turns_seen_{0};
  std::atomic<bool> stops_{false};
  std::thread worker_;
};

}  // namespace weft::nccl_rma
