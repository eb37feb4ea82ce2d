// SPDX-License-Identifier: Apache-2.0
//
// A rail of the verbs provider: one NIC port, with a link per peer. A link outlives its reliable connection: one that
// breaks is made again, and what was not confirmed is repeated (recovery.cc). A connection is made by a handshake of
// datagrams (handshake.cc); what is written, read and sent over it is in rail.cc.
// Threads: one at a time, as every Rail. Two ends find each other by their Place, which address() gives.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/paced_log.h"
#include "base/proof.h"
#include "base/random.h"
#include "providers/verbs/connect.h"
#include "providers/verbs/verbs.h"

namespace weft::provider {

using Clock = std::chrono::steady_clock;
inline constexpr uint32_t kReceives = 512;  // shared by messages and immediates
inline constexpr uint32_t kMessageBytes = 4096;
inline constexpr uint32_t kHandshakes = 64;        // datagram receives, and as many sends
inline constexpr uint32_t kRouteHeaderBytes = 40;  // in front of every datagram
inline constexpr uint32_t kSendDepth = 512;
inline constexpr auto kHandshakePauseFirst = std::chrono::milliseconds(5);  // between handshakes, at first
// wr_id of receives is their buffer's number, and of what is sent, beside that:
inline constexpr uint64_t kHandshakeSent = uint64_t{1} << 32;  // datagrams: plus the buffer
inline constexpr uint64_t kOperation = uint64_t{1} << 33;      // Sent::number

// Where a rail is reached: what address() returns.
struct Place {
  char tag[4] = {'i', 'b', 'v', '3'};
  uint32_t handshake_qpn = 0;  // of its datagram queue pair
  ibv_gid gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;
  uint8_t is_ethernet = 0;
  uint32_t qkey = 0;        // random; its NIC takes no datagram without it
  uint16_t line_port = 0;   // where it takes lifelines; 0: nowhere
  uint8_t reads_taken = 0;  // of a peer at a time, over one connection
  uint8_t unused[5] = {};   // places are compared byte by byte: no gap that nobody wrote
  uint64_t life = 0;        // another process at the same place has another one
  bool same_as(const Place& o) const { return std::memcmp(this, &o, sizeof *this) == 0; }
};
static_assert(sizeof(Place) == 48);

// The datagram of the handshake. It may be lost. It may also be read long after its sender's link has ended. Its proof,
// by the job's secret, is over all other fields and the destination, so strangers cannot make one. A replayed datagram
// joins the link to the same place again.
struct Handshake {
  char tag[4] = {'w', 'g', 'r', '5'};
  uint32_t is_answer = 0;
  Place from;
  uint32_t qpn = 0;
  uint32_t psn = 0;
  uint32_t number = 0;     // of the sender's connection: a later one has a higher number
  uint32_t heard_qpn = 0;  // the sender's queue pair takes what comes from this one; 0: from none yet
  uint32_t above = 0;      // the receiver's connections up to this number are over
  uint32_t received = 0;   // messages and immediates over all earlier connections of the link
  Nonce nonce{};           // of the sender's link,
  Nonce heard_nonce{};     // and of the link that it has heard; an answer without it is of another time
  Proof proof{};
};
static_assert(sizeof(Handshake) == 80 + 2 * sizeof(Nonce) + sizeof(Proof));

// kUp: our queue pair is connected, but theirs may not be yet, so that nothing may be sent. kDraining: the connection is
// over, and what it has received is still being taken in. kBroken: the link is over, for good.
enum class LinkState { kHandshaking, kUp, kConnected, kDraining, kBroken };

inline bool is_joining(LinkState state) {
  return state == LinkState::kHandshaking || state == LinkState::kUp;
}

// What was posted and has not been confirmed.
struct Sent {
  uint64_t number = 0;  // in its link
  int opcode = 0;
  uint32_t imm = 0;  // in network order
  ibv_sge part{};
  uint64_t remote = 0;
  uint32_t rkey = 0;
  uint32_t failures = 0;
  Context* context = nullptr;
  // Whether the peer counts it in Handshake::received.
  bool is_counted() const { return opcode == IBV_WR_SEND || opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }
};

struct Link {
  LinkState state = LinkState::kHandshaking;
  bool is_used = false;  // by the engine, through resolve()
  Place there;
  ibv_qp* qp = nullptr;  // null while draining, at its end
  uint32_t qp_gone = 0;  // ... and this is then its number
  ibv_ah* ah = nullptr;
  uint32_t psn = 0;
  uint32_t number = 0;
  Nonce nonce{};           // the two of them name the link: another link to the same place has others
  Nonce their_nonce{};     // zeros: not heard yet
  uint32_t their_qpn = 0;  // 0: joined to none yet
  uint32_t their_number = 0;
  uint32_t their_over = 0;  // their connections up to this number are over
  std::deque<Sent> sent;    // in order; those of an earlier connection first, which are to be repeated
  size_t posted = 0;        // so many of them, from the first one on, over this connection
  uint64_t next_number = 0;
  uint32_t confirmed = 0;  // of the counted ones, those that have left `sent`
  uint32_t received = 0;   // counted ones of theirs
  std::string why;         // why the connection broke, or could not be made: the first cause
  Lifeline line;
  Clock::time_point drain_from{};
  bool owes_answer = false;  // to their handshake
  bool answers_again = false;
  Clock::time_point next_answer{};
  Clock::time_point made = Clock::now();
  Clock::time_point next_handshake{};
  Clock::duration pause = kHandshakePauseFirst;
  uint32_t qpn() const { return qp ? qp->qp_num : qp_gone; }
};

class VerbsRail : public Rail {
 public:
  VerbsRail(ib::Library library, Nic nic, std::string secret)
      : ib_(std::move(library)), nic_(std::move(nic)), secret_(std::move(secret)) {}

