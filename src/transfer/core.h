// SPDX-License-Identifier: Apache-2.0
//
// The inside of an Engine. Every member that is not atomic is touched only by the holder of the progress
// token.
//
//   user thread: submit(transfer) -> list of submissions -> takes the token if it is free -> progress_held()
//   worker:      takes the token if it is free -> progress_held()
//   progress_held(): start what was submitted, poll every rail, post what fits, tick once in a while
//
// Files: core.cc (token, worker, events, clock), operations.cc (from submission to the end), peers.cc
// (connections), messages.cc, memory.cc, immediates.cc, staging.cc (packed writes through slots of the peer).
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/paced_log.h"
#include "transfer/callbacks.h"
#include "transfer/engine.h"
#include "transfer/handles.h"
#include "transfer/wire.h"

namespace weft::transfer {

using provider::Context;
using provider::Event;
using provider::EventKind;
using provider::Posted;
using provider::Rail;
using Clock = Deadline::Clock;

// The right to touch the engine's state. Not fair, which does no harm: every waiting thread polls anyway.
class Token {
 public:
  bool try_take() {
    return !held_.load(std::memory_order_relaxed) && !held_.exchange(true, std::memory_order_acquire);
  }
  void take() {
    for (unsigned polls = 0; !try_take(); ++polls) back_off(polls);
  }
  void give() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

class HoldToken {
 public:
  explicit HoldToken(Token& token) : token_(token) { token_.take(); }
  ~HoldToken() { token_.give(); }
  HoldToken(const HoldToken&) = delete;
  HoldToken& operator=(const HoldToken&) = delete;

 private:
  Token& token_;
};

// Something the network holds: its address is the context of the operation.
struct Flight : Context {
  enum class Use : uint8_t { kFree, kPiece, kNotice, kShortSend, kMessage, kReceive, kPack, kGathered };
  Use use = Use::kFree;
  bool is_orphan = false;  // given up; if it comes back, only its slot is of interest
  uint32_t rail = 0;
  uint32_t slot = 0;             // kPack: staging slot
  uint32_t carries = 1;          // kGathered: so many transfers
  uint64_t moved_bytes = 0;      // kPiece: of the transfer,
  uint32_t moved_pieces = 0;     // and how many of its pieces
  Transfer* transfer = nullptr;  // kPiece, kNotice, kShortSend, kPack; kGathered: the first of a list
  Peer* peer = nullptr;          // all but kReceive
  char* buffer = nullptr;        // kMessage, kShortSend, kReceive
  uint32_t bytes = 0;            // kMessage, kShortSend: in the buffer
  Flight* next_free = nullptr;
  bool carries_message() const { return use == Use::kMessage || use == Use::kShortSend; }
};

constexpr uint32_t kFlightBlock = 256;

struct RailState {
  std::unique_ptr<Rail> rail;
  uint32_t in_flight = 0;
  uint32_t in_flight_max = 0;
  std::string address;
  provider::Registration inbox;
  provider::Registration arena;
  bool has_tokens = false;    // in its immediates
  bool names_source = false;  // of immediates
};

class Core {
 public:
  explicit Core(Options options);
  ~Core();
  Status open();
  void close();

  Token token;
  Options options;
  EngineId id;
  const uint64_t serial;  // of this engine in this process; its handles carry it
  std::string name;
  Callbacks callbacks;

