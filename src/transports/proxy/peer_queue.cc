// SPDX-License-Identifier: Apache-2.0
#include "transports/proxy/peer_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace weft::proxy {
namespace {

// Commands that a queue sends and records that it takes in one turn, so that others have theirs.
constexpr uint32_t kPerTurn = 64;
// A put waits so many turns for the signal that its thread is about to ask for.
constexpr uint32_t kTurnsForMore = 16;

// What went to memory that the peer has taken back, says the engine: the peer has left, mostly for somebody whose loss the communicator
// knows, or it has destroyed the window. So the peer is lost.
Code code_of_loss(const Status& why) {
  const bool is_taken_back = why.code() == Code::kInvalid && why.message().starts_with("remote: ");
  return why.ok() || is_taken_back ? Code::kPeerLost : why.code();
}

}  // namespace

Result<std::unique_ptr<PeerQueue>> PeerQueue::create(Traffic& traffic, int rank, uint64_t* flushed) {
  std::unique_ptr<PeerQueue> queue(new PeerQueue(traffic, rank, flushed));
  if (queue->is_self_) return queue;
  queue->outbox_.resize(kRing);
  queue->inbox_.resize(kRing);
  const auto range = [](std::vector<Record>& records) {
    return provider::Range{records.data(), records.size() * sizeof(Record)};
  };
  WEFT_TRY_ASSIGN(queue->outbox_memory_, traffic.engine.enroll(range(queue->outbox_), provider::kLocal));
  WEFT_TRY_ASSIGN(queue->inbox_memory_, traffic.engine.enroll(range(queue->inbox_), provider::kRemoteWrite));
  return queue;
}

