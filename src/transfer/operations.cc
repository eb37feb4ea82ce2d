// SPDX-License-Identifier: Apache-2.0
//
// The life of a transfer: start, settle when the network is through, finish once. Between those: posting.cc.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "transfer/copier.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

// Under the token nobody else writes it: cheaper than an atomic addition.
void add(std::atomic<uint32_t>& number, int32_t change) {
  number.store(number.load(std::memory_order_relaxed) + static_cast<uint32_t>(change),
               std::memory_order_release);
}

double seconds(Clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

}  // namespace

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::kQueued:
      return "queued";
    case Phase::kPosted:
      return "posted";
    case Phase::kDraining:
      return "draining";
    case Phase::kDone:
      return "done";
    case Phase::kFailed:
      return "failed";
    case Phase::kCancelled:
      return "cancelled";
  }
  return "?";
}

const char* to_string(OpKind kind) {
  switch (kind) {
    case OpKind::kWrite:
      return "write";
    case OpKind::kRead:
      return "read";
    case OpKind::kNotify:
      return "notify";
    case OpKind::kSend:
      return "send";
    case OpKind::kRecv:
      return "recv";
  }
  return "?";
}

Peer& Core::peer_of(const Transfer& transfer, uint32_t target) const {
  const std::shared_ptr<Remote>& remote = transfer.remote(target);
  return remote ? *remote->peer_ : *transfer.peer_;
}

bool Core::involves(const Transfer& transfer, const Peer& peer) const {
  if (transfer.peer_.get() == &peer) return true;
  if (transfer.remote_ && transfer.remote_->peer_.get() == &peer) return true;
  return std::any_of(transfer.more_.begin(), transfer.more_.end(),
                     [&](const auto& remote) { return remote->peer_.get() == &peer; });
}

std::string Core::describe_peer(const Transfer& transfer) const {
  if (transfer.peer_) return text("peer '{}'", transfer.peer_->name());
  if (!transfer.remote_) return "anyone";
  std::string names = text("peer '{}'", transfer.remote_->peer_->name());
  for (const auto& remote : transfer.more_)
    if (names.find(remote->peer_->name()) == std::string::npos)
      names += text(", '{}'", remote->peer_->name());
  return names;
}

std::string Core::describe_progress(const Transfer& transfer) const {
  if (transfer.kind_ == OpKind::kRecv && !transfer.is_offered_) return "expected 1 message, saw none";
  if (transfer.packs_left_) return text("expected {} more answers of the peer", transfer.packs_left_);
  const size_t all = transfer.pieces() + transfer.notices_.size();
  const size_t done =
      transfer.next_piece_ + transfer.next_notice_ - std::min<size_t>(transfer.in_flight_, all);
  return text("expected {} pieces done, saw {}", all, std::min(done, all));
}

Status Core::check_start(const Transfer& transfer) const {
  if (closed_.load(std::memory_order_relaxed)) return closed_status();
  if (transfer.memory_ && !transfer.memory_->is_registered())
    return Status::invalid("memory: got memory that was unregistered, allowed: registered memory");
  auto check_peer = [&](const Peer& peer) {
    if (peer.is_alive()) return Status();
    return Status::make(Code::kPeerLost, "transfer.{}: peer '{}' is {}: {}", to_string(transfer.kind_),
                        peer.name(), to_string(peer.state()), peer.why().message());
  };
  if (transfer.peer_ && !transfer.peer_->is_alive()) return check_peer(*transfer.peer_);
  for (uint32_t target = 0; target <= transfer.more_.size(); ++target) {
    const std::shared_ptr<Remote>& remote = transfer.remote(target);
    if (!remote) continue;
    if (!remote->peer_->is_alive()) return check_peer(*remote->peer_);
    if (remote->is_revoked())
      return Status::invalid("remote: got memory that peer '{}' has taken back, allowed: a live descriptor",
                             remote->peer_->name());
  }
  return {};
}

void Core::begin_use(Transfer& transfer) {
  if (transfer.memory_) add(transfer.memory_->users_, 1);
  if (transfer.remote_) ++transfer.remote_->users_;
  for (auto& remote : transfer.more_) ++remote->users_;
}

void Core::end_use(Transfer& transfer) {
  if (transfer.memory_) add(transfer.memory_->users_, -1);
  auto end = [this](Remote& remote) {
    if (--remote.users_ == 0) answer_revoke_if_idle(remote);
  };
  if (transfer.remote_) end(*transfer.remote_);
  for (auto& remote : transfer.more_) end(*remote);
}

