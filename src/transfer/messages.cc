// SPDX-License-Identifier: Apache-2.0
//
// What peers say to each other: messages in order, once each, and what each of them means.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {

namespace {

constexpr size_t kEarlyMax = 4096;     // messages kept that overtook an earlier one
constexpr size_t kArrivedMax = 65536;  // messages kept that no recv() waits for

using Way = std::pair<Peer*, uint32_t>;  // and the local rail

bool is_sign(MessageType type) {
  return type == MessageType::kHeartbeat || type == MessageType::kBye;
}
bool is_ordered(MessageType type) {
  return type != MessageType::kHello && type != MessageType::kWelcome && !is_sign(type);
}

}  // namespace

void Core::send_message(Peer& peer, MessageType type, std::string_view body, Transfer* transfer,
                        uint32_t rail) {
  MessageHead head{type, id, peer.life_, 0, 0};
  if (is_ordered(type))
    head.sequence = peer.next_out_++;
  else
    drop_waiting(peer, type, rail);
  if (is_sign(type)) head.sequence = ++peer.last_sign_out_;
  if (transfer) ++transfer->in_flight_;
  std::string message = to_bytes(head, body);
  if (head.sequence) seal(message, peer.keys_out_.mac);
  out_messages_.push_back({&peer, std::move(message), transfer, rail});
  peer.sent_to_ = last_tick_;
  flush_messages();
}

// A heartbeat or a handshake that still waits for room says no more than the next one does. Without this, those to
// silent peers would pile up and take the room that comes.
void Core::drop_waiting(const Peer& peer, MessageType type, uint32_t rail) {
  const auto is_same = [&](const OutMessage& waiting) {
    return waiting.peer == &peer && waiting.rail == rail && parse_head(waiting.bytes)->type == type;
  };
  out_messages_.erase(std::remove_if(out_messages_.begin(), out_messages_.end(), is_same),
                      out_messages_.end());
}

void Core::flush_messages() {
  if (is_flushing_) return;  // a failing message may make the engine say something
  is_flushing_ = true;
  std::vector<Way> full;  // a path that takes nothing, perhaps for ever, must not hold up the others
  std::deque<OutMessage> later;
  while (!out_messages_.empty()) {
    OutMessage message = std::move(out_messages_.front());
    out_messages_.pop_front();
    const Way way{message.peer, rail_to(*message.peer, message.rail == kAnyRail ? 0 : message.rail)};
    const bool must_wait = std::find(full.begin(), full.end(), way) != full.end();
    if (!must_wait && post_message(message, way.second)) continue;
    if (!must_wait) full.push_back(way);
    if (message.peer->paths_.empty()) continue;  // lost while this was on its way
    later.push_back(std::move(message));
  }
  for (; !later.empty(); later.pop_back()) out_messages_.push_front(std::move(later.back()));
  is_flushing_ = false;
}

// False when there is no room; a message that cannot be posted at all costs the connection.
bool Core::post_message(OutMessage& message, uint32_t number) {
  RailState& state = rails[number];
  if (free_buffers_.empty() || state.in_flight >= state.in_flight_max) return false;
  if (message.peer->paths_.empty()) return true;  // lost in between
  Flight* flight = take_flight(message.transfer ? Flight::Use::kShortSend : Flight::Use::kMessage, number,
                               message.peer, message.transfer);
  flight->bytes = static_cast<uint32_t>(message.bytes.size());
  flight->buffer = free_buffers_.back();
  free_buffers_.pop_back();
  std::memcpy(flight->buffer, message.bytes.data(), message.bytes.size());
  const Posted posted = state.rail->post_send(message.peer->paths_[number].route, flight->buffer,
                                              message.bytes.size(), state.arena.lkey, flight);
  if (posted == Posted::kOk) {
    count_out(*flight, true);
    return true;
  }
  free_buffers_.push_back(flight->buffer);
  free_flight(flight);
  if (posted == Posted::kAgain || leave_broken_path(*message.peer, number)) return false;
  log_warn("transfer: a message to peer '{}' cannot be sent: {}", message.peer->name(),
           state.rail->refusal());
  if (message.transfer) {
    Transfer& transfer = *message.transfer;
    --transfer.in_flight_;
    message.transfer = nullptr;
    fail(transfer, Status::make(Code::kSystem, "transfer.{}: to peer '{}': {}", to_string(transfer.kind_),
                                message.peer->name(), state.rail->refusal()));
  }
  if (message.peer->is_alive())
    lose_peer(*message.peer, PeerState::kLost, Status(Code::kPeerLost, state.rail->refusal()));
  return true;
}

