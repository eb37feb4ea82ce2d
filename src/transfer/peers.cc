// SPDX-License-Identifier: Apache-2.0
//
// Connections: hello, heartbeats, and the end of one life of a connection.
#include <algorithm>

#include "base/log.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

constexpr size_t kSpentMax = 4096;
constexpr size_t kKnownNonces = 64;
constexpr auto kHelloEvery = std::chrono::milliseconds(100);
constexpr auto kLookEvery = std::chrono::milliseconds(50);
constexpr auto kLastWords = std::chrono::milliseconds(150);  // for what a peer sent before its process ended

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
  for (auto at = peers_.begin(); at != peers_.end();)  // forget dead peers without a handle
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
  peer->tally_ = &tally_peer(address.name, options.provider->name());
  peer->address_ = address;
  peer->nonces_.clear();
  peer->nonce_there_ = random_nonce();  // none that was heard
  WEFT_TRY(route_to(*peer));
  peer->slot_here_ = slot;
  peer->salt_here_ = random_nonce();
  peer->keys_in_ = sender_keys(options.secret, address.engine, id, peer->salt_here_);
  peer->next_out_ = peer->next_in_ = 1;
  peer->last_sign_out_ = peer->last_sign_in_ = 0;
  peer->heard_ = peer->sent_to_ = Clock::now();
  peer->process_ = NamedProcess(address.process);
  peer->ended_ = {};
  {
    std::lock_guard lock(peer->why_mutex_);
    peer->why_ = {};
  }
  peer->state_.store(PeerState::kConnecting, std::memory_order_release);
  next_slot_ = (slot + 1) % kPeersMax;  // a freed slot rests: late immediates of its former owner hit no peer
  slots_[slot] = peer.get();
  peers_[address.engine] = peer;
  return peer;
}

// Local rail i talks to remote rail i, or i modulo theirs; remote rails beyond ours are resolved as well,
// because some networks let only known initiators write.
Status Core::route_to(Peer& peer) {
  const std::vector<std::string>& there = peer.address_.rails;
  peer.paths_.clear();
  peer.more_routes_.clear();
  for (uint32_t i = 0; i < rail_count(); ++i) {
    const uint32_t remote = i % static_cast<uint32_t>(there.size());
    WEFT_TRY_ASSIGN(const provider::Route route, rails[i].rail->resolve(there[remote]));
    Peer::Path path;
    path.route = route;
    path.rail_there = remote;
    peer.paths_.push_back(path);
  }
  for (uint32_t k = rail_count(); k < there.size(); ++k) {
    const uint32_t i = k % rail_count();
    WEFT_TRY_ASSIGN(const provider::Route route, rails[i].rail->resolve(there[k]));
    peer.more_routes_.emplace_back(i, route);
  }
  return {};
}

std::string Core::hello_body(const Peer& peer, MessageType type) const {
  Address self{id,
               name.substr(0, kNameBytesMax),
               options.provider->name(),
               mark_of(options.secret, id),
               this_process_name(),
               {}};
  Hello hello{std::move(self), peer.slot_here_, {}, {}, peer.salt_here_, {}};
  for (const RailState& state : rails) {
    hello.address.rails.push_back(state.address);
    hello.inbox.push_back({state.inbox.base, state.inbox.rkey});
  }
  hello.nonce = type == MessageType::kWelcome ? peer.nonce_there_ : peer.nonces_.back();
  hello.proof = prove_hello(options.secret, {type, id, peer.life_, 0, 0}, hello, peer.engine_);
  return to_body(hello);
}

bool Core::is_proven(const MessageHead& head, const Hello& hello) {
  if (is_same(hello.proof, prove_hello(options.secret, head, hello, id))) return true;
  refusals_.warn("transfer: '{}' drops a call of '{}', which does not know its job's secret", name,
                 hello.address.name);
  return false;
}

bool Core::is_spent(const Nonce& nonce) const {
  return std::find(spent_.begin(), spent_.end(), nonce) != spent_.end();
}

void Core::spend(const Nonce& nonce) {
  spent_.push_back(nonce);
  if (spent_.size() > kSpentMax) spent_.pop_front();
}

