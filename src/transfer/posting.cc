// SPDX-License-Identifier: Apache-2.0
//
// Transfers that have something to post take turns: piece by piece, pages in runs, small writes gathered.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

constexpr uint32_t kPagesPerPost = 1024;
// Small writes over a path with so much under way wait for the next turn; from kGatheredMin on those that
// have come together until then travel as one message. Large ones gain nothing, and few ones would only be
// later.
constexpr uint32_t kBusyPath = 16;
constexpr uint32_t kGatheredMin = 4, kGatheredMax = 64;
constexpr uint64_t kGatheredBytesMax = 8192;  // of each

}  // namespace

void Core::pump() {
  for (size_t turns = waiting_.size(); turns > 0 && !has_copied_enough(); --turns) {
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
    if (quota-- == 0 || has_copied_enough()) return false;
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
  if (is_temporary(transfer, first)) return 1;
  const Peer& peer = peer_of(transfer, first.target);
  const uint32_t rail = rail_to(peer, first.rail);
  const uint32_t limit = std::min(kPagesPerPost, rails[rail].rail->pages_per_post(peer.paths_[rail].route));
  uint32_t run = 0;
  uint64_t bytes = 0;
  while (run < std::min<size_t>(limit, left)) {
    const Transfer::Piece& piece = transfer.piece(transfer.next_piece_ + run);
    bytes += piece.bytes;
    if (bytes > std::min(write_bytes_max_, kCopiedPerTurn)) break;
    if (piece.has_imm || piece.rail != first.rail || &peer_of(transfer, piece.target) != &peer) break;
    ++run;
  }
  return std::max(run, 1u);
}

// Either end: what must be able to stop.
bool Core::is_temporary(const Transfer& transfer, const Transfer::Piece& piece) {
  const std::shared_ptr<Remote>& remote = transfer.remote(piece.target);
  return ((transfer.memory_->access_ | remote->access_) & kTemporary) != 0;
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
      transfer.has_imm_ || is_temporary(transfer, transfer.first_) || transfer.next_piece_ > 0 ||
      transfer.bytes() > kGatheredBytesMax)
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
  Flight* flight = take_flight(Flight::Use::kPiece, rail, &peer, &transfer);
  flight->moved_pieces = run;
  for (uint32_t i = 0; i < run; ++i) {
    page_list_.push_back(wire_piece(transfer, transfer.piece(transfer.next_piece_ + i), rail));
    flight->moved_bytes += page_list_.back().bytes;
  }
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
    if (posted == Posted::kDone && flight->transfer)
      note_moved(*flight->transfer, flight->moved_bytes, flight->moved_pieces);
    if (posted == Posted::kDone) copied_ += flight->moved_bytes;
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
  flight->moved_bytes = piece.bytes;
  flight->moved_pieces = 1;
  provider::RmaOp op;
  op.to = peer.paths_[number].route;
  op.piece = wire_piece(transfer, piece, number);
  op.has_imm = piece.has_imm;
  if (piece.has_imm) op.imm = imm_to(peer, number, ImmClass::kCount, transfer.imm_key_);
  op.delivered = transfer.delivered_;
  op.context = flight;
  if (transfer.kind_ != OpKind::kWrite) return book(flight, rail.post_read(op));
  return book(flight, is_temporary(transfer, piece) ? rail.post_temporary(op) : rail.post_write(op));
}

// The immediate of a target whose bytes are all delivered.
Posted Core::post_notice(Transfer& transfer, uint32_t target) {
  Peer& peer = peer_of(transfer, target);
  if (!write_imm_) {
    transfer.phase_.store(Phase::kPosted, std::memory_order_relaxed);
    send_message(peer, MessageType::kNotify, to_body(Notified{transfer.imm_key_, 1}), &transfer);
    return Posted::kOk;
  }
  const uint32_t rail = rail_to(peer, transfer.first_.rail);
  if (!has_room(rail)) return Posted::kAgain;
  const RailKey& inbox = peer.inbox_[peer.paths_[rail].rail_there];
  Flight* flight = take_flight(Flight::Use::kNotice, rail, &peer, &transfer);
  provider::RmaOp op;
  op.to = peer.paths_[rail].route;
  op.piece = {inbox_page_.data(), rails[rail].inbox.lkey, inbox.base, inbox.rkey, 0};
  op.has_imm = true;
  op.imm = imm_to(peer, rail, key_class(transfer.imm_key_), imm_id(transfer.imm_key_));
  op.context = flight;
  peer.sent_to_ = last_tick_;
  return book(flight, rails[rail].rail->post_write(op));
}

}  // namespace weft::transfer
