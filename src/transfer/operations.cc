// SPDX-License-Identifier: Apache-2.0
//
// The life of a transfer: start, post piece by piece, settle when the network is through, finish once.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "transfer/copier.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

constexpr uint32_t kPiecesPerTurn = 32;  // of one transfer, before others get theirs
constexpr uint32_t kPagesPerPost = 1024;
// Small writes over a path with so much under way wait for the next turn; from kGatheredMin on those that
// have come together until then travel as one message. Large ones gain nothing, and few ones would only be
// later.
constexpr uint32_t kBusyPath = 16;
constexpr uint32_t kGatheredMin = 4, kGatheredMax = 64;
constexpr uint64_t kGatheredBytesMax = 8192;  // of each

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
  const bool is_early = !waiting_.empty() || (can_gather(transfer) && is_path_busy(transfer));
  if (is_early || !post_pieces(transfer, kPiecesPerTurn)) return wait_for_turn(transfer);
  if (transfer.in_flight_ == 0) settle(transfer);
}

void Core::wait_for_turn(Transfer& transfer) {
  if (transfer.waiting_) return;
  transfer.waiting_ = true;
  waiting_.push_back(transfer.self_);
}

void Core::pump() {
  for (size_t turns = waiting_.size(); turns > 0; --turns) {
    if (const size_t gathered = post_gathered(turns); gathered > 0) {
      turns -= gathered - 1;
      continue;
    }
    std::shared_ptr<Transfer> transfer = std::move(waiting_.front());
    waiting_.pop_front();
    const bool is_over = transfer->phase() >= Phase::kDraining;
    if (!is_over && !post_pieces(*transfer, kPiecesPerTurn)) {
      waiting_.push_back(std::move(transfer));
      continue;
    }
    transfer->waiting_ = false;
    if (!is_over) settle(*transfer);
  }
}

// False when something is left that has no room now or has had its turn.
bool Core::post_pieces(Transfer& transfer, uint32_t quota) {
  while (transfer.next_piece_ < transfer.pieces()) {
    if (quota-- == 0) return false;
    const Transfer::Piece& piece = transfer.piece(transfer.next_piece_);
    Peer& peer = peer_of(transfer, piece.target);
    const uint32_t rail = rail_to(peer, piece.rail);
    const uint32_t run = page_run(transfer);
    const Posted posted = run > 1 ? post_page_run(transfer, run) : post_piece(transfer, piece);
    if (posted == Posted::kAgain) return false;
    if (posted == Posted::kFatal) {
      if (leave_broken_path(peer, rail)) continue;
      if (transfer.phase() >= Phase::kDraining) return true;  // with its peer
      fail(transfer,
           Status::make(Code::kSystem, "transfer.{}: to peer '{}' on {}: {}", to_string(transfer.kind_),
                        peer.name(), rails[rail].rail->nic().name, rails[rail].rail->refusal()));
      return true;
    }
    transfer.next_piece_ += run;
  }
  while (transfer.notices_open_ && transfer.next_notice_ < transfer.notices_.size()) {
    Peer& peer = peer_of(transfer, transfer.notices_[transfer.next_notice_]);
    const uint32_t rail = rail_to(peer, transfer.first_.rail);
    const Posted posted = post_notice(transfer, transfer.notices_[transfer.next_notice_]);
    if (posted == Posted::kAgain) return false;
    if (posted == Posted::kFatal) {
      if (leave_broken_path(peer, rail)) continue;
      if (transfer.phase() >= Phase::kDraining) return true;  // with its peer
      fail(transfer, Status::make(Code::kSystem, "transfer.{}: immediate to {}: refused",
                                  to_string(transfer.kind_), describe_peer(transfer)));
      return true;
    }
    ++transfer.next_notice_;
  }
  return true;
}

bool Core::has_room(uint32_t rail) const {
  const RailState& state = rails[rail];
  const uint32_t reserved = state.in_flight_max / 8;  // messages must get through
  return state.in_flight + reserved < state.in_flight_max;
}

