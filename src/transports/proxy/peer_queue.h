// SPDX-License-Identifier: Apache-2.0
//
// A PeerQueue carries commands to one peer and takes in what that peer sends. Data goes straight into the peer's
// window; values, adds and small puts go as records into its inbox, and the peer's host applies them: a small
// put and its signal are one message. Every write has a
// number; the receiver takes writes in the order of their numbers, whatever order they come in, so a signal
// is applied once everything sent before it is there. The receiver confirms every kCreditEvery writes; at
// most kWindow are unconfirmed. Threads: one at a time, the holder of its proxy's turn; connect() before that.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/tally.h"
#include "transports/proxy/network.h"
#include "transports/proxy/regions.h"
#include "transports/proxy/temporary_registrations.h"

namespace weft::proxy {

// What all queues of a link share. Atomic where several proxy threads write.
struct Traffic {
  transfer::Engine& engine;
  Regions& regions;
  TemporaryRegistrations& registrations;
  const Pace pace;
  const double timeout_s;
  const int self;
  std::atomic<uint64_t> bytes{0};  // under way
  std::atomic<uint32_t> writes{0};
};

inline bool is_signal(Command command) {
  const Op op = op_of(command);
  return op == Op::kValue || op == Op::kAdd || op == Op::kClose;
}

// What follows a command in a record.
inline uint64_t bytes_behind(Command command) {
  if (is_signal(command)) return 0;
  return op_of(command) == Op::kAnnounce ? sizeof(transfer::TemporaryKeys) : bytes_of(command);
}

class PeerQueue {
 public:
  // Registers inbox and outbox. Errors: those of the engine.
  static Result<std::unique_ptr<PeerQueue>> create(Traffic& traffic, int rank, uint64_t* flushed);

  // Connects the peer by its engine's address. describe_inbox() is what the peer needs to attach this inbox.
  Status connect(std::shared_ptr<transfer::Peer> peer);
  Result<std::string> describe_inbox() const { return traffic_.engine.describe(*inbox_memory_); }
  Status attach(const std::string& inbox, Deadline until);

  // Takes a command from the FIFO; `position` is its place there.
  void take(Command command, uint64_t position) { queue_.push_back({command, position, 0}); }
  // Sends what was taken, without a look at what came.
  void send_taken() {
    if (!is_lost_ && !queue_.empty()) send();
  }
  // One round of sending and receiving; whether anything came of it.
  bool turn();
  size_t queued() const { return queue_.size(); }
  // Writes of data, beside records, that went out or came in.
  uint64_t data_writes() const { return data_writes_; }
  bool is_idle() const {
    return queue_.empty() && in_flight_.empty() && gets_in_flight_.empty() && notices_.empty();
  }

  // Says farewell: everything taken so far is confirmed once is_closed().
  void close() {
    is_closing_ = true;
    queue_.push_back({{0, head_of(Op::kClose, 0)}, 0, 0});
  }
  bool is_closed() const { return is_self_ || is_lost_ || closed_->value() > 0; }

  int rank() const { return rank_; }
  // Not ok once the peer is lost: why.
  const Status& status() const { return status_; }
  // ... without this rank's name and the peer's.
  const std::string& how() const { return how_; }

 private:
  struct Queued {
    Command command;
    uint64_t position;
    uint64_t done;  // bytes of a put or get that have been posted
  };
  struct InFlight {
    std::shared_ptr<transfer::Transfer> transfer;
    uint64_t bytes;
    uint64_t since_ns;
    bool is_put;   // a write of data
    bool has_put;  // ... or a record with a small put
    uint32_t imm = 0;
    std::shared_ptr<transfer::Remote> registration = nullptr;  // of the peer, to which it goes; else null
    bool is_in_host = false;  // a put or get of which an end is memory of the host
  };
  struct Mark {
    uint64_t writes;  // once so many are finished, sources are reusable up to
    uint64_t position;
  };
  // Of a put or get: so many bytes between the own window and the peer's.
  struct Piece {
    std::shared_ptr<transfer::Memory> own;
    std::shared_ptr<transfer::Remote> theirs;
    uint64_t own_offset, their_offset, bytes;
    bool is_to_temporary;
    bool is_in_host;  // an end of it
  };
  // Once so many gets are finished, the word of this rank's own holds the value.
  struct GotMark {
    uint64_t gets;
    Command command;
  };