  ~VerbsRail() override;

  Status open(ibv_device* device, const ib::PortChoice& port);

  const Caps& caps() const override { return nic_.caps; }
  const Nic& nic() const override { return nic_; }
  std::string address() const override;

  Result<Route> resolve(std::string_view address) override;

  void forget(Route route) override;

  Result<Registration> enroll(const Range& range, uint32_t access) override;

  void release(Registration& registration) override;

  Posted post_write(const RmaOp& op) override;
  Posted post_read(const RmaOp& op) override { return post_rma(op, IBV_WR_RDMA_READ); }

  Posted post_send(Route to, const void* data, uint64_t bytes, void* lkey, Context* context) override;

  Posted post_recv(void* data, uint64_t bytes, void*, Context* context) override;

  std::string refusal() const override { return refusal_; }
  bool is_route_broken() const override { return is_route_broken_; }

  size_t poll(Event* events, size_t max) override;

 private:
  struct Receive {
    void* data;
    uint64_t bytes;
    Context* context;
  };

  static uint32_t key_of(void* lkey) { return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lkey)); }
  char* handshake_buffer(uint32_t i) {  // the first half is for receiving
    return arena_.get() + size_t{kReceives} * kMessageBytes + i * (kRouteHeaderBytes + sizeof(Handshake));
  }

  Status open_handshake_qp();
  Proof prove_handshake(const Handshake& handshake, const Place& to) const;

  bool start_handshake_qp();

  bool repost(uint32_t i);

  bool repost_handshake(uint32_t i);

  // Device memory by DMA-BUF; null when that does not work, and the caller tries peer memory.
  ibv_mr* enroll_cuda(const Range& range, int flags);

  ibv_ah_attr route_to(const Place& there) const;

  Link* live_link(const Place& there);

  // The live link to a place, made if there is none. Errors: kSystem.
  Result<size_t> link_to(const Place& there);

  Link* link_of(uint32_t qpn);

  void forget_number(uint32_t qpn, const Link& link);

  bool to_init(ibv_qp* qp);

  // Joins a link on whose connection nothing was posted yet to the queue pair of a handshake.
  bool join(Link& link, const Handshake& handshake);

  bool start_over(ibv_qp* qp);

  bool bring_up(Link& link, uint32_t qpn, uint32_t psn);

  // A queue pair for a link, with numbers of its own.
  bool make_queue_pair(Link& link);

  // ---- recovery: what becomes of a connection that breaks
  // Ends a connection, and makes another one once all that came over it has been counted.
  void recover(Link& link, const std::string& why);

  // Draining links whose last word has come get a new queue pair. The completion queue has just been seen empty.
  void renew_drained();

  // After a join: what the peer says that it has received is not repeated. False: that cannot be, and the link is broken.
  bool confirm(Link& link, uint32_t received);

  // Posts what is left of earlier connections; false while there is no room for all of it.
  bool repeat(Link& link);

  void be_connected(Link& link);

  // Ends a link whose process has ended.
  void lose_process(size_t index);

  // Ends a link for good: what is under way on it fails.
  void break_link(Link& link, const std::string& why);

  // The datagram queue pair stops after an error, such as a link that was down.
  void restart_handshakes();

  void take_failure(Link& link, const ibv_wc& wc, Event& event);

  std::string describe(const ibv_wc& failed) const;

  // ---- handshake
  // False when there is no room now.
  bool send_handshake(Link& link, bool is_answer);

  // Datagrams may be lost: answers wait for room, handshakes are repeated until the other side is known to be
  // up, and some answers are given twice, all at irregular times. Links in step would lose the same datagrams
  // again and again on a network that loses them in a pattern.
  void send_handshakes();

  // The handshake of a link that is not connected, when its time has come.
  void ask_again(Link& link, Clock::time_point now);

  // Before the next round, which is a while away as long as no link has.
  static bool has_something_to_do(const Link& link);

  // Half of it to one and a half.
  Clock::duration some_time(Clock::duration usual);

  void on_handshake(const ibv_wc& wc);

  // Null: the handshake is of a link, or for one, that is gone.
  Link* link_for(const Handshake& handshake);

  bool is_over(Link& link, const Handshake& handshake);

  void heed(Link& link, const Handshake& handshake);

  // ---- data
  Posted post_rma(const RmaOp& op, int opcode);

  Posted post(Link& link, Sent sent);

  int post_now(Link& link, Sent& sent);

  bool take(const ibv_wc& wc, Event& event);

  bool take_sent(const ibv_wc& wc, Event& event);

  bool take_receive(const ibv_wc& wc, Event& event);

  void deliver(const std::string& message, Event& event);

  ib::Library ib_;
  Nic nic_;
  const std::string secret_;
  PacedLog refusals_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_qp* handshake_qp_ = nullptr;
  ibv_mr* arena_mr_ = nullptr;
  std::unique_ptr<char[]> arena_;
  ib::PortChoice port_;
  Place place_;
  Listener lifelines_;
  uint8_t reads_out_ = 1;                  // at a time, over one connection
  std::vector<uint32_t> free_handshakes_;  // buffers for sending
  std::minstd_rand random_{static_cast<uint32_t>(random_key())};
  std::deque<Link> links_;
  uint32_t links_made_ = 0;
  std::unordered_map<uint32_t, size_t> by_qp_;
  std::deque<Receive> receives_;
  std::deque<std::string> messages_;
  std::deque<Event> ready_;  // of operations that ended by themselves
  size_t draining_ = 0;      // links
  bool are_links_quiet_ = false;
  Clock::time_point next_round_{};
  bool are_handshakes_stopped_ = false;
  Clock::time_point next_restart_{};
  std::string refusal_;
  bool is_route_broken_ = false;  // what refusal_ says
};

}  // namespace weft::provider