uint32_t Core::rail_to(const Peer& peer, uint32_t rail) const {
  for (uint32_t i = 0; i < peer.paths_.size() && peer.paths_[rail].is_down; ++i)
    rail = (rail + 1) % static_cast<uint32_t>(peer.paths_.size());
  return rail;
}

// After a post was refused: whether that was because the path is broken, and another one is left to try.
bool Core::leave_broken_path(Peer& peer, uint32_t rail) {
  if (!rails[rail].rail->is_route_broken()) return false;
  lose_path(peer, rail, rails[rail].rail->refusal());
  return peer.is_alive();
}

// Pieces from the next one on that one post_pages() can take.
uint32_t Core::page_run(const Transfer& transfer) const {
  const size_t left = transfer.pieces() - transfer.next_piece_;
  if (left < 2 || transfer.kind_ != OpKind::kWrite) return 1;
  const Transfer::Piece& first = transfer.piece(transfer.next_piece_);
  const Peer& peer = peer_of(transfer, first.target);
  const uint32_t rail = rail_to(peer, first.rail);
  const uint32_t limit = std::min(kPagesPerPost, rails[rail].rail->pages_per_post(peer.paths_[rail].route));
  uint32_t run = 0;
  while (run < std::min<size_t>(limit, left)) {
    const Transfer::Piece& piece = transfer.piece(transfer.next_piece_ + run);
    if (piece.has_imm || piece.rail != first.rail || &peer_of(transfer, piece.target) != &peer) break;
    ++run;
  }
  return std::max(run, 1u);
}

provider::Piece Core::wire_piece(const Transfer& transfer, const Transfer::Piece& piece,
                                 uint32_t rail) const {
  const Remote& remote = *transfer.remote(piece.target);
  const RailKey& there = remote.rails_[remote.peer_->paths_[rail].rail_there];
  return {static_cast<char*>(transfer.memory_->range_.data) + piece.local,
          transfer.memory_->rails_[rail].lkey, there.base + piece.remote, there.rkey, piece.bytes};
}

// One small write without an immediate, not posted yet, over a rail that carries several as one message.
bool Core::can_gather(const Transfer& transfer) const {
  if (transfer.kind_ != OpKind::kWrite || transfer.phase() != Phase::kQueued || transfer.pieces() != 1 ||
      transfer.has_imm_ || transfer.next_piece_ > 0 || transfer.bytes_ > kGatheredBytesMax)
    return false;
  const Peer& peer = *transfer.remote_->peer_;
  const uint32_t number = rail_to(peer, transfer.first_.rail);
  const Rail& rail = *rails[number].rail;
  return rail.caps().pages_apart && rail.pages_per_post(peer.paths_[number].route) > 1;
}

bool Core::is_path_busy(const Transfer& transfer) const {
  const Peer& peer = *transfer.remote_->peer_;
  const Peer::Path& path = peer.paths_[rail_to(peer, transfer.first_.rail)];
  return path.in_flight + (path.at_once_turn == turn_ ? path.at_once : 0) >= kBusyPath;
}

// How many of the waiting transfers, from the first one on, can travel as one message.
size_t Core::count_gathered(size_t limit) const {
  if (limit < kGatheredMin || !can_gather(*waiting_.front())) return 0;
  const Peer& peer = *waiting_.front()->remote_->peer_;
  const uint32_t rail = rail_to(peer, waiting_.front()->first_.rail);
  size_t run = 1;
  for (; run < std::min<size_t>(limit, kGatheredMax); ++run) {
    const Transfer& next = *waiting_[run];
    if (!can_gather(next) || next.remote_->peer_.get() != &peer || rail_to(peer, next.first_.rail) != rail)
      break;
  }
  return run < kGatheredMin ? 0 : run;
}