void Core::list_active(Transfer& transfer) {
  transfer.listed_ = true;
  transfer.active_prev_ = nullptr;
  transfer.active_next_ = active_;
  if (active_) active_->active_prev_ = &transfer;
  active_ = &transfer;
}

void Core::unlist_active(Transfer& transfer) {
  if (!transfer.listed_) return;
  transfer.listed_ = false;
  (transfer.active_prev_ ? transfer.active_prev_->active_next_ : active_) = transfer.active_next_;
  if (transfer.active_next_) transfer.active_next_->active_prev_ = transfer.active_prev_;
}

void Core::start(std::shared_ptr<Transfer> shared) {
  Transfer& transfer = *shared;  // which may end, and be dropped by everyone else, before this returns
  transfer.self_ = shared;
  begin_use(transfer);
  list_active(transfer);
  if (Status status = check_start(transfer); !status.ok()) return fail(transfer, std::move(status));
  if (transfer.kind_ == OpKind::kSend) return start_send(transfer);
  if (transfer.kind_ == OpKind::kRecv) return start_recv(transfer.self_);
  if (transfer.staged_) return staging_->start(transfer);
  if (transfer.kind_ == OpKind::kNotify) {
    transfer.next_piece_ = 1;
    transfer.notices_ = {0};
    transfer.notices_open_ = true;
  }
  const bool is_early =
      !waiting_.empty() || has_copied_enough() || (can_gather(transfer) && is_path_busy(transfer));
  if (is_early || !post_pieces(transfer, kPiecesPerTurn)) return wait_for_turn(transfer);
  if (transfer.in_flight_ == 0) settle(transfer);
}

// What a transfer's pieces have moved, for who asks how far it is.
void Core::note_moved(Transfer& transfer, uint64_t bytes, size_t pieces) {
  const auto add_to = [](auto& number, auto change) {
    number.store(number.load(std::memory_order_relaxed) + change, std::memory_order_relaxed);
  };
  add_to(transfer.bytes_done_, bytes);
  add_to(transfer.pieces_done_,
         std::min(static_cast<uint32_t>(pieces), transfer.pieces_in_all() - transfer.pieces_done()));
}

void Core::wait_for_turn(Transfer& transfer) {
  if (transfer.waiting_) return;
  transfer.waiting_ = true;
  waiting_.push_back(transfer.self_);
}

// Everything that is not posted is dropped; the transfer ends once the network has returned the rest.
void Core::fail(Transfer& transfer, Status status) {
  if (transfer.is_finished()) return;
  if (transfer.phase() != Phase::kDraining) {
    transfer.status_ = std::move(status);
    transfer.phase_.store(Phase::kDraining, std::memory_order_relaxed);
    transfer.next_piece_ = transfer.pieces();
    transfer.notices_.clear();
    transfer.next_notice_ = 0;
    if (transfer.staged_) staging_->give_up(transfer);
    transfer.packs_left_ = 0;
  }
  settle(transfer);
}

void Core::settle(Transfer& transfer) {
  if (transfer.in_flight_ || transfer.is_finished()) return;
  if (transfer.phase() == Phase::kDraining)
    return finish(transfer, transfer.cancelled_ ? Phase::kCancelled : Phase::kFailed, transfer.status_);
  if (transfer.next_piece_ < transfer.pieces() || transfer.packs_left_) return;
  if (transfer.next_notice_ < transfer.notices_.size()) {
    transfer.notices_open_ = true;
    return wait_for_turn(transfer);
  }
  finish(transfer, Phase::kDone, {});
}

void Core::count(const Transfer& transfer, bool is_done) {
  TallyOperation& kind = counted(transfer.kind_);
  count_up(kind.calls, 1);
  add_time(kind, tally_now_ns() - transfer.began_ns_);
  if (is_done)
    count_up(kind.bytes, transfer.bytes());
  else
    count_up(kind.errors, 1);
  const auto count_peer = [&](const std::shared_ptr<Peer>& peer, uint64_t bytes) {
    if (!peer || !peer->tally_) return;
    count_up(peer->tally_->messages, 1);
    if (is_done) count_up(peer->tally_->bytes, bytes);
  };
  if (transfer.more_.empty()) {
    count_peer(transfer.remote_ ? transfer.remote_->peer() : transfer.peer_, transfer.bytes());
    return;
  }
  for (size_t i = 0; i < transfer.pieces(); ++i)  // a scatter: to each of its targets
    count_peer(transfer.remote(transfer.piece(i).target)->peer(), transfer.piece(i).bytes);
}

