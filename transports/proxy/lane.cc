// SPDX-License-Identifier: Apache-2.0
#include "transports/proxy/lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace weft::proxy {
namespace {

// Commands that a lane sends and records that it takes in one turn, so that others have theirs.
constexpr uint32_t kPerTurn = 64;

bool is_signal(Command command) {
  const Op op = op_of(command);
  return op == Op::kValue || op == Op::kAdd || op == Op::kClose;
}

}  // namespace

Result<std::unique_ptr<Lane>> Lane::create(Traffic& traffic, int rank, uint64_t* flushed) {
  std::unique_ptr<Lane> lane(new Lane(traffic, rank, flushed));
  if (lane->is_self_) return lane;
  lane->outbox_.resize(kRing);
  lane->inbox_.resize(kRing);
  const auto range = [](std::vector<Record>& records) {
    return provider::Range{records.data(), records.size() * sizeof(Record)};
  };
  WEFT_TRY_ASSIGN(lane->outbox_memory_, traffic.engine.enroll(range(lane->outbox_), provider::kLocal));
  WEFT_TRY_ASSIGN(lane->inbox_memory_, traffic.engine.enroll(range(lane->inbox_), provider::kRemoteWrite));
  return lane;
}

Status Lane::connect(std::shared_ptr<transfer::Peer> peer) {
  peer_ = std::move(peer);
  const auto counters = [&](uint32_t first, uint32_t count, auto& into, auto& bases) -> Status {
    bases.assign(count, 0);
    for (uint32_t i = 0; i < count; ++i) {
      WEFT_TRY_ASSIGN(auto counter, traffic_.engine.imm_counter(peer_, first + i));
      into.push_back(std::move(counter));
    }
    return Status();
  };
  WEFT_TRY(counters(kDataImm, kRing, data_, data_base_));
  WEFT_TRY(counters(kSignalImm, kRing, signals_, signal_base_));
  WEFT_TRY(counters(kCreditImm, kCredits, credits_, credit_base_));
  WEFT_TRY_ASSIGN(closed_, traffic_.engine.imm_counter(peer_, kClosedImm));
  return Status();
}

Status Lane::attach(const std::string& greeting, Deadline until) {
  WEFT_TRY_ASSIGN(their_inbox_, traffic_.engine.attach(greeting, until));
  return Status();
}

bool Lane::turn() {
  if (is_self_) return send();
  bool any = take_arrived();  // also what a peer that is gone by now has sent before
  if (!is_lost_ && !peer_->is_alive()) {
    const bool owes = !is_closing_ && !(queue_.empty() && in_flight_.empty());
    if (peer_->state() == transfer::PeerState::kClosed && !owes)
      is_lost_ = true;  // it left in peace
    else
      lose(peer_->why());
  }
  if (is_lost_) {
    drop_all();
    return any;
  }
  any = take_finished() || any;
  any = take_credits() || any;
  return send() || any;
}

bool Lane::send() {
  bool any = false;
  for (uint32_t i = 0; i < kPerTurn && !queue_.empty() && send_front(); ++i) any = true;
  publish_flushes();
  return any;
}

bool Lane::send_front() {
  Queued& front = queue_.front();
  if (op_of(front.command) == Op::kFlush) {
    marks_.push_back({next_out_, front.position + 1});
    queue_.pop_front();
    return true;
  }
  if (is_self_) {
    carry_out_here(front);
    queue_.pop_front();
    return true;
  }
  // A slot of the outbox is free again once its last write is finished.
  if (next_out_ - confirmed_ >= kWindow || next_out_ - finished_ >= kRing) return false;
  return is_signal(front.command) ? post_signals() : post_put(front);
}

bool Lane::post_put(Queued& put) {
  const Command c = put.command;
  const uint64_t left = bytes_of(c) - put.done;
  const uint64_t part = std::min(left, traffic_.pace.bytes_in_flight);
  const uint64_t others = traffic_.bytes.load(std::memory_order_relaxed);
  if (others > 0 && (others + part > traffic_.pace.bytes_in_flight ||
                     traffic_.writes.load(std::memory_order_relaxed) >= traffic_.pace.writes_in_flight))
    return false;
  transfer::WriteRequest request;
  request.src = traffic_.regions.own(src_region_of(c)).memory;
  request.dst = traffic_.regions.of(dst_region_of(c), rank_);
  if (!request.src || !request.dst) {
    lose(Status::invalid("proxy: a put from or to window {} of rank {}, which is gone", dst_region_of(c),
                         rank_));
    return false;
  }
  request.src_offset = src_of(c) + put.done;
  request.dst_offset = dst_of(c) + put.done;
  request.bytes = part;
  if (!post(std::move(request), kDataImm)) return false;
  put.done += part;
  if (put.done == bytes_of(c)) queue_.pop_front();
  return true;
}

// As many as stand next to each other go in one record.
bool Lane::post_signals() {
  Record& record = outbox_[next_out_ % kRing];
  record = Record{};
  record.sequence = next_out_;
  while (record.count < kSignalsPerRecord && record.count < queue_.size() &&
         is_signal(queue_[record.count].command)) {
    record.signals[record.count] = queue_[record.count].command;
    ++record.count;
  }
  transfer::WriteRequest request;
  request.src = outbox_memory_;
  request.dst = their_inbox_;
  request.src_offset = request.dst_offset = next_out_ % kRing * sizeof(Record);
  request.bytes = sizeof(Record);
  const uint32_t count = record.count;
  if (!post(std::move(request), kSignalImm)) return false;
  queue_.erase(queue_.begin(), queue_.begin() + count);
  return true;
}

