// SPDX-License-Identifier: Apache-2.0
//
// Connections: hello, heartbeats, and the end of one life of a connection.
#include <algorithm>

#include "base/log.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

constexpr auto kHelloEvery = std::chrono::milliseconds(100);

Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

const char* to_string(PeerState state) {
  switch (state) {
    case PeerState::kConnecting:
      return "connecting";
    case PeerState::kConnected:
      return "connected";
    case PeerState::kLost:
      return "lost";
    case PeerState::kClosed:
      return "closed";
  }
  return "?";
}

std::shared_ptr<Peer> Core::find_peer(const EngineId& engine) const {
  const auto found = peers_.find(engine);
  return found == peers_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Peer>> Core::connected_peers() {
  HoldToken hold(token);
  std::vector<std::shared_ptr<Peer>> alive;
  for (auto& [engine, peer] : peers_)
    if (peer->is_alive()) alive.push_back(peer);
  return alive;
}

// A peer, connecting, with routes and a slot; known ones get new ones.
Result<std::shared_ptr<Peer>> Core::make_peer(const Address& address) {
  for (auto at = peers_.begin(); at != peers_.end();)  // forget the dead whom nobody holds
    at = at->second->state() >= PeerState::kLost && at->second.use_count() == 1 ? peers_.erase(at)
                                                                                : std::next(at);
  uint32_t slot = kPeersMax;
  for (uint32_t i = 0; i < kPeersMax && slot == kPeersMax; ++i)
    if (const uint32_t candidate = (next_slot_ + i) % kPeersMax; !slots_[candidate]) slot = candidate;
  if (slot == kPeersMax)
    return Status::make(Code::kCapacity, "peers: {} are connected, allowed: {}", kPeersMax, kPeersMax);
  std::shared_ptr<Peer> peer = find_peer(address.engine);
  if (!peer) peer = std::make_shared<Peer>();
  peer->engine_ = address.engine;
  peer->maker_ = serial;
  peer->name_ = address.name;
  peer->address_ = address;
  WEFT_TRY(route_to(*peer));
  peer->slot_here_ = slot;
  peer->next_out_ = peer->next_in_ = 1;
  peer->messages_out_ = 0;
  peer->heard_ = peer->told_ = Clock::now();
  {
    std::lock_guard lock(peer->why_mutex_);
    peer->why_ = {};
  }
  peer->state_.store(PeerState::kConnecting, std::memory_order_release);
  next_slot_ = (slot + 1) % kPeersMax;  // a freed slot rests: late immediates of its former owner find nobody
  slots_[slot] = peer.get();
  peers_[address.engine] = peer;
  return peer;
}

// Local rail i talks to remote rail i, or i modulo theirs; remote rails beyond ours are resolved as well,
// because some networks let only known initiators write.
Status Core::route_to(Peer& peer) {
  const std::vector<std::string>& there = peer.address_.rails;
  peer.routes_.clear();
  peer.rail_there_.clear();
  peer.more_routes_.clear();
  for (uint32_t i = 0; i < rail_count(); ++i) {
    const uint32_t remote = i % static_cast<uint32_t>(there.size());
    WEFT_TRY_ASSIGN(const provider::Route route, rails[i].rail->resolve(there[remote]));
    peer.routes_.push_back(route);
    peer.rail_there_.push_back(remote);
  }
  for (uint32_t k = rail_count(); k < there.size(); ++k) {
    const uint32_t i = k % rail_count();
    WEFT_TRY_ASSIGN(const provider::Route route, rails[i].rail->resolve(there[k]));
    peer.more_routes_.emplace_back(i, route);
  }
  return {};
}

std::string Core::hello_body(const Peer& peer) const {
  Hello hello{{id, name.substr(0, kNameBytesMax), options.provider->name(), {}}, peer.slot_here_, {}};
  for (const RailState& state : rails) {
    hello.address.rails.push_back(state.address);
    hello.inbox.push_back({state.inbox.base, state.inbox.rkey});
  }
  return to_body(hello);
}

Result<std::shared_ptr<Peer>> Core::connect(std::string_view bytes, Deadline until) {
  WEFT_TRY_ASSIGN(const Address address, parse_address(bytes));
  if (address.engine == id)
    return Status::invalid("address: got this engine's own, allowed: another engine's");
  if (address.provider != options.provider->name())
    return Status::invalid("address: got one of provider {}, allowed: {}, which this engine uses",
                           address.provider, options.provider->name());
  std::shared_ptr<Peer> peer;
  {
    HoldToken hold(token);
    if (is_closed()) return closed_status();
    peer = find_peer(address.engine);
    if (!peer || peer->state() >= PeerState::kLost) {
      const uint32_t life = peer ? peer->life_ + 1 : 1;
      WEFT_TRY_ASSIGN(peer, make_peer(address));
      peer->life_ = life;
    }
  }
  auto next_hello = Clock::now();
  auto pause = std::chrono::duration_cast<Clock::duration>(kHelloEvery);
  const bool is_settled = wait(until, [&] {
    if (peer->state() != PeerState::kConnecting || is_closed()) return true;
    if (const auto now = Clock::now(); now >= next_hello) {
      HoldToken hold(token);
      if (peer->state() == PeerState::kConnecting)
        send_message(*peer, MessageType::kHello, hello_body(*peer));
      next_hello = now + pause;
      pause = std::min(pause * 2, to_duration(2.0));
    }
    return false;
  });
  if (peer->is_alive()) return peer;
  if (is_closed()) return closed_status();
  if (is_settled)
    return Status::make(Code::kPeerLost, "transfer.connect: peer '{}': {}", address.name,
                        peer->why().message());
  Status status =
      Status::make(Code::kPeerLost, "transfer.connect: no answer of peer '{}' ({}) over {} in time",
                   address.name, to_text(address.engine), address.provider);
  HoldToken hold(token);
  if (peer->state() == PeerState::kConnecting) lose_peer(*peer, PeerState::kLost, status);
  return peer->is_alive() ? Result<std::shared_ptr<Peer>>(peer) : logged(std::move(status));
}

void Core::on_hello(const MessageHead& head, std::string_view body) {
  auto hello = parse_hello(body);
  if (!hello.ok() || !(hello->address.engine == head.sender) || head.sender == id)
    return log_warn("transfer: a bad hello: {}",
                    hello.ok() ? "not from whom it says" : hello.status().message());
  std::shared_ptr<Peer> peer = find_peer(head.sender);
  const bool is_new_life = !peer || peer->state() >= PeerState::kLost || head.life > peer->life_;
  if (peer && is_new_life && peer->state() <= PeerState::kConnected) {
    if (peer->state() == PeerState::kConnecting) {  // both call at once: theirs is the later life
      peer->life_ = head.life;
    } else {
      lose_peer(*peer, PeerState::kLost, Status(Code::kPeerLost, "it connected anew"));
    }
  }
  if (!peer || peer->state() >= PeerState::kLost) {
    const uint32_t life = std::max(head.life, peer ? peer->life_ + 1 : 1);
    auto made = make_peer(hello->address);
    if (!made.ok())
      return log_warn("transfer: cannot take '{}': {}", hello->address.name, made.status().message());
    peer = *made;
    peer->life_ = life;
  }
  become_connected(*peer, *hello, peer->life_);
  send_message(*peer, MessageType::kWelcome,
               hello_body(*peer));  // again for every hello: the last may be lost
  on_ordered(*peer, {}, {});
}

void Core::become_connected(Peer& peer, const Hello& hello, uint32_t life) {
  peer.heard_ = Clock::now();
  if (peer.state() != PeerState::kConnecting) return;
  peer.life_ = life;
  peer.slot_there_ = hello.slot;
  peer.inbox_ = hello.inbox;
  peer.state_.store(PeerState::kConnected, std::memory_order_release);
  log_info("transfer: '{}' is connected to peer '{}' ({}), life {}", name, peer.name(), peer.id(),
           peer.life_);
}

void Core::disconnect(const std::shared_ptr<Peer>& peer) {
  HoldToken hold(token);
  if (!peer->is_alive()) return;
  send_message(*peer, MessageType::kBye, "");
  for (int i = 0; i < 64; ++i) {
    flush_messages();
    poll_rails();
  }
  if (peer->is_alive())
    lose_peer(*peer, PeerState::kClosed, Status(Code::kPeerLost, "this side disconnected"));
}

// Ends one life of a connection: everything that involves the peer fails with its name, nothing else does.
void Core::lose_peer(Peer& peer, PeerState state, Status why) {
  if (peer.state() >= PeerState::kLost) return;
  const std::shared_ptr<Peer> keep = find_peer(peer.engine_);
  {
    std::lock_guard lock(peer.why_mutex_);
    peer.why_ = why;
  }
  peer.state_.store(state, std::memory_order_release);
  log_info("transfer: '{}' lost peer '{}' ({}): {}", name, peer.name(), peer.id(), why.message());
  slots_[peer.slot_here_] = nullptr;
  for (auto at = out_messages_.begin(); at != out_messages_.end();) {
    if (at->peer != &peer) {
      ++at;
      continue;
    }
    if (at->transfer) --at->transfer->in_flight_;
    at = out_messages_.erase(at);
  }
  for (auto& block : flight_blocks_)
    for (uint32_t i = 0; i < kFlightBlock; ++i)
      if (block[i].peer == &peer) orphan(block[i]);
  arrived_.erase(std::remove_if(arrived_.begin(), arrived_.end(),
                                [&](const Arrived& a) { return a.peer.get() == &peer && a.is_offer; }),
                 arrived_.end());
  std::vector<std::shared_ptr<Transfer>> involved;
  for (Transfer* t = active_; t; t = t->active_next_)
    if (involves(*t, peer)) involved.push_back(t->self_);
  for (auto& transfer : involved)
    if (!transfer->is_finished())
      fail(*transfer,
           Status::make(Code::kPeerLost, "transfer.{}: peer '{}' is lost: {}; {}", to_string(transfer->kind_),
                        peer.name(), why.message(), describe_progress(*transfer)));
  for (auto& [ticket, pending] : attaches_) {
    if (pending->peer.get() != &peer) continue;
    pending->status =
        Status::make(Code::kPeerLost, "transfer.attach: peer '{}' is lost: {}", peer.name(), why.message());
    pending->is_answered.store(true, std::memory_order_release);
  }
  for (auto& [region, entry] : regions_)
    if (entry.users.erase(&peer))
      entry.users_left->fetch_sub(entry.users_left->load() ? 1 : 0, std::memory_order_release);
  for (auto& [region, weak] : peer.remotes_)
    if (auto remote = weak.lock()) remote->revoked_.store(true, std::memory_order_release);
  peer.remotes_.clear();
  for (auto& [imm, counter] : peer.imms_) {
    counter->why_ = Status::make(Code::kPeerLost, "peer '{}' is lost: {}", peer.name(), why.message());
    counter->lost_.store(true, std::memory_order_release);
    for (auto& reach : counter->reaches_)
      callbacks.post([call = std::move(reach.callback), status = counter->why_] { call(status); });
    counter->reaches_.clear();
  }
  peer.imms_.clear();
  peer.early_.clear();
  for (auto at = barrier_rounds_.begin(); at != barrier_rounds_.end();)
    at = at->first.first == &peer ? barrier_rounds_.erase(at) : std::next(at);
  staging_->drop(peer);
  for (uint32_t i = 0; i < peer.routes_.size(); ++i) rails[i].rail->forget(peer.routes_[i]);
  for (auto& [rail, route] : peer.more_routes_) rails[rail].rail->forget(route);
  peer.routes_.clear();
  peer.more_routes_.clear();
}

// Heartbeats out, silence in. `slept`: since the last look; a process that was stopped must not blame its
// peers.
void Core::check_peers(Clock::time_point now, Clock::duration slept) {
  const Clock::duration dead_after = to_duration(options.peer_dead_s);
  std::vector<std::pair<std::shared_ptr<Peer>, std::string>> lost;
  for (auto& [engine, peer] : peers_) {
    if (!peer->is_alive()) continue;
    if (slept > dead_after / 4) peer->heard_ += slept;
    // What a silent peer has not taken yet will tell it as much as another heartbeat.
    if (now - peer->told_ >= to_duration(options.heartbeat_s) && peer->messages_out_ == 0)
      send_message(*peer, MessageType::kHeartbeat, "");
    if (now - peer->heard_ > dead_after)
      lost.emplace_back(peer, text("no sign of life for {} s", options.peer_dead_s));
    else if (!peer->early_.empty() && now - peer->gap_since_ > dead_after)
      lost.emplace_back(peer,
                        text("a message is missing: expected number {}, saw later ones", peer->next_in_));
  }
  for (auto& [peer, why] : lost) lose_peer(*peer, PeerState::kLost, logged(Status(Code::kPeerLost, why)));
}

}  // namespace weft::transfer