  // ---- core.cc
  bool is_closed() const { return closed_.load(std::memory_order_acquire); }
  Status closed_status() const;
  void submit(std::shared_ptr<Transfer> transfer);
  // Progress by the caller if the token is free; whether anything came of it.
  bool progress();
  // Polls `ready` with progress until it is true or `until` has passed.
  template <class Ready>
  bool wait(Deadline until, Ready ready) {
    if (ready()) return true;
    waiters_.fetch_add(1, std::memory_order_relaxed);
    const bool came = wait_until(until, ready, [this] { return progress(); });
    waiters_.fetch_sub(1, std::memory_order_relaxed);
    return came;
  }
  std::string address_bytes() const;
  std::string dump();
  uint32_t rail_count() const { return static_cast<uint32_t>(rails.size()); }
  bool can_write_imm() const { return write_imm_; }
  uint64_t write_bytes_max() const { return write_bytes_max_; }
  bool wants_staging(const Memory& memory, const Remote& remote, size_t pieces, uint64_t bytes) const;
  std::atomic<uint32_t> next_rail{0};
  // The counters of one kind of transfers.
  TallyOperation& counted(OpKind kind) const { return *counted_[static_cast<size_t>(kind)]; }
  void count(const Transfer& transfer, bool is_done);

  std::vector<RailState> rails;

  // ---- operations.cc (under the token, but for cancel)
  Phase cancel(const std::shared_ptr<Transfer>& transfer);
  void finish(Transfer& transfer, Phase phase, Status status);
  void on_done(Transfer& transfer, std::function<void(const Status&)> callback);

  // ---- peers.cc, memory.cc, immediates.cc
  Result<std::shared_ptr<Peer>> connect(std::string_view address, Deadline until);
  Result<std::shared_ptr<Remote>> attach(std::string_view descriptor, Deadline until);
  void disconnect(const std::shared_ptr<Peer>& peer);
  void lose(const std::shared_ptr<Peer>& peer, Status why);
  std::vector<std::shared_ptr<Peer>> connected_peers();
  Result<std::shared_ptr<Memory>> enroll(const provider::Range& range, uint32_t access);
  Status unregister(const std::shared_ptr<Memory>& memory, Deadline until);
  Descriptor describe(const Memory& memory) const;
  Result<TemporaryKeys> keys(const Memory& memory) const;
  Result<std::shared_ptr<Remote>> adopt(const std::shared_ptr<Peer>& peer, const TemporaryKeys& keys) const;
  Result<std::shared_ptr<ImmCounter>> imm_counter(const std::shared_ptr<Peer>& peer, uint32_t key);
  Status on_imm(const std::shared_ptr<ImmCounter>& counter, uint64_t at_least,
                std::function<void(const Status&)> callback);
  uint64_t next_barrier_round(const std::shared_ptr<Peer>& peer, uint32_t id);
  // Refuses handles that another engine made: their insides are not ours to touch.
  Status check_own(const char* argument, uint64_t maker) const;

 private:
  friend class Staging;

  struct Region {
    std::shared_ptr<Memory> memory;
    std::unordered_set<Peer*> users;  // peers that attached it
    std::shared_ptr<std::atomic<uint32_t>> users_left = std::make_shared<std::atomic<uint32_t>>(0);
  };
  struct PendingAttach {
    std::shared_ptr<Peer> peer;
    std::shared_ptr<Remote> remote;
    uint64_t region = 0;
    Secret secret{};
    Status status;
    std::atomic<bool> is_answered{false};
  };
  struct OutMessage {
    Peer* peer;
    std::string bytes;
    Transfer* transfer;  // completes with the message; null for the engine's own
    uint32_t rail;       // kAnyRail: the first whose path is up
  };
  struct Arrived {  // a message that no recv() waits for yet
    std::shared_ptr<Peer> peer;
    std::string payload;
    bool is_offer = false;
    Offer offer;
  };

  // core.cc
  bool progress_held();
  void run_worker();
  void start_submitted();
  bool poll_rails();
  void on_event(RailState& rail, Event& event);
  void on_flight_end(RailState& rail, Flight& flight, Event& event);
  static void note_revoked(const Transfer& transfer);
  bool was_asked_back(const Flight& flight) const;
  void on_part_end(RailState& rail, const Flight& ended, Transfer* transfer, const Event& event);
  void on_imm_event(const RailState& rail, const Event& event);
  bool is_of(const Peer& peer, const RailState& rail, const Event& event) const;
  uint64_t imm_to(const Peer& peer, uint32_t rail, ImmClass kind, uint32_t imm) const;
  void tick(Clock::time_point now);
  static bool is_temporary(const Transfer& transfer, const Transfer::Piece& piece);
  Flight* take_flight(Flight::Use use, uint32_t rail, Peer* peer, Transfer* transfer);
  void free_flight(Flight* flight);
  void orphan(Flight& flight);
  void count_out(const Flight& flight, bool has_left);
  void post_receive(Flight& flight);
  void post_receives_again();

