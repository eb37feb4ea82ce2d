// SPDX-License-Identifier: Apache-2.0
//
// send() and recv(): small messages travel as they are, large ones are offered, and the receiver reads them.
#include <utility>

#include "base/log.h"
#include "transfer/copier.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {

void Core::start_send(Transfer& transfer) {
  transfer.next_piece_ = transfer.pieces();
  transfer.phase_.store(Phase::kPosted, std::memory_order_relaxed);
  Memory& memory = *transfer.memory_;
  char* from = static_cast<char*>(memory.range_.data) + transfer.first_.local;
  if (transfer.bytes() + kHeadBytes <= message_bytes_) {
    std::string payload(transfer.bytes(), '\0');
    if (Status status = copy_to_host(payload.data(), from, transfer.bytes(), memory.range_); !status.ok())
      return fail(transfer, std::move(status));
    return send_message(*transfer.peer_, MessageType::kEager, payload, &transfer);
  }
  if (memory.is_staged())
    return fail(transfer,
                Status::make(Code::kUnsupported,
                             "send: {} bytes of device memory that no NIC reaches, allowed: up to {} bytes; "
                             "write them instead",
                             transfer.bytes(), message_bytes_ - kHeadBytes));
  Offer offer{next_request_id_++, transfer.bytes(), {}};
  provider::Range range = memory.range_;
  range.data = from;
  range.bytes = transfer.bytes();
  for (RailState& state : rails) {
    auto made = state.rail->enroll(range, kRemoteRead | (memory.is_read_only() ? kReadOnly : 0u));
    if (!made.ok()) {
      release_offer(transfer);
      return fail(transfer, made.status());
    }
    transfer.offered_.push_back(*made);
    offer.rails.push_back({made->base, made->rkey});
  }
  transfer.request_id_ = offer.request_id;
  transfer.packs_left_ = 1;
  by_request_[offer.request_id] = transfer.self_;
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
  if (came > receive.bytes()) {
    Status status = Status::make(Code::kCapacity, "transfer.recv: peer '{}' sent {} bytes, allowed: up to {}",
                                 arrived.peer->name(), came, receive.bytes());
    if (arrived.is_offer)
      send_message(*arrived.peer, MessageType::kTaken,
                   to_body(Outcome{arrived.offer.request_id, 0, status.message()}));
    return fail(receive, std::move(status));
  }
  receive.bytes_.store(came, std::memory_order_relaxed);
  if (arrived.is_offer) return read_offer(receive, *arrived.peer, arrived.offer);
  char* to = static_cast<char*>(receive.memory_->range_.data) + receive.recv_offset_;
  if (Status status = copy_from_host(to, arrived.payload.data(), came, receive.memory_->range_); !status.ok())
    return fail(receive, std::move(status));
  finish(receive, Phase::kDone, {});
}

void Core::read_offer(Transfer& receive, Peer& peer, const Offer& offer) {
  receive.is_offered_ = true;
  receive.request_id_ = offer.request_id;
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
  receive.pieces_in_all_.store(static_cast<uint32_t>(shards.size()), std::memory_order_relaxed);
  wait_for_turn(receive);
}

}  // namespace weft::transfer