// Posts waiting transfers as one message; how many, which may be none.
size_t Core::post_gathered(size_t limit) {
  const size_t run = count_gathered(limit);
  if (run == 0) return 0;
  Peer& peer = *waiting_.front()->remote_->peer_;
  const uint32_t rail = rail_to(peer, waiting_.front()->first_.rail);
  if (!has_room(rail)) return 0;
  page_list_.clear();
  for (size_t i = 0; i < run; ++i) page_list_.push_back(wire_piece(*waiting_[i], waiting_[i]->first_, rail));
  Flight* flight = take_flight(Flight::Use::kGathered, rail, &peer, nullptr);
  flight->carries = static_cast<uint32_t>(run);
  const Posted posted = book(flight, rails[rail].rail->post_pages(peer.paths_[rail].route, page_list_.data(),
                                                                  flight->carries, flight));
  if (posted > Posted::kDone) return 0;
  for (size_t i = 0; i < run; ++i) {
    const std::shared_ptr<Transfer> transfer = std::move(waiting_.front());
    waiting_.pop_front();
    transfer->waiting_ = false;
    transfer->next_piece_ = 1;
    transfer->phase_.store(Phase::kPosted, std::memory_order_relaxed);
    if (posted == Posted::kDone) {
      settle(*transfer);
      continue;
    }
    transfer->in_flight_ = 1;
    transfer->next_gathered_ = std::exchange(flight->transfer, transfer.get());
  }
  return run;
}

Posted Core::post_page_run(Transfer& transfer, uint32_t run) {
  const Transfer::Piece& first = transfer.piece(transfer.next_piece_);
  Peer& peer = peer_of(transfer, first.target);
  const uint32_t rail = rail_to(peer, first.rail);
  if (!has_room(rail)) return Posted::kAgain;
  page_list_.clear();
  for (uint32_t i = 0; i < run; ++i)
    page_list_.push_back(wire_piece(transfer, transfer.piece(transfer.next_piece_ + i), rail));
  Flight* flight = take_flight(Flight::Use::kPiece, rail, &peer, &transfer);
  return book(flight, rails[rail].rail->post_pages(peer.paths_[rail].route, page_list_.data(), run, flight));
}

// After a post: counts what the network has taken; everything else gives its flight back.
Posted Core::book(Flight* flight, Posted posted) {
  if (flight->transfer && posted <= Posted::kDone)
    flight->transfer->phase_.store(Phase::kPosted, std::memory_order_relaxed);
  if (posted == Posted::kOk) {
    count_out(*flight, true);
    if (flight->transfer) ++flight->transfer->in_flight_;
  } else {
    if (posted == Posted::kDone && flight->peer) count_at_once(flight->peer->paths_[flight->rail]);
    free_flight(flight);
  }
  return posted;
}

void Core::count_at_once(Peer::Path& path) {
  if (path.at_once_turn != turn_) path.at_once = 0;
  path.at_once_turn = turn_;
  ++path.at_once;
}

Posted Core::post_piece(Transfer& transfer, const Transfer::Piece& piece) {
  Peer& peer = *transfer.remote(piece.target)->peer_;
  const uint32_t number = rail_to(peer, piece.rail);
  if (!has_room(number)) return Posted::kAgain;
  Rail& rail = *rails[number].rail;
  Flight* flight = take_flight(Flight::Use::kPiece, number, &peer, &transfer);
  provider::RmaOp op;
  op.to = peer.paths_[number].route;
  op.piece = wire_piece(transfer, piece, number);
  op.has_imm = piece.has_imm;
  if (piece.has_imm) op.imm = encode_imm(ImmClass::kCount, peer.slot_there_, transfer.imm_key_);
  op.delivered = transfer.delivered_;
  op.context = flight;
  return book(flight, transfer.kind_ == OpKind::kWrite ? rail.post_write(op) : rail.post_read(op));
}