void Core::on_message(std::string_view message) {
  const auto head = parse_head(message);
  if (!head.ok()) return refusals_.warn("transfer: '{}' drops a message: {}", name, head.status().message());
  const std::string_view body = message.substr(kHeadBytes);
  if (head->type == MessageType::kHello) return on_hello(*head, body);
  const std::shared_ptr<Peer> peer = find_peer(head->sender);
  if (!peer || peer->state() >= PeerState::kLost) return;
  if (head->type == MessageType::kWelcome) {
    const auto hello = parse_hello(body);
    if (!hello.ok()) return refusals_.warn("transfer: a bad welcome: {}", hello.status().message());
    if (head->life < peer->life_ || !is_proven(*head, *hello)) return;
    const auto& ours = peer->nonces_;
    if (std::find(ours.begin(), ours.end(), hello->nonce) == ours.end()) return;
    become_connected(*peer, *hello, head->life);
    return on_ordered(*peer, {}, {});
  }
  if (head->life != peer->life_)
    return log_debug("transfer: a message of another life of '{}'", peer->name());
  if (!is_sealed(message, peer->keys_in_.mac))
    return refusals_.warn("transfer: '{}' drops a message that says it is of '{}', and is not", name,
                          peer->name());
  if (is_sign(head->type)) {
    if (head->sequence <= peer->last_sign_in_) return;  // again, or late
    peer->last_sign_in_ = head->sequence;
  }
  peer->heard_ = last_tick_;
  switch (head->type) {
    case MessageType::kHeartbeat:
      return;
    case MessageType::kBye:
      return on_bye(*peer, body);
    default:
      return on_ordered(*peer, *head, message);
  }
}

// Hands on messages in the order of their numbers, once each.
void Core::on_ordered(Peer& peer, const MessageHead& head, std::string_view message) {
  const std::shared_ptr<Peer> keep = find_peer(peer.engine_);
  if (!message.empty()) {
    if (head.sequence < peer.next_in_) return;  // again
    if (head.sequence > peer.next_in_ || !peer.is_alive()) {
      if (peer.early_.empty()) peer.gap_since_ = Clock::now();
      if (peer.early_.size() >= kEarlyMax)
        return lose_peer(peer, PeerState::kLost,
                         Status::make(Code::kPeerLost, "message {} is missing", peer.next_in_));
      peer.early_.emplace(head.sequence, std::string(message));
      return;
    }
    ++peer.next_in_;
    handle(keep, head, message.substr(kHeadBytes));
  }
  while (peer.is_alive() && !peer.early_.empty()) {
    const auto next = peer.early_.find(peer.next_in_);
    if (next == peer.early_.end()) return;
    const std::string bytes = std::move(next->second);
    peer.early_.erase(next);
    peer.gap_since_ = Clock::now();
    ++peer.next_in_;
    if (const auto again = parse_head(bytes); again.ok())
      handle(keep, *again, std::string_view(bytes).substr(kHeadBytes));
  }
}

void Core::handle(const std::shared_ptr<Peer>& peer, const MessageHead& head, std::string_view body) {
  auto use = [&](auto parsed, auto&& then) {
    if (parsed.ok()) return then(*parsed);
    lose_peer(*peer, PeerState::kLost, Status(Code::kPeerLost, parsed.status().message()));
  };
  auto take_in = [&](Arrived arrived) {
    for (auto at = receives_.begin(); at != receives_.end(); ++at) {
      if ((*at)->peer_ && (*at)->peer_ != peer) continue;
      const std::shared_ptr<Transfer> receive = std::move(*at);
      receives_.erase(at);
      return match(*receive, std::move(arrived));
    }
    if (arrived_.size() >= kArrivedMax)
      return lose_peer(*peer, PeerState::kLost,
                       Status::make(Code::kPeerLost, "{} messages wait for recv()", kArrivedMax));
    arrived_.push_back(std::move(arrived));
  };
  switch (head.type) {
    case MessageType::kEager:
      return take_in({peer, std::string(body), false, {}});
    case MessageType::kOffer:
      return use(parse_offer(body), [&](const Offer& offer) { take_in({peer, "", true, offer}); });
    case MessageType::kTaken:
      return use(parse_outcome(body), [&](const Outcome& outcome) {
        const auto found = by_request_.find(outcome.request_id);
        if (found == by_request_.end() || found->second->peer_ != peer) return;
        const std::shared_ptr<Transfer> transfer = found->second;
        transfer->packs_left_ = 0;
        if (outcome.refusal.empty()) return settle(*transfer);
        fail(*transfer, Status::make(Code::kCapacity, "transfer.send: peer '{}' refused it: {}", peer->name(),
                                     outcome.refusal));
      });
    case MessageType::kNotify:
      return use(parse_notify(body), [&](const Notified& n) { count_imm(*peer, n.key, n.count); });
    case MessageType::kAttach:
      return use(parse_attach(body), [&](const Attach& attach) { on_attach(*peer, attach); });
    case MessageType::kAttached:
      return use(parse_attached(body), [&](const Attached& a) { on_attached(a); });
    case MessageType::kRevoke:
      return use(parse_number(body), [&](uint64_t region) { on_revoke(*peer, region); });
    case MessageType::kRevoked:
      return use(parse_number(body), [&](uint64_t region) {
        const auto found = regions_.find(region);
        if (found == regions_.end() || !found->second.users.erase(peer.get())) return;
        if (found->second.users_left->load())
          found->second.users_left->fetch_sub(1, std::memory_order_release);
      });
    case MessageType::kStageAsk:
      return staging_->on_ask(*peer);
    case MessageType::kStageGrant:
      return use(parse_stage_grant(body), [&](const StageGrant& grant) { staging_->on_grant(*peer, grant); });
    case MessageType::kStageFilled:
      return use(parse_number(body),
                 [&](uint64_t slot) { staging_->on_filled(*peer, static_cast<uint32_t>(slot)); });
    case MessageType::kStageDone:
      return use(parse_outcome(body), [&](const Outcome& outcome) { staging_->on_done(*peer, outcome); });
    default:
      return;
  }
}

}  // namespace weft::transfer