Status PeerQueue::connect(std::shared_ptr<transfer::Peer> peer) {
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

Status PeerQueue::attach(const std::string& inbox, Deadline until) {
  WEFT_TRY_ASSIGN(their_inbox_, traffic_.engine.attach(inbox, until));
  return Status();
}

bool PeerQueue::turn() {
  if (is_self_) return send() | take_gets();
  bool any = take_arrived();  // also what a peer that is gone by now has sent before
  if (!is_lost_ && !peer_->is_alive()) {
    end(peer_->why());
  }
  if (is_lost_) {
    if (status_.ok() && owes_gets())
      note_loss(peer_->why());  // it left in peace, but somebody waits for its memory
    drop_all();
    return any;
  }
  any = take_finished() || any;
  any = take_gets() || any;
  any = take_credits() || any;
  return send() || any;
}

// The peer takes nothing more. It left in peace where no data is owed to it; its farewell may be known before its
// engine's end.
void PeerQueue::end(const Status& why) {
  const bool has_left = has_farewell_ || peer_->state() == transfer::PeerState::kClosed;
  if (has_left && (is_closing_ || !owes_data()))
    is_lost_ = true;
  else
    lose(why);
}

// Signals alone are mostly what a peer that is done with its last call does not wait for.
bool PeerQueue::owes_data() const {
  return owes_gets() ||
         std::ranges::any_of(queue_,
                             [](const Queued& queued) { return op_of(queued.command) == Op::kPut; }) ||
         std::ranges::any_of(in_flight_, [](const InFlight& posted) { return posted.has_put; });
}

bool PeerQueue::owes_gets() const {
  return !gets_in_flight_.empty() ||
         std::ranges::any_of(queue_, [](const Queued& queued) { return op_of(queued.command) == Op::kGet; });
}

bool PeerQueue::send() {
  bool any = send_notices();
  for (uint32_t i = 0; i < kPerTurn && !queue_.empty() && send_front(); ++i) any = true;
  publish_flushes();
  return any;
}

bool PeerQueue::send_front() {
  Queued& front = queue_.front();
  if (op_of(front.command) == Op::kFlush) {
    marks_.push_back({next_out_, front.position + 1});
    queue_.pop_front();
    return true;
  }
  if (op_of(front.command) == Op::kGot) {
    got_marks_.push_back({gets_posted_, front.command});
    queue_.pop_front();
    return true;
  }
  if (is_self_) {
    carry_out_here(front);
    queue_.pop_front();
    return true;
  }
  if (op_of(front.command) == Op::kGet) return post_get(front);
  // A slot of the outbox is free again once its last write is finished.
  if (next_out_ - confirmed_ >= kWindow || next_out_ - finished_ >= kRing) return false;
  if (!goes_in_record(front)) return post_put(front);
  return !awaits_more(front) && post_record();
}

bool PeerQueue::goes_in_record(const Queued& queued) const {
  const Command c = queued.command;
  if (is_signal(c) || op_of(c) == Op::kAnnounce) return true;
  return op_of(c) == Op::kPut && bytes_of(c) <= kSmallPutBytesMax &&
         !(c.b & (kSrcTemporary | kDstTemporary)) &&
         traffic_.regions.is_in_host(src_region_of(c), src_of(c), bytes_of(c)) &&
         traffic_.regions.is_in_host(dst_region_of(c), dst_of(c), bytes_of(c));
}

bool PeerQueue::awaits_more(const Queued& front) {
  const bool has_one_put =
      queue_.size() == 1 && op_of(front.command) == Op::kPut && (front.command.b & kMore);
  turns_for_more_ = has_one_put && turns_for_more_ < kTurnsForMore ? turns_for_more_ + 1 : 0;
  return turns_for_more_ > 0;
}

// Whether the NICs take another write of so many bytes now; it is counted then. One always goes.
bool PeerQueue::reserve(uint64_t bytes) {
  const uint32_t writes = traffic_.writes.fetch_add(1, std::memory_order_relaxed);
  const uint64_t others = traffic_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  const Pace& pace = traffic_.pace;
  if (writes == 0 || (writes < pace.writes_in_flight && others + bytes <= pace.bytes_in_flight)) return true;
  release(bytes);
  return false;
}

void PeerQueue::release(uint64_t bytes) {
  traffic_.bytes.fetch_sub(bytes, std::memory_order_relaxed);
  traffic_.writes.fetch_sub(1, std::memory_order_relaxed);
}

// The next piece of a put or get, for which the NICs have room: its bytes are counted as under way. None where they have
// not, or where a window is gone, which loses the peer.
std::optional<PeerQueue::Piece> PeerQueue::next_piece(const Queued& queued) {
  const Command c = queued.command;
  const bool is_get = op_of(c) == Op::kGet;  // source and destination are then the other way round
  const bool is_from_temporary = !is_get && (c.b & kSrcTemporary),
             is_to_temporary = !is_get && (c.b & kDstTemporary);
  Piece piece{nullptr,
              nullptr,
              (is_get ? dst_of(c) : src_of(c)) + queued.done,
              (is_get ? src_of(c) : dst_of(c)) + queued.done,
              std::min(bytes_of(c) - queued.done, traffic_.pace.bytes_in_flight),
              is_to_temporary,
              false};
  if (is_from_temporary) {
    piece.own = traffic_.registrations.own(src_temporary_of(c));
    if (!piece.own) {
      lose(Status::make(Code::kPeerLost, "a call failed here before all that it had for rank {} was sent",
                        rank_));
      return {};
    }
  }
  if (is_to_temporary) piece.theirs = traffic_.registrations.of(dst_temporary_of(c), rank_);
  if (!find_parts(src_region_of(c), dst_region_of(c), piece)) {
    lose(
        Status::invalid("proxy: a {} of {} bytes from or to window {} of rank {}, which is gone or not "
                        "reached there by the network",
                        is_get ? "get" : "put", piece.bytes, dst_region_of(c), rank_));
    return {};
  }
  if (!reserve(piece.bytes)) return {};
  return piece;
}

// Looks up windows, and counts places from the beginning of their parts.
bool PeerQueue::find_parts(uint32_t own_region, uint32_t their_region, Piece& piece) const {
  const Regions::Own window = traffic_.regions.own(own_region);
  if (!piece.own) {
    const Regions::Part* part = window.part(piece.own_offset, piece.bytes);
    if (!part) return false;
    piece.own = part->memory;
    piece.own_offset -= part->begin;
    piece.is_in_host = part == &window.host;
  }
  if (piece.is_to_temporary) return true;
  const Regions::Own alike = traffic_.regions.own(their_region);  // windows have the same parts on all ranks
  const Regions::Part* part = alike.part(piece.their_offset, piece.bytes);
  if (!part) return false;
  const Regions::Theirs theirs = traffic_.regions.of(their_region, rank_);
  piece.theirs = part == &alike.host ? theirs.host : theirs.device;
  piece.their_offset -= part->begin;
  piece.is_in_host = piece.is_in_host || part == &alike.host;
  return piece.theirs != nullptr;
}

void PeerQueue::note_posted(Queued& queued, uint64_t bytes) {
  ++data_writes_;
  queued.done += bytes;
  if (queued.done == bytes_of(queued.command)) queue_.pop_front();
}

bool PeerQueue::post_put(Queued& put) {
  const std::optional<Piece> piece = next_piece(put);
  if (!piece) return false;
  if (piece->is_to_temporary && (!piece->theirs || piece->theirs->is_revoked())) {
    release(piece->bytes);
    return post_nothing(put);
  }
  transfer::WriteRequest request{piece->own,          piece->own_offset, piece->theirs,
                                 piece->their_offset, piece->bytes,      {}};
  if (!post(std::move(request), kDataImm, true)) return false;
  in_flight_.back().is_in_host = piece->is_in_host;
  note_posted(put, piece->bytes);
  return true;
}

bool PeerQueue::post_get(Queued& get) {
  const std::optional<Piece> piece = next_piece(get);
  if (!piece) return false;
  transfer::ReadRequest request{piece->own,          piece->own_offset, piece->theirs,
                                piece->their_offset, piece->bytes,      {}};
  request.how.timeout_s = traffic_.timeout_s;
  Result<std::shared_ptr<transfer::Transfer>> posted = traffic_.engine.read(std::move(request));
  if (!posted.ok()) {
    release(piece->bytes);
    end(posted.status());
    return false;
  }
  gets_in_flight_.push_back({std::move(*posted), piece->bytes, tally_now_ns(), false, false});
  gets_in_flight_.back().is_in_host = piece->is_in_host;
  ++gets_posted_;
  note_posted(get, piece->bytes);
  return true;
}

// In order, so that a word says that all before it have come. A queue that is lost says no more: whoever waits for the word
// learns of the loss.
bool PeerQueue::take_gets() {
  bool any = false;
  while (!is_lost_ && !gets_in_flight_.empty() && gets_in_flight_.front().transfer->is_finished()) {
    const InFlight done = std::move(gets_in_flight_.front());
    gets_in_flight_.pop_front();
    release(done.bytes);
    any = true;
    count_one(gets_, done.bytes);
    if (done.is_in_host) count_one(host_gets_, done.bytes);
    add_time(gets_, tally_now_ns() - done.since_ns);
    if (const Status status = done.transfer->status(); !status.ok()) {
      count_up(gets_.errors, 1);
      lose(status);
      break;
    }
    ++gets_finished_;
  }
  for (; !is_lost_ && !got_marks_.empty() && got_marks_.front().gets <= gets_finished_;
       got_marks_.pop_front()) {
    store_word(got_marks_.front().command);
    any = true;
  }
  return any;
}

bool PeerQueue::post_record() {
  Record& record = outbox_[next_out_ % kRing];
  record.sequence = next_out_;
  record.count = record.reserved = 0;
  const uint32_t taken = write_record(record);
  if (taken == 0) return false;
  transfer::WriteRequest request;
  request.src = outbox_memory_;
  request.dst = their_inbox_;
  request.src_offset = request.dst_offset = next_out_ % kRing * sizeof(Record);
  request.bytes = record_bytes(record.count);
  if (!reserve(request.bytes)) return false;
  const bool has_put = std::any_of(queue_.begin(), queue_.begin() + taken,
                                   [](const Queued& queued) { return op_of(queued.command) == Op::kPut; });
  if (!post(std::move(request), kSignalImm, has_put)) return false;
  queue_.erase(queue_.begin(), queue_.begin() + taken);
  return true;
}

bool PeerQueue::post(transfer::WriteRequest request, uint32_t imm, bool has_put) {
  const uint64_t bytes = request.bytes;
  request.how.imm = imm + static_cast<uint32_t>(next_out_ % kRing);
  request.how.timeout_s = traffic_.timeout_s;
  const std::shared_ptr<transfer::Remote> registration =
      request.dst->access() & transfer::kTemporary ? request.dst : nullptr;
  const InFlight noted{nullptr,          bytes,       tally_now_ns(), imm == kDataImm, has_put,
                       *request.how.imm, registration};
  return note_in_flight(traffic_.engine.write(std::move(request)), noted);
}

// In place of a put to memory that the peer has taken back, whose call has failed: it only wants the number.
bool PeerQueue::post_nothing(Queued& put) {
  if (!reserve(0)) return false;
  transfer::How how;
  how.imm = kDataImm + static_cast<uint32_t>(next_out_ % kRing);
  how.timeout_s = traffic_.timeout_s;
  const InFlight noted{nullptr, 0, tally_now_ns(), false, false, *how.imm};
  if (!note_in_flight(traffic_.engine.notify(peer_, std::move(how)), noted)) return false;
  note_posted(put, bytes_of(put.command) - put.done);
  return true;
}

bool PeerQueue::note_in_flight(Result<std::shared_ptr<transfer::Transfer>> posted, InFlight noted) {
  if (!posted.ok()) {
    release(noted.bytes);
    end(posted.status());
    return false;
  }
  noted.transfer = std::move(*posted);
  in_flight_.push_back(std::move(noted));
  ++next_out_;
  return true;
}

bool PeerQueue::take_finished() {
  bool any = false;
  while (!in_flight_.empty() && in_flight_.front().transfer->is_finished()) {
    const InFlight done = std::move(in_flight_.front());
    in_flight_.pop_front();
    release(done.bytes);
    ++finished_;
    any = true;
    TallyOperation& counted = done.is_put ? puts_ : signal_writes_;
    count_one(counted, done.bytes);
    add_time(counted, tally_now_ns() - done.since_ns);
    if (done.is_in_host) count_one(host_puts_, done.bytes);
    if (const Status status = done.transfer->status(); !status.ok()) {
      count_up(counted.errors, 1);
      if (done.registration && done.registration->is_revoked() && peer_->is_alive()) {  // its call has failed
        notify(done.imm);
        continue;
      }
      done.has_put ? lose(status) : end(status);
      break;
    }
  }
  return any;
}

// Duplicates of a confirmation arrive soon after it. So halfway to a number's next use its count so far, with
// duplicates, becomes the base from which the next use counts.
bool PeerQueue::take_credits() {
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

bool PeerQueue::take_arrived() {
  bool any = false;
  for (uint32_t i = 0; i < kPerTurn; ++i) {
    const uint64_t slot = next_in_ % kRing;
    const bool is_data = data_[slot]->value() > data_base_[slot];
    if (!is_data && signals_[slot]->value() <= signal_base_[slot]) return any;
    const uint64_t old = (next_in_ + kWindow) % kRing;
    data_base_[old] = data_[old]->value();
    signal_base_[old] = signals_[old]->value();
    if (is_data)
      ++data_writes_;
    else
      apply(inbox_[slot]);
    any = true;
    if (++next_in_ % kCreditEvery == 0)
      notify(kCreditImm + static_cast<uint32_t>(next_in_ / kCreditEvery - 1) % kCredits);
  }
  return any;
}

// To the own rank: in order, at once.
void PeerQueue::carry_out_here(const Queued& queued) {
  const Command c = queued.command;
  if (is_signal(c)) {
    if (op_of(c) != Op::kClose) apply(c);
    return;
  }
  if (c.b & (kSrcTemporary | kDstTemporary)) return;  // kernels announce to peers
  const Regions::Own window = traffic_.regions.own(src_region_of(c));
  if (const std::byte* from = window.at(src_of(c), bytes_of(c))) apply_put(c, from);
}

void PeerQueue::publish_flushes() {
  for (; !marks_.empty() && marks_.front().writes <= finished_; marks_.pop_front())
    store_release(flushed_, marks_.front().position);
}

// Nobody reads sources for this peer any more, so whoever waits for them may go on.
void PeerQueue::drop_all() {
  for (const InFlight& lost : in_flight_) release(lost.bytes);
  for (const InFlight& lost : gets_in_flight_) release(lost.bytes);
  gets_in_flight_.clear();
  got_marks_.clear();
  for (size_t i = 0; i < notices_in_flight_.size(); ++i) release(0);
  finished_ += in_flight_.size();
  in_flight_.clear();
  notices_in_flight_.clear();
  notices_.clear();
  for (const Queued& queued : queue_)
    if (op_of(queued.command) == Op::kFlush) marks_.push_back({finished_, queued.position + 1});
  queue_.clear();
  publish_flushes();
}

void PeerQueue::lose(Status why) {
  if (is_lost_) return;
  is_lost_ = true;
  note_loss(why);
}

void PeerQueue::note_loss(const Status& why) {
  how_ = text("{}; {} writes sent to it, {} confirmed, {} received", why.message(), next_out_, confirmed_,
              next_in_);
  status_ = Status::make(code_of_loss(why), "rank {}, proxy: lost rank {}: {}", traffic_.self, rank_, how_);
}

void PeerQueue::notify(uint32_t imm) {
  if (!is_lost_) notices_.push_back(imm);
}

// They come before data, which may wait for the peer's.
bool PeerQueue::send_notices() {
  bool any = false;
  while (!notices_in_flight_.empty() && notices_in_flight_.front()->is_finished()) {
    notices_in_flight_.pop_front();
    release(0);
    any = true;
  }
  while (!notices_.empty() && !is_lost_ && reserve(0)) {
    transfer::How how;
    how.imm = notices_.front();
    how.timeout_s = traffic_.timeout_s;
    auto posted = traffic_.engine.notify(peer_, how);
    if (!posted.ok()) {
      release(0);
      end(posted.status());
      return any;
    }
    notices_.pop_front();
    notices_in_flight_.push_back(std::move(*posted));
    any = true;
  }
  return any;
}

}  // namespace weft::proxy