// The immediate of a target whose bytes are all delivered.
Posted Core::post_notice(Transfer& transfer, uint32_t target) {
  Peer& peer = peer_of(transfer, target);
  if (!write_imm_) {
    transfer.phase_.store(Phase::kPosted, std::memory_order_relaxed);
    send_message(peer, MessageType::kNotify, to_body(Notified{transfer.imm_key_, 1}), &transfer);
    return Posted::kOk;
  }
  const uint32_t imm = encode_imm(key_class(transfer.imm_key_), peer.slot_there_, imm_id(transfer.imm_key_));
  return post_imm(peer, imm, transfer, transfer.first_.rail);
}

Posted Core::post_imm(Peer& peer, uint32_t imm, Transfer& transfer, uint32_t wanted_rail) {
  const uint32_t rail = rail_to(peer, wanted_rail);
  if (!has_room(rail)) return Posted::kAgain;
  const RailKey& inbox = peer.inbox_[peer.paths_[rail].rail_there];
  Flight* flight = take_flight(Flight::Use::kNotice, rail, &peer, &transfer);
  provider::RmaOp op;
  op.to = peer.paths_[rail].route;
  op.piece = {inbox_page_.data(), rails[rail].inbox.lkey, inbox.base, inbox.rkey, 0};
  op.has_imm = true;
  op.imm = imm;
  op.context = flight;
  peer.told_ = last_tick_;
  return book(flight, rails[rail].rail->post_write(op));
}

void Core::start_send(Transfer& transfer) {
  transfer.next_piece_ = transfer.pieces();
  transfer.phase_.store(Phase::kPosted, std::memory_order_relaxed);
  Memory& memory = *transfer.memory_;
  char* from = static_cast<char*>(memory.range_.data) + transfer.first_.local;
  if (transfer.bytes_ + kHeadBytes <= message_bytes_) {
    std::string payload(transfer.bytes_, '\0');
    if (Status status = copy_to_host(payload.data(), from, transfer.bytes_, memory.range_); !status.ok())
      return fail(transfer, std::move(status));
    return send_message(*transfer.peer_, MessageType::kEager, payload, &transfer);
  }
  if (memory.is_staged())
    return fail(transfer,
                Status::make(Code::kUnsupported,
                             "send: {} bytes of device memory that no NIC reaches, allowed: up to {} bytes; "
                             "write them instead",
                             transfer.bytes_, message_bytes_ - kHeadBytes));
  Offer offer{next_ticket_++, transfer.bytes_, {}};
  provider::Range range = memory.range_;
  range.data = from;
  range.bytes = transfer.bytes_;
  for (RailState& state : rails) {
    auto made = state.rail->enroll(range, kRemoteRead);
    if (!made.ok()) {
      release_offer(transfer);
      return fail(transfer, made.status());
    }
    transfer.offered_.push_back(*made);
    offer.rails.push_back({made->base, made->rkey});
  }
  transfer.ticket_ = offer.ticket;
  transfer.packs_left_ = 1;
  by_ticket_[offer.ticket] = transfer.self_;
  send_message(*transfer.peer_, MessageType::kOffer, to_body(offer));
}

void Core::release_offer(Transfer& transfer) {
  for (size_t i = 0; i < transfer.offered_.size(); ++i) rails[i].rail->release(transfer.offered_[i]);
  transfer.offered_.clear();
}

void Core::start_recv(std::shared_ptr<Transfer> transfer) {
  for (auto at = arrived_.begin(); at != arrived_.end(); ++at) {
    if (transfer->peer_ && transfer->peer_ != at->peer) continue;
    Arrived arrived = std::move(*at);
    arrived_.erase(at);
    return match(*transfer, std::move(arrived));
  }
  receives_.push_back(std::move(transfer));
}

