// SPDX-License-Identifier: Apache-2.0
//
// A stream carries the operations of one context to one peer, which applies them in order. Outgoing is the sending
// end, Incoming the applying end. Puts of the host of up to kInlineBytes, and signals, travel together as records;
// other puts are writes whose immediate is their number. Every number is confirmed once all up to it has happened;
// with that its requests end. So a request that is done is one that the peer has taken.
// Threads: the holder of the team's mutex.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "compat/nccl_rma/mail.h"
#include "compat/nccl_rma/region.h"
#include "compat/nccl_rma/requests.h"
#include "compat/nccl_rma/wire.h"

namespace weft::nccl_rma {

// One step of a stream. A put with a signal is two of them.
struct Command {
  Do what = Do::kAdd;
  uint32_t region = 0;  // the peer's: of a put and an add the target, of a get the source
  uint64_t offset = 0;
  uint64_t value = 0;             // kAdd: what is added; else bytes
  std::shared_ptr<Region> here;   // of a put the source, of a get the target
  std::shared_ptr<Region> there;  // of a put that is a write
  uint64_t here_offset = 0;
  uint64_t request = 0;  // ends with this step; 0: none
};

// The state that all streams of a team share.
struct Ways {
  transfer::Engine& engine;
  Mail& mail;
  Requests& requests;
  const uint64_t bytes_max;  // of writes under way; the last one may go beyond
  const uint32_t writes_max;
  uint64_t bytes = 0;
  uint32_t writes = 0;
};

class Outgoing {
 public:
  Outgoing(uint32_t id, int rank, std::shared_ptr<transfer::Peer> peer, Ways& ways)
      : id_(id), rank_(rank), peer_(std::move(peer)), ways_(ways) {}

  void add(Command command) { queue_.push_back(std::move(command)); }
  // Sends what there is room for; whether it sent anything.
  bool send();
  // Looks after what is under way; whether anything has ended.
  bool settle();
  // The peer has taken so many numbers.
  void confirm(uint64_t taken);
  // Everything that is not done ends with this.
  void fail(const Status& why);
  // Forgets what was asked and is not sent.
  void drop_queue() { queue_.clear(); }

  bool is_idle() const { return queue_.empty() && under_way_.empty(); }
  size_t queued() const { return queue_.size(); }
  uint32_t id() const { return id_; }
  int rank() const { return rank_; }
  const Status& status() const { return status_; }
  // How long the oldest number has not been confirmed.
  double waited_s() const;
  std::string progress() const;

 private:
  struct Sent {
    std::shared_ptr<transfer::Transfer> transfer;
    std::vector<uint64_t> requests;
    uint64_t bytes;  // of a write
    bool is_write;
    bool is_through;  // the transfer is known to have ended
    Deadline::Clock::time_point since;
  };
  static bool goes_in_record(const Command& command);
  static uint64_t record_bytes(const Command& command);
  bool post_record();
  bool post_write();
  void through(Sent& sent);

  const uint32_t id_;
  const int rank_;
  const std::shared_ptr<transfer::Peer> peer_;
  Ways& ways_;
  std::deque<Command> queue_;
  std::deque<Sent> under_way_;  // numbers confirmed_ to next_ - 1
  uint64_t next_ = 0, confirmed_ = 0;
  Status status_;
};

class Incoming {
 public:
  Incoming(uint32_t id, std::shared_ptr<transfer::Peer> peer, transfer::Engine& engine)
      : id_(id), peer_(std::move(peer)), engine_(engine) {}

  // Errors: kInvalid for a record that is out of order.
  Status keep(uint64_t number, std::string_view units);
  // Takes what has its turn; `carry_out` gets the units of a record. Whether anything was taken.
  Result<bool> advance(const std::function<Status(std::string_view units)>& carry_out);
  uint64_t taken() const { return next_; }
  bool owes_credit() const { return next_ != credited_; }
  void credited() { credited_ = next_; }
  uint32_t id() const { return id_; }

 private:
  Result<bool> has_written(uint64_t number);
  void forget_lap_before(uint64_t number);

  const uint32_t id_;
  const std::shared_ptr<transfer::Peer> peer_;
  transfer::Engine& engine_;
  uint64_t next_ = 0, credited_ = 0;
  std::deque<std::pair<uint64_t, std::string>> records_;
  std::array<std::shared_ptr<transfer::ImmCounter>, kNumbers> written_;
  std::array<uint64_t, kNumbers> known_{};  // immediates that belong to numbers that were taken
};

}  // namespace weft::nccl_rma