  // operations.cc
  void start(std::shared_ptr<Transfer> transfer);
  Status check_start(const Transfer& transfer) const;
  void list_active(Transfer& transfer);
  void unlist_active(Transfer& transfer);
  void pump();
  static constexpr uint32_t kPiecesPerTurn = 32;  // of one transfer, before others get theirs
  // Where a post copies: the bytes that all transfers together may copy before the token is free again. This also
  // bounds the submitting call.
  static constexpr uint64_t kCopiedPerTurn = 4 << 20;
  bool has_copied_enough() const { return copied_ >= kCopiedPerTurn; }
  void note_moved(Transfer& transfer, uint64_t bytes, size_t pieces);
  bool post_pieces(Transfer& transfer, uint32_t quota);
  Posted book(Flight* flight, Posted posted);
  void count_at_once(Peer::Path& path);
  Posted post_piece(Transfer& transfer, const Transfer::Piece& piece);
  Posted post_page_run(Transfer& transfer, uint32_t run);
  uint32_t page_run(const Transfer& transfer) const;
  Posted post_notice(Transfer& transfer, uint32_t target);
  bool can_gather(const Transfer& transfer) const;
  bool is_path_busy(const Transfer& transfer) const;
  size_t count_gathered(size_t limit) const;
  size_t post_gathered(size_t limit);
  provider::Piece wire_piece(const Transfer& transfer, const Transfer::Piece& piece, uint32_t rail) const;
  void start_send(Transfer& transfer);
  void start_recv(std::shared_ptr<Transfer> transfer);
  void match(Transfer& receive, Arrived arrived);
  void read_offer(Transfer& receive, Peer& peer, const Offer& offer);
  void release_offer(Transfer& transfer);
  void fail(Transfer& transfer, Status status);
  void settle(Transfer& transfer);
  void leave_flight(Flight& flight, Transfer& transfer);
  void orphan_flights_of(Transfer& transfer);
  void wait_for_turn(Transfer& transfer);
  void check_deadlines(Clock::time_point now);
  bool involves(const Transfer& transfer, const Peer& peer) const;
  Peer& peer_of(const Transfer& transfer, uint32_t target) const;
  bool has_room(uint32_t rail) const;
  // `rail`, or the next one whose path to the peer is up.
  uint32_t rail_to(const Peer& peer, uint32_t rail) const;
  bool has_other_path(const Peer& peer, uint32_t rail) const;
  bool leave_broken_path(Peer& peer, uint32_t rail);
  std::string describe_progress(const Transfer& transfer) const;
  std::string describe_peer(const Transfer& transfer) const;
  void begin_use(Transfer& transfer);
  void end_use(Transfer& transfer);