  PeerQueue(Traffic& traffic, int rank, uint64_t* flushed)
      : traffic_(traffic),
        puts_(tally_operation("proxy.put", "proxy")),
        host_puts_(tally_operation("proxy.put.host", "proxy")),
        signal_writes_(tally_operation("proxy.signal", "proxy")),
        gets_(tally_operation("proxy.get", "proxy")),
        host_gets_(tally_operation("proxy.get.host", "proxy")),
        rank_(rank),
        flushed_(flushed),
        is_self_(rank == traffic.self) {}
  bool send();
  bool send_front();
  bool reserve(uint64_t bytes);
  void release(uint64_t bytes);
  bool send_notices();
  std::optional<Piece> next_piece(const Queued& queued);
  bool find_parts(uint32_t own_region, uint32_t their_region, Piece& piece) const;
  void note_posted(Queued& queued, uint64_t bytes);
  bool post_put(Queued& put);
  bool post_get(Queued& get);
  bool take_gets();
  bool post_record();
  uint32_t write_record(Record& record);
  bool add_put(Record& record, Command put);
  void add_keys(Record& record, Command announced);
  Command as_peer_names(Command command) const;
  bool is_current(Command command) const;
  bool goes_in_record(const Queued& queued) const;
  bool awaits_more(const Queued& front);
  bool post(transfer::WriteRequest request, uint32_t imm, bool has_put);
  bool post_nothing(Queued& put);
  bool note_in_flight(Result<std::shared_ptr<transfer::Transfer>> posted, InFlight noted);
  void end(const Status& why);
  bool owes_data() const;
  bool owes_gets() const;
  bool take_finished();
  bool take_credits();
  bool take_arrived();
  void apply(const Record& record);
  void apply(Command signal);
  void store_word(Command signal);
  void apply_put(Command put, const void* bytes);
  void apply_keys(Command announced, const void* bytes);
  void carry_out_here(const Queued& queued);
  void publish_flushes();
  void drop_all();
  void lose(Status why);
  void note_loss(const Status& why);
  void notify(uint32_t imm);

  Traffic& traffic_;
  TallyOperation &puts_, &host_puts_, &signal_writes_, &gets_, &host_gets_;  // of this process
  const int rank_;
  uint64_t* const flushed_;  // this peer's word, which device code polls
  const bool is_self_;
  std::shared_ptr<transfer::Peer> peer_;
  bool is_lost_ = false, is_closing_ = false;
  bool has_farewell_ = false;  // the peer's
  Status status_;
  std::string how_;

  std::deque<Queued> queue_;
  std::deque<InFlight> in_flight_;
  std::deque<Mark> marks_;
  std::deque<InFlight> gets_in_flight_;
  std::deque<GotMark> got_marks_;
  uint64_t gets_posted_ = 0, gets_finished_ = 0;
  std::deque<uint32_t> notices_;  // immediates alone that wait for their turn: confirmations, farewells
  std::deque<std::shared_ptr<transfer::Transfer>> notices_in_flight_;
  uint32_t turns_for_more_ = 0;  // that a put has stood alone in the queue
  uint64_t next_out_ = 0;        // number of the next write
  uint64_t finished_ = 0;        // writes whose sources are reusable, in order
  uint64_t confirmed_ = 0;       // writes that the peer has taken
  uint64_t grants_ = 0;
  uint64_t next_in_ = 0;
  uint64_t data_writes_ = 0;

  std::vector<Record> outbox_, inbox_;
  std::shared_ptr<transfer::Memory> outbox_memory_, inbox_memory_;
  std::shared_ptr<transfer::Remote> their_inbox_;
  // Immediates of the peer, and what their counts were when the number was last done with.
  std::vector<std::shared_ptr<transfer::ImmCounter>> data_, signals_, credits_;
  std::vector<uint64_t> data_base_, signal_base_, credit_base_;
  std::shared_ptr<transfer::ImmCounter> closed_;
};

}  // namespace weft::proxy