Result<std::shared_ptr<Peer>> Core::connect(std::string_view bytes, Deadline until) {
  WEFT_TRY_ASSIGN(const Address address, parse_address(bytes));
  if (address.engine == id)
    return Status::invalid("address: got this engine's own, allowed: another engine's");
  if (address.provider != options.provider->name())
    return Status::invalid("address: got one of provider {}, allowed: {}, which this engine uses",
                           address.provider, options.provider->name());
  if (address.mark != mark_of(options.secret, address.engine))
    return Status::invalid(
        "secret: peer '{}' belongs to a job with another WEFT_JOB_SECRET, allowed: the same", address.name);
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
  // Who calls does not fall silent for as long as the dead do: the answer may have to wait for room there.
  const Clock::duration pause_max = to_duration(std::min(2.0, options.peer_dead_s / 2));
  const bool is_settled = wait(until, [&] {
    if (peer->state() != PeerState::kConnecting || is_closed()) return true;
    if (const auto now = Clock::now(); now >= next_hello) {
      HoldToken hold(token);
      if (peer->state() == PeerState::kConnecting) send_handshake(*peer, MessageType::kHello);
      next_hello = now + pause;
      pause = std::min(pause * 2, pause_max);
    }
    return false;
  });
  if (peer->is_alive()) return peer;
  if (is_closed()) return closed_status();
  if (is_settled)
    return Status::make(Code::kPeerLost, "transfer.connect: peer '{}' is lost: {}", address.name,
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
    return refusals_.warn("transfer: a bad hello: {}",
                          hello.ok() ? "not from whom it says" : hello.status().message());
  if (!is_proven(head, *hello)) return;
  std::shared_ptr<Peer> peer = find_peer(head.sender);
  const bool is_again = peer && peer->state() <= PeerState::kConnected && peer->nonce_there_ == hello->nonce;
  const bool is_new_life =
      !is_again && (!peer || peer->state() >= PeerState::kLost || head.life > peer->life_);
  if (!is_again && is_spent(hello->nonce))
    return refusals_.warn("transfer: '{}' drops a hello that '{}' has used before", name,
                          hello->address.name);
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
      return refusals_.warn("transfer: cannot take '{}': {}", hello->address.name, made.status().message());
    peer = *made;
    peer->life_ = life;
  }
  if (!is_again) spend(hello->nonce);
  peer->nonce_there_ = hello->nonce;
  become_connected(*peer, *hello, peer->life_);
  send_handshake(*peer, MessageType::kWelcome);  // again for every hello: the last may be lost
  on_ordered(*peer, {}, {});
}

void Core::become_connected(Peer& peer, const Hello& hello, uint32_t life) {
  peer.heard_ = Clock::now();
  if (peer.state() != PeerState::kConnecting) return;
  peer.life_ = life;
  peer.keys_out_ = sender_keys(options.secret, id, peer.engine_, hello.salt);
  peer.slot_there_ = hello.slot;
  peer.inbox_ = hello.inbox;
  peer.state_.store(PeerState::kConnected, std::memory_order_release);
  log_info("transfer: '{}' is connected to peer '{}' ({}), life {}", name, peer.name(), peer.id(),
           peer.life_);
}

void Core::disconnect(const std::shared_ptr<Peer>& peer) {
  HoldToken hold(token);
  if (!peer->is_alive()) return;
  send_message(*peer, MessageType::kBye, text_body(""));
  for (int i = 0; i < 64; ++i) {
    flush_messages();
    poll_rails();
  }
  if (peer->is_alive())
    lose_peer(*peer, PeerState::kClosed, Status(Code::kPeerLost, "this side disconnected"));
}

void Core::lose(const std::shared_ptr<Peer>& peer, Status why) {
  HoldToken hold(token);
  poll_rails();  // what it said last
  if (peer->state() <= PeerState::kConnected) lose_peer(*peer, PeerState::kLost, std::move(why));
}