  // peers.cc, messages.cc, memory.cc, immediates.cc
  std::shared_ptr<Peer> find_peer(const EngineId& engine) const;
  Result<std::shared_ptr<Peer>> make_peer(const Address& address);
  Status route_to(Peer& peer);
  void send_message(Peer& peer, MessageType type, std::string_view body, Transfer* transfer = nullptr,
                    uint32_t rail = kAnyRail);
  void drop_waiting(const Peer& peer, MessageType type, uint32_t rail);
  void send_handshake(Peer& peer, MessageType type);
  void flush_messages();
  bool post_message(OutMessage& message, uint32_t number);
  void on_message(std::string_view bytes);
  void on_ordered(Peer& peer, const MessageHead& head, std::string_view message);
  void handle(const std::shared_ptr<Peer>& peer, const MessageHead& head, std::string_view body);
  void on_hello(const MessageHead& head, std::string_view body);
  bool is_proven(const MessageHead& head, const Hello& hello);
  bool is_spent(const Nonce& nonce) const;
  void spend(const Nonce& nonce);
  void become_connected(Peer& peer, const Hello& hello, uint32_t life);
  std::string hello_body(const Peer& peer, MessageType type) const;
  void on_attach(Peer& peer, const Attach& attach);
  void on_attached(const Attached& attached);
  void on_revoke(Peer& peer, uint64_t region);
  void answer_revoke_if_idle(Remote& remote);
  void lose_peer(Peer& peer, PeerState state, Status why);
  void on_bye(Peer& peer, std::string_view body);
  std::string farewell() const;
  void lose_path(Peer& peer, uint32_t rail, const std::string& why);
  void send_heartbeats(Peer& peer);
  int find_stuck_path(const Peer& peer, Clock::time_point now) const;
  void count_imm(Peer& peer, uint32_t key, uint32_t count);
  void check_peers(Clock::time_point now, Clock::duration slept);
  bool has_died(Peer& peer, Clock::time_point now) const;
  std::shared_ptr<ImmCounter> counter_of(const std::shared_ptr<Peer>& peer, uint32_t key);
  void release_rails(Memory& memory);

  std::array<TallyOperation*, kOpKinds> counted_{};
  std::atomic<bool> closed_{false};
  std::atomic<Transfer*> submitted_{nullptr};
  std::atomic<uint32_t> waiters_{0};
  std::thread worker_;
  std::atomic<bool> stopping_{false};
  bool write_imm_ = true;
  uint32_t progress_calls_ = 0;
  uint32_t submissions_ = 0;
  uint32_t turn_ = 0;    // of polling
  uint64_t copied_ = 0;  // by posts that were through at once, in this turn or submission
  Clock::time_point last_tick_{};
  Clock::time_point looked_{};  // at peers' processes
  std::string last_loss_;       // of a peer that did not leave in peace: who, and why
  Clock::time_point lost_at_{};
  std::vector<Event> events_;
  std::vector<provider::Piece> page_list_;  // of the post_pages() under way

  std::deque<std::unique_ptr<Flight[]>> flight_blocks_;
  Flight* free_flights_ = nullptr;
  std::unique_ptr<char[]> arena_;  // message buffers
  std::vector<char*> free_buffers_;
  struct Resting {
    char* buffer;
    Clock::time_point until;
  };
  std::deque<Resting> resting_buffers_;  // of messages to peers that are gone: a NIC may still hold them
  std::vector<Flight*> unposted_receives_;
  std::vector<char> inbox_page_;
  uint64_t message_bytes_ = 0;
  uint64_t write_bytes_max_ = UINT64_MAX;

  Transfer* active_ = nullptr;
  std::deque<std::shared_ptr<Transfer>> waiting_;  // with unposted pieces, served in turn
  std::deque<OutMessage> out_messages_;
  bool is_flushing_ = false;
  std::deque<Arrived> arrived_;
  std::deque<std::shared_ptr<Transfer>> receives_;
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> by_request_;  // offers and staged writes
  uint64_t next_request_id_ = 1;

  std::map<EngineId, std::shared_ptr<Peer>> peers_;
  std::vector<Peer*> slots_;
  uint32_t next_slot_ = 0;
  std::deque<Nonce> spent_;  // of hellos that began a life; one that was overheard begins no second
  PacedLog refusals_;        // of what strangers send
  std::unordered_map<uint64_t, Region> regions_;
  uint64_t next_region_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<PendingAttach>> attaches_;
  std::map<std::pair<Peer*, uint32_t>, uint64_t> barrier_rounds_;
  std::unique_ptr<class Staging> staging_;
};

}  // namespace weft::transfer