void Core::match(Transfer& receive, Arrived arrived) {
  receive.peer_ = arrived.peer;
  if (!receive.memory_->is_registered()) return fail(receive, Status::invalid("memory: was unregistered"));
  const uint64_t came = arrived.is_offer ? arrived.offer.bytes : arrived.payload.size();
  if (came > receive.bytes_) {
    Status status = Status::make(Code::kCapacity, "transfer.recv: peer '{}' sent {} bytes, allowed: up to {}",
                                 arrived.peer->name(), came, receive.bytes_);
    if (arrived.is_offer)
      send_message(*arrived.peer, MessageType::kTaken,
                   to_body(Outcome{arrived.offer.ticket, 0, status.message()}));
    return fail(receive, std::move(status));
  }
  receive.bytes_ = came;
  if (arrived.is_offer) return read_offer(receive, *arrived.peer, arrived.offer);
  char* to = static_cast<char*>(receive.memory_->range_.data) + receive.recv_offset_;
  if (Status status = copy_from_host(to, arrived.payload.data(), came, receive.memory_->range_); !status.ok())
    return fail(receive, std::move(status));
  finish(receive, Phase::kDone, {});
}

void Core::read_offer(Transfer& receive, Peer& peer, const Offer& offer) {
  receive.is_offered_ = true;
  receive.ticket_ = offer.ticket;
  if (receive.memory_->is_staged())
    return fail(receive, Status::make(Code::kUnsupported,
                                      "recv: {} bytes into device memory that no NIC reaches; let "
                                      "the peer write them instead",
                                      offer.bytes));
  if (offer.rails.size() != peer.address_.rails.size())
    return fail(receive, Status::invalid("recv: peer '{}' offered keys for {} rails, it has {}", peer.name(),
                                         offer.rails.size(), peer.address_.rails.size()));
  receive.remote_ = std::make_shared<Remote>();
  receive.remote_->peer_ = receive.peer_;
  receive.remote_->bytes_ = offer.bytes;
  receive.remote_->rails_ = offer.rails;
  receive.remote_->users_ = 1;
  const RailPlan plan{rail_count(), options.shard_bytes_min, write_bytes_max_};
  const std::vector<Shard> shards = shard_range(offer.bytes, plan, 0);
  for (size_t i = 0; i < shards.size(); ++i) {
    const Transfer::Piece piece{receive.recv_offset_ + shards[i].offset,
                                shards[i].offset,
                                shards[i].bytes,
                                0,
                                static_cast<uint16_t>(shards[i].rail),
                                false};
    if (i == 0)
      receive.first_ = piece;
    else
      receive.rest_.push_back(piece);
  }
  wait_for_turn(receive);
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
    count_up(kind.bytes, transfer.bytes_);
  else
    count_up(kind.errors, 1);
  const auto count_peer = [&](const std::shared_ptr<Peer>& peer, uint64_t bytes) {
    if (!peer || !peer->tally_) return;
    count_up(peer->tally_->messages, 1);
    if (is_done) count_up(peer->tally_->bytes, bytes);
  };
  if (transfer.more_.empty()) {
    count_peer(transfer.remote_ ? transfer.remote_->peer() : transfer.peer_, transfer.bytes_);
    return;
  }
  for (size_t i = 0; i < transfer.pieces(); ++i)  // a scatter: to each of its targets
    count_peer(transfer.remote(transfer.piece(i).target)->peer(), transfer.piece(i).bytes);
}

void Core::finish(Transfer& transfer, Phase phase, Status status) {
  const std::shared_ptr<Transfer> keep = std::move(transfer.self_);
  if (transfer.kind_ == OpKind::kSend) {
    release_offer(transfer);
    by_ticket_.erase(transfer.ticket_);
  }
  if (transfer.kind_ == OpKind::kRecv) {
    if (transfer.is_offered_ && transfer.peer_->is_alive())
      send_message(*transfer.peer_, MessageType::kTaken,
                   to_body(Outcome{transfer.ticket_, 0, status.message()}));
    if (phase != Phase::kDone)
      receives_.erase(std::remove(receives_.begin(), receives_.end(), keep), receives_.end());
  }
  count(transfer, phase == Phase::kDone);
  end_use(transfer);
  unlist_active(transfer);
  transfer.status_ = std::move(status);
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