void Core::finish(Transfer& transfer, Phase phase, Status status) {
  const std::shared_ptr<Transfer> keep = std::move(transfer.self_);
  if (transfer.kind_ == OpKind::kSend) {
    release_offer(transfer);
    by_request_.erase(transfer.request_id_);
  }
  if (transfer.kind_ == OpKind::kRecv && phase != Phase::kDone)
    receives_.erase(std::remove(receives_.begin(), receives_.end(), keep), receives_.end());
  count(transfer, phase == Phase::kDone);
  end_use(transfer);
  unlist_active(transfer);
  transfer.status_ = std::move(status);
  if (phase == Phase::kDone) {
    transfer.bytes_done_.store(transfer.bytes(), std::memory_order_relaxed);
    transfer.pieces_done_.store(transfer.pieces_in_all(), std::memory_order_relaxed);
  }
  transfer.phase_.store(phase, std::memory_order_release);
  if (transfer.counter_) {
    Counter& counter = *transfer.counter_;
    if (phase != Phase::kDone) {
      std::lock_guard lock(counter.mutex_);
      if (counter.failed_.load(std::memory_order_relaxed) == 0) counter.first_ = transfer.status_;
      counter.failed_.fetch_add(1, std::memory_order_release);
    }
    counter.finished_.fetch_add(1, std::memory_order_release);
  }
  if (transfer.callback_)
    callbacks.post([call = std::move(transfer.callback_), outcome = transfer.status_] { call(outcome); });
  // Last: a path that breaks here ends whatever is still listed.
  if (transfer.kind_ == OpKind::kRecv && transfer.is_offered_ && transfer.peer_->is_alive())
    send_message(*transfer.peer_, MessageType::kTaken,
                 to_body(Outcome{transfer.request_id_, 0, transfer.status_.message()}));
}

void Core::on_done(Transfer& transfer, std::function<void(const Status&)> callback) {
  HoldToken hold(token);
  if (transfer.is_finished()) {
    callbacks.post([call = std::move(callback), outcome = transfer.status_] { call(outcome); });
  } else if (!transfer.callback_) {
    transfer.callback_ = std::move(callback);
  } else {
    transfer.callback_ = [first = std::move(transfer.callback_),
                          second = std::move(callback)](const Status& status) {
      first(status);
      second(status);
    };
  }
}

// Gives up one of several transfers in a flight; the others still wait for its end.
void Core::leave_flight(Flight& flight, Transfer& transfer) {
  if (flight.transfer == &transfer && !transfer.next_gathered_)
    return;  // the last one: the flight is given up
  for (Transfer** at = &flight.transfer; *at; at = &(*at)->next_gathered_) {
    if (*at != &transfer) continue;
    *at = std::exchange(transfer.next_gathered_, nullptr);
    --transfer.in_flight_;
    return;
  }
}

void Core::orphan_flights_of(Transfer& transfer) {
  for (auto& block : flight_blocks_)
    for (uint32_t i = 0; i < kFlightBlock; ++i) {
      if (block[i].use == Flight::Use::kGathered) leave_flight(block[i], transfer);
      if (block[i].transfer == &transfer) orphan(block[i]);
    }
  for (OutMessage& message : out_messages_)
    if (message.transfer == &transfer) {
      message.transfer = nullptr;
      --transfer.in_flight_;
    }
}

void Core::check_deadlines(Clock::time_point now) {
  std::vector<std::shared_ptr<Transfer>> late;
  for (Transfer* t = active_; t; t = t->active_next_)
    if (t->deadline_ <= now) late.push_back(t->self_);
  for (auto& transfer : late) {
    if (transfer->is_finished()) continue;
    Status status = Status::make(Code::kPeerLost, "transfer.{}: waited {} s for {}: {}",
                                 to_string(transfer->kind_), seconds(now - transfer->submitted_),
                                 describe_peer(*transfer), describe_progress(*transfer));
    orphan_flights_of(*transfer);
    fail(*transfer, logged(std::move(status)));
  }
}

Phase Core::cancel(const std::shared_ptr<Transfer>& transfer) {
  HoldToken hold(token);
  start_submitted();
  const Phase found = transfer->phase();
  if (found >= Phase::kDraining) return found;
  transfer->cancelled_ = true;
  fail(*transfer, Status::make(Code::kClosed, "transfer.{}: cancelled", to_string(transfer->kind_)));
  return found;
}

}  // namespace weft::transfer