bool Lane::post(transfer::WriteRequest request, uint32_t imm) {
  const uint64_t bytes = request.bytes;
  request.how.imm = imm + static_cast<uint32_t>(next_out_ % kRing);
  request.how.timeout_s = traffic_.timeout_s;
  Result<std::shared_ptr<transfer::Transfer>> posted = traffic_.engine.write(std::move(request));
  if (!posted.ok()) {
    lose(posted.status());
    return false;
  }
  in_flight_.push_back({std::move(*posted), bytes});
  traffic_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  traffic_.writes.fetch_add(1, std::memory_order_relaxed);
  ++next_out_;
  return true;
}

bool Lane::take_finished() {
  bool any = false;
  while (!in_flight_.empty() && in_flight_.front().transfer->is_finished()) {
    const InFlight done = std::move(in_flight_.front());
    in_flight_.pop_front();
    traffic_.bytes.fetch_sub(done.bytes, std::memory_order_relaxed);
    traffic_.writes.fetch_sub(1, std::memory_order_relaxed);
    ++finished_;
    any = true;
    if (const Status status = done.transfer->status(); !status.ok()) {
      lose(status);
      break;
    }
  }
  return any;
}

// A number's counts are looked at again, and forgotten, halfway to its next use: what comes twice comes soon.
bool Lane::take_credits() {
  bool any = false;
  while (credits_[grants_ % kCredits]->value() > credit_base_[grants_ % kCredits]) {
    const uint64_t old = (grants_ + kCredits / 2) % kCredits;
    credit_base_[old] = credits_[old]->value();
    ++grants_;
    confirmed_ += kCreditEvery;
    any = true;
  }
  return any;
}

bool Lane::take_arrived() {
  bool any = false;
  for (uint32_t i = 0; i < kPerTurn; ++i) {
    const uint64_t slot = next_in_ % kRing;
    const bool is_data = data_[slot]->value() > data_base_[slot];
    if (!is_data && signals_[slot]->value() <= signal_base_[slot]) return any;
    const uint64_t old = (next_in_ + kWindow) % kRing;
    data_base_[old] = data_[old]->value();
    signal_base_[old] = signals_[old]->value();
    if (!is_data) apply(inbox_[slot]);
    any = true;
    if (++next_in_ % kCreditEvery == 0)
      notify(kCreditImm + static_cast<uint32_t>(next_in_ / kCreditEvery - 1) % kCredits);
  }
  return any;
}

void Lane::apply(const Record& record) {
  if (record.sequence != next_in_ || record.count > kSignalsPerRecord)
    return lose(Status::make(Code::kSystem, "proxy: rank {} sent record {} where {} was due", rank_,
                             record.sequence, next_in_));
  for (uint32_t i = 0; i < record.count; ++i) apply(record.signals[i]);
}

void Lane::apply(Command signal) {
  const Op op = op_of(signal);
  if (op == Op::kClose) return notify(kClosedImm);
  const Regions::Own window = traffic_.regions.own(dst_region_of(signal));
  if (!window.base || word_of(signal) + 8 > window.bytes) return;  // the window is gone here: nobody looks
  auto* word = reinterpret_cast<uint64_t*>(window.base + word_of(signal));
  if (op == Op::kValue)
    store_release(word, signal.a);
  else
    add_release(word, signal.a);
}

// To the own rank: in order, at once.
void Lane::carry_out_here(const Queued& queued) {
  const Command c = queued.command;
  if (is_signal(c)) {
    if (op_of(c) != Op::kClose) apply(c);
    return;
  }
  const Regions::Own window = traffic_.regions.own(dst_region_of(c));
  const uint64_t bytes = bytes_of(c);
  if (window.base && dst_of(c) + bytes <= window.bytes && src_of(c) + bytes <= window.bytes)
    std::memmove(window.base + dst_of(c), window.base + src_of(c), bytes);
}

void Lane::publish_flushes() {
  for (; !marks_.empty() && marks_.front().writes <= finished_; marks_.pop_front())
    store_release(flushed_, marks_.front().position);
}

// Nobody reads sources for this peer any more, so whoever waits for them may go on.
void Lane::drop_all() {
  for (const InFlight& lost : in_flight_) {
    traffic_.bytes.fetch_sub(lost.bytes, std::memory_order_relaxed);
    traffic_.writes.fetch_sub(1, std::memory_order_relaxed);
  }
  finished_ += in_flight_.size();
  in_flight_.clear();
  for (const Queued& queued : queue_)
    if (op_of(queued.command) == Op::kFlush) marks_.push_back({finished_, queued.position + 1});
  queue_.clear();
  publish_flushes();
}

void Lane::lose(Status why) {
  if (is_lost_) return;
  is_lost_ = true;
  how_ = text("{}; {} writes sent to it, {} confirmed, {} received", why.message(), next_out_, confirmed_,
              next_in_);
  status_ = Status::make(why.code() == Code::kOk ? Code::kPeerLost : why.code(),
                         "rank {}, proxy: lost rank {}: {}", traffic_.self, rank_, how_);
}

void Lane::notify(uint32_t imm) {
  if (is_lost_) return;
  transfer::How how;
  how.imm = imm;
  how.timeout_s = traffic_.timeout_s;
  const auto posted = traffic_.engine.notify(peer_, how);
  if (!posted.ok()) lose(posted.status());
}

}  // namespace weft::proxy