// What a closing engine tells: that it does not leave in peace, but because somebody else was lost, who is then to be
// named. A peer that it lost long ago is no reason.
std::string Core::farewell() const {
  const Clock::duration since = Clock::now() - lost_at_;
  if (last_loss_.empty() || since > to_duration(options.timeout_s + options.peer_dead_s))
    return text_body("");
  return text_body(text("after it had lost {}", last_loss_));
}

void Core::on_bye(Peer& peer, std::string_view body) {
  const Result<std::string> why = parse_text(body);
  const bool has_cause = why.ok() && !why->empty();
  const std::string words = has_cause ? "it closed its engine " + *why : "it closed its engine";
  if (has_cause) {
    last_loss_ = text("peer '{}': {}", peer.name(), words).substr(0, kTextBytesMax / 2);
    lost_at_ = Clock::now();
  }
  lose_peer(peer, PeerState::kClosed, Status(Code::kPeerLost, words));
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
  if (state == PeerState::kLost) {
    count_up(peer.tally_->faults, 1);
    last_loss_ = text("peer '{}': {}", peer.name(), why.message()).substr(0, kTextBytesMax / 2);
    lost_at_ = Clock::now();
  }
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
  std::vector<std::pair<std::shared_ptr<Transfer>, std::string>> involved;  // and how far each got
  for (Transfer* t = active_; t; t = t->active_next_)
    if (involves(*t, peer)) involved.emplace_back(t->self_, describe_progress(*t));
  for (auto& block : flight_blocks_)
    for (uint32_t i = 0; i < kFlightBlock; ++i)
      if (block[i].peer == &peer) orphan(block[i]);
  arrived_.erase(std::remove_if(arrived_.begin(), arrived_.end(),
                                [&](const Arrived& a) { return a.peer.get() == &peer && a.is_offer; }),
                 arrived_.end());
  for (auto& [transfer, progress] : involved)
    if (!transfer->is_finished())
      fail(*transfer, Status::make(Code::kPeerLost, "transfer.{}: peer '{}' is lost: {}; {}",
                                   to_string(transfer->kind_), peer.name(), why.message(), progress));
  for (auto& [request_id, pending] : attaches_) {
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
  for (uint32_t i = 0; i < peer.paths_.size(); ++i) rails[i].rail->forget(peer.paths_[i].route);
  for (auto& [rail, route] : peer.more_routes_) rails[rail].rail->forget(route);
  peer.paths_.clear();
  peer.more_routes_.clear();
}

bool Core::has_other_path(const Peer& peer, uint32_t rail) const {
  for (uint32_t i = 0; i < peer.paths_.size(); ++i)
    if (i != rail && !peer.paths_[i].is_down) return true;
  return false;
}

// Takes one rail out of the traffic with a peer; the last one takes the peer along. What the network holds
// there fails, but for messages: these are numbered, so that they can be sent again by another path.
void Core::lose_path(Peer& peer, uint32_t rail, const std::string& why) {
  if (peer.state() >= PeerState::kLost || peer.paths_[rail].is_down) return;
  if (!has_other_path(peer, rail)) return lose_peer(peer, PeerState::kLost, Status(Code::kPeerLost, why));
  peer.paths_[rail].is_down = true;
  const std::string& nic = rails[rail].rail->nic().name;
  count_up(peer.tally_->retries, 1);
  log_warn("transfer: '{}' leaves the path to peer '{}' on {}, rail {}: {}", name, peer.name(), nic, rail,
           why);
  std::vector<std::shared_ptr<Transfer>> hit;
  for (auto& block : flight_blocks_)
    for (uint32_t i = 0; i < kFlightBlock; ++i) {
      Flight& flight = block[i];
      if (flight.peer != &peer || flight.rail != rail) continue;
      Transfer* const transfer = flight.transfer;
      if (flight.carries_message()) {
        if (transfer) ++transfer->in_flight_;
        out_messages_.push_back({&peer, std::string(flight.buffer, flight.bytes), transfer, kAnyRail});
      } else if (transfer) {
        if (flight.use == Flight::Use::kPack) staging_->on_post_failed(peer, flight.slot, *transfer);
        for (Transfer* t = transfer; t; t = t->next_gathered_) hit.push_back(t->self_);
      }
      orphan(flight);
    }
  for (auto& transfer : hit)
    fail(*transfer, Status::make(Code::kSystem, "transfer.{}: to peer '{}' on {}: {}",
                                 to_string(transfer->kind_), peer.name(), nic, why));
  flush_messages();
}

// Hellos and welcomes take every path: nothing is known of them yet.
void Core::send_handshake(Peer& peer, MessageType type) {
  if (type == MessageType::kHello) {
    peer.nonces_.push_back(random_nonce());
    if (peer.nonces_.size() > kKnownNonces) peer.nonces_.pop_front();
  }
  const std::string body = hello_body(peer, type);
  for (uint32_t rail = 0; rail < peer.paths_.size(); ++rail) send_message(peer, type, body, nullptr, rail);
}

// One on every path, so that each is known to work. What a silent peer has not taken yet will tell it as much
// as another heartbeat.
void Core::send_heartbeats(Peer& peer) {
  for (uint32_t rail = 0; rail < peer.paths_.size(); ++rail)
    if (!peer.paths_[rail].is_down && peer.paths_[rail].messages_out == 0)
      send_message(peer, MessageType::kHeartbeat, "", nullptr, rail);
}

// A path on which something is under way and nothing has ended for longer than a peer may be silent; -1:
// none.
int Core::find_stuck_path(const Peer& peer, Clock::time_point now) const {
  for (uint32_t rail = 0; rail < peer.paths_.size(); ++rail) {
    const Peer::Path& path = peer.paths_[rail];
    const bool is_stuck = path.in_flight > 0 && now - path.moved > to_duration(options.peer_dead_s);
    if (!path.is_down && is_stuck && has_other_path(peer, rail)) return static_cast<int>(rail);
  }
  return -1;
}

// Whether the process of a peer on this host has ended, and everything that it sent has been taken in: nothing has
// come since the last look, however long ago that was on a busy machine.
bool Core::has_died(Peer& peer, Clock::time_point now) const {
  if (!peer.process_.has_ended()) return false;
  if (peer.ended_ == Clock::time_point()) peer.ended_ = now;
  return peer.heard_ < looked_ && now - peer.ended_ > kLastWords;
}

// Heartbeats out, silence in. `slept`: since the last look; a process that was stopped must not blame its
// peers.
void Core::check_peers(Clock::time_point now, Clock::duration slept) {
  const Clock::duration dead_after = to_duration(options.peer_dead_s);
  std::vector<std::pair<std::shared_ptr<Peer>, std::string>> lost;
  std::vector<std::pair<std::shared_ptr<Peer>, uint32_t>> stuck;
  const bool is_time_to_look = now - looked_ >= kLookEvery;
  for (auto& [engine, peer] : peers_) {
    if (is_time_to_look && peer->state() <= PeerState::kConnected && has_died(*peer, now)) {
      lost.emplace_back(peer, text("its process ({}) {}", peer->process_.who(), peer->process_.fate()));
      continue;
    }
    if (!peer->is_alive()) continue;
    if (slept > dead_after / 4) {
      peer->heard_ += slept;
      for (Peer::Path& path : peer->paths_) path.moved += slept;
    }
    if (now - peer->sent_to_ >= to_duration(options.heartbeat_s)) send_heartbeats(*peer);
    if (const int rail = find_stuck_path(*peer, now); rail >= 0)
      stuck.emplace_back(peer, static_cast<uint32_t>(rail));
    if (now - peer->heard_ > dead_after)
      lost.emplace_back(peer, text("no sign of life for {} s", options.peer_dead_s));
    else if (!peer->early_.empty() && now - peer->gap_since_ > dead_after)
      lost.emplace_back(peer,
                        text("a message is missing: expected number {}, saw later ones", peer->next_in_));
  }
  if (is_time_to_look) looked_ = now;
  for (auto& [peer, rail] : stuck)
    lose_path(*peer, rail, text("nothing has ended there for {} s", options.peer_dead_s));
  for (auto& [peer, why] : lost) lose_peer(*peer, PeerState::kLost, logged(Status(Code::kPeerLost, why)));
}

}  // namespace weft::transfer
