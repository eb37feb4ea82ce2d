// SPDX-License-Identifier: Apache-2.0
//
// Connections and what is said on them: hello, heartbeats, attaching and taking back memory, ordered
// messages.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

constexpr auto kHelloEvery = std::chrono::milliseconds(100);
constexpr size_t kEarlyMax = 4096;     // messages kept that overtook an earlier one
constexpr size_t kArrivedMax = 65536;  // messages kept that no recv() waits for

Clock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

bool is_ordered(MessageType type) {
  return type != MessageType::kHello && type != MessageType::kWelcome && type != MessageType::kReject &&
         type != MessageType::kHeartbeat && type != MessageType::kBye;
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

// ---- memory

Result<std::shared_ptr<Memory>> Core::enroll(const provider::Range& range, uint32_t access) {
  auto memory = std::make_shared<Memory>();
  memory->range_ = range;
  memory->access_ = access;
  const EngineId secret = random_id();
  std::memcpy(memory->secret_.data(), secret.bytes.data(), secret.bytes.size());
  HoldToken hold(token);
  if (is_closed()) return closed_status();
  const bool is_reachable = range.kind == provider::MemoryKind::kHost ||
                            std::all_of(rails.begin(), rails.end(),
                                        [](const RailState& r) { return r.rail->caps().device_memory; });
  for (size_t i = 0; i < rails.size() && is_reachable; ++i) {
    auto made = rails[i].rail->enroll(range, access);
    if (!made.ok()) {
      release_rails(*memory);
      if (range.kind == provider::MemoryKind::kHost) return made.status();
      log_warn("transfer: device memory goes through pinned host memory: {}", made.status().message());
      break;
    }
    memory->rails_.push_back(*made);
  }
  memory->staged_ = memory->rails_.empty();
  memory->id_ = next_region_++;
  regions_[memory->id_].memory = memory;
  return memory;
}

void Core::release_rails(Memory& memory) {
  for (size_t i = 0; i < memory.rails_.size(); ++i) rails[i].rail->release(memory.rails_[i]);
  memory.rails_.clear();
}

Descriptor Core::describe(const Memory& memory) const {
  return {id, memory.id_, memory.secret_, memory.range_.bytes, memory.access_};
}

Status Core::unregister(const std::shared_ptr<Memory>& memory, Deadline until) {
  std::shared_ptr<std::atomic<uint32_t>> left;
  {
    HoldToken hold(token);
    if (is_closed()) return closed_status();
    auto found = regions_.find(memory->id_);
    if (found == regions_.end() || found->second.memory != memory)
      return Status::invalid("memory: got memory that is not registered here");
    start_submitted();
    memory->alive_.store(false, std::memory_order_release);
    left = found->second.users_left;
    left->store(static_cast<uint32_t>(found->second.users.size()), std::memory_order_relaxed);
    for (Peer* peer : found->second.users)
      send_message(*peer, MessageType::kRevoke, number_body(memory->id_));
  }
  const bool came = wait(until, [&] {
    return left->load(std::memory_order_acquire) == 0 && memory->users_.load(std::memory_order_acquire) == 0;
  });
  HoldToken hold(token);
  if (is_closed()) return {};
  std::string silent;
  for (Peer* peer : regions_[memory->id_].users) silent += text(" '{}'", peer->name());
  const uint32_t own = memory->users_.load(std::memory_order_relaxed);
  std::vector<std::shared_ptr<Transfer>> own_transfers;
  for (Transfer* t = active_; t; t = t->active_next_)
    if (t->memory_ == memory) own_transfers.push_back(t->self_);
  for (auto& transfer : own_transfers) {
    orphan_flights_of(*transfer);
    fail(*transfer,
         Status::make(Code::kClosed, "transfer.{}: its memory was unregistered", to_string(transfer->kind_)));
  }
  release_rails(*memory);
  regions_.erase(memory->id_);
  if (came) return {};
  return logged(
      Status::make(Code::kPeerLost,
                   "transfer.unregister: expected all users to let go, saw {} own transfers under way and no "
                   "answer of:{}; the memory is unregistered all the same",
                   own, silent));
}

// ---- connections

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
  peer->name_ = address.name;
  peer->address_ = address;
  WEFT_TRY(route_to(*peer));
  peer->slot_here_ = slot;
  peer->next_out_ = peer->next_in_ = 1;
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
    if (now - peer->told_ >= to_duration(options.heartbeat_s))
      send_message(*peer, MessageType::kHeartbeat, "");
    if (now - peer->heard_ > dead_after)
      lost.emplace_back(peer, text("no sign of life for {} s", options.peer_dead_s));
    else if (!peer->early_.empty() && now - peer->gap_since_ > dead_after)
      lost.emplace_back(peer,
                        text("a message is missing: expected number {}, saw later ones", peer->next_in_));
  }
  for (auto& [peer, why] : lost) lose_peer(*peer, PeerState::kLost, logged(Status(Code::kPeerLost, why)));
}

// ---- messages

void Core::send_message(Peer& peer, MessageType type, std::string_view body, Transfer* transfer) {
  MessageHead head{type, id, peer.life_, 0, 0};
  if (is_ordered(type)) head.sequence = peer.next_out_++;
  if (transfer) ++transfer->in_flight_;
  out_messages_.push_back({&peer, to_bytes(head, body), transfer});
  peer.told_ = last_tick_;
  flush_messages();
}

void Core::flush_messages() {
  if (is_flushing_) return;  // a failing message may make the engine say something
  is_flushing_ = true;
  std::vector<Peer*> full;  // a peer that takes nothing, perhaps for ever, must not hold up the others
  std::deque<OutMessage> later;
  while (!out_messages_.empty()) {
    OutMessage message = std::move(out_messages_.front());
    out_messages_.pop_front();
    const bool must_wait = std::find(full.begin(), full.end(), message.peer) != full.end();
    if (!must_wait && post_message(message)) continue;
    if (!must_wait) full.push_back(message.peer);
    if (message.peer->routes_.empty()) continue;  // lost while this was on its way
    later.push_back(std::move(message));
  }
  for (; !later.empty(); later.pop_back()) out_messages_.push_front(std::move(later.back()));
  is_flushing_ = false;
}

// False when there is no room; a message that cannot be posted at all costs the connection.
bool Core::post_message(OutMessage& message) {
  if (free_buffers_.empty() || rails[0].in_flight >= rails[0].in_flight_max) return false;
  if (message.peer->routes_.empty()) return true;  // lost in between
  Flight* flight = take_flight(message.transfer ? Flight::Use::kShortSend : Flight::Use::kMessage, 0,
                               message.peer, message.transfer);
  flight->buffer = free_buffers_.back();
  free_buffers_.pop_back();
  std::memcpy(flight->buffer, message.bytes.data(), message.bytes.size());
  const Posted posted = rails[0].rail->post_send(message.peer->routes_[0], flight->buffer,
                                                 message.bytes.size(), arena_registration_.lkey, flight);
  if (posted == Posted::kOk) {
    ++rails[0].in_flight;
    return true;
  }
  free_buffers_.push_back(flight->buffer);
  free_flight(flight);
  if (posted == Posted::kAgain) return false;
  log_warn("transfer: a message to peer '{}' cannot be sent: {}", message.peer->name(),
           rails[0].rail->refusal());
  if (message.transfer) {
    Transfer& transfer = *message.transfer;
    --transfer.in_flight_;
    message.transfer = nullptr;
    fail(transfer, Status::make(Code::kSystem, "transfer.{}: to peer '{}': {}", to_string(transfer.kind_),
                                message.peer->name(), rails[0].rail->refusal()));
  }
  if (message.peer->is_alive())
    lose_peer(*message.peer, PeerState::kLost, Status(Code::kPeerLost, rails[0].rail->refusal()));
  return true;
}

void Core::on_message(std::string_view message) {
  const auto head = parse_head(message);
  if (!head.ok()) return log_warn("transfer: '{}' drops a message: {}", name, head.status().message());
  const std::string_view body = message.substr(kHeadBytes);
  if (head->type == MessageType::kHello) return on_hello(*head, body);
  const std::shared_ptr<Peer> peer = find_peer(head->sender);
  if (!peer || peer->state() >= PeerState::kLost) return;
  if (head->type == MessageType::kWelcome) {
    const auto hello = parse_hello(body);
    if (!hello.ok()) return log_warn("transfer: a bad welcome: {}", hello.status().message());
    if (head->life < peer->life_) return;
    become_connected(*peer, *hello, head->life);
    return on_ordered(*peer, {}, {});
  }
  if (head->life != peer->life_)
    return log_debug("transfer: a message of another life of '{}'", peer->name());
  peer->heard_ = last_tick_;
  switch (head->type) {
    case MessageType::kHeartbeat:
      return;
    case MessageType::kBye:
      return lose_peer(*peer, PeerState::kClosed, Status(Code::kPeerLost, "it closed its engine"));
    case MessageType::kReject:
      return lose_peer(*peer, PeerState::kLost, Status(Code::kPeerLost, std::string(body)));
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
        const auto found = by_ticket_.find(outcome.ticket);
        if (found == by_ticket_.end() || found->second->peer_ != peer) return;
        const std::shared_ptr<Transfer> transfer = found->second;
        transfer->packs_left_ = 0;
        if (outcome.refusal.empty()) return settle(*transfer);
        fail(*transfer, Status::make(Code::kCapacity, "transfer.send: peer '{}' refused it: {}", peer->name(),
                                     outcome.refusal));
      });
    case MessageType::kNotify:
      return use(parse_notify(body), [&](const Notified& n) { count_imm(*peer, n.id, n.count); });
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

// ---- memory of peers

Result<std::shared_ptr<Remote>> Core::attach(std::string_view bytes, Deadline until) {
  WEFT_TRY_ASSIGN(const Descriptor descriptor, parse_descriptor(bytes));
  auto pending = std::make_shared<PendingAttach>();
  uint64_t ticket = 0;
  {
    HoldToken hold(token);
    if (is_closed()) return closed_status();
    if (descriptor.engine == id)
      return Status::invalid("descriptor: got memory of this engine, allowed: a peer's");
    pending->peer = find_peer(descriptor.engine);
    if (!pending->peer || !pending->peer->is_alive())
      return Status::invalid("descriptor: got memory of engine {}, which is not connected; connect() first",
                             to_text(descriptor.engine));
    if (auto known = pending->peer->remotes_.find(descriptor.region); known != pending->peer->remotes_.end())
      if (auto remote = known->second.lock(); remote && !remote->is_revoked()) return remote;
    ticket = next_ticket_++;
    pending->region = descriptor.region;
    attaches_[ticket] = pending;
    send_message(*pending->peer, MessageType::kAttach,
                 to_body(Attach{ticket, descriptor.region, descriptor.secret}));
  }
  const bool came =
      wait(until, [&] { return pending->is_answered.load(std::memory_order_acquire) || is_closed(); });
  HoldToken hold(token);
  attaches_.erase(ticket);
  if (is_closed()) return closed_status();
  if (!came)
    return Status::make(Code::kPeerLost, "transfer.attach: no answer of peer '{}' in time",
                        pending->peer->name());
  WEFT_TRY(Status(pending->status));
  return pending->remote;
}

void Core::on_attach(Peer& peer, const Attach& attach) {
  Attached answer;
  answer.ticket = attach.ticket;
  const auto found = regions_.find(attach.region);
  if (found == regions_.end() || !found->second.memory->is_registered()) {
    answer.refusal = "its owner has taken it back";
  } else if (!same_secret(attach.secret, found->second.memory->secret_)) {
    answer.refusal = "its key is wrong";
  } else if (found->second.memory->access_ == kLocal) {
    answer.refusal = "it is not registered for remote access";
  } else {
    const Memory& memory = *found->second.memory;
    answer.bytes = memory.bytes();
    answer.access = memory.access_;
    answer.must_stage = memory.is_staged();
    for (const provider::Registration& made : memory.rails_) answer.rails.push_back({made.base, made.rkey});
    found->second.users.insert(&peer);
  }
  send_message(peer, MessageType::kAttached, to_body(answer));
}

void Core::on_attached(const Attached& attached) {
  const auto found = attaches_.find(attached.ticket);
  if (found == attaches_.end()) return;
  PendingAttach& pending = *found->second;
  Peer& peer = *pending.peer;
  if (!attached.refusal.empty()) {
    pending.status =
        Status::invalid("descriptor: got memory that peer '{}' refuses: {}", peer.name(), attached.refusal);
  } else if (!attached.must_stage && attached.rails.size() != peer.address_.rails.size()) {
    pending.status = Status::invalid("descriptor: peer '{}' gave keys for {} rails, it has {}", peer.name(),
                                     attached.rails.size(), peer.address_.rails.size());
  } else {
    pending.remote = std::make_shared<Remote>();
    pending.remote->peer_ = pending.peer;
    pending.remote->region_ = pending.region;
    pending.remote->bytes_ = attached.bytes;
    pending.remote->access_ = attached.access;
    pending.remote->must_stage_ = attached.must_stage;
    pending.remote->rails_ = attached.rails;
    for (auto at = peer.remotes_.begin(); at != peer.remotes_.end();)
      at = at->second.expired() ? peer.remotes_.erase(at) : std::next(at);
    peer.remotes_[pending.region] = pending.remote;
  }
  pending.is_answered.store(true, std::memory_order_release);
}

void Core::on_revoke(Peer& peer, uint64_t region) {
  const auto found = peer.remotes_.find(region);
  const std::shared_ptr<Remote> remote = found == peer.remotes_.end() ? nullptr : found->second.lock();
  if (!remote) return send_message(peer, MessageType::kRevoked, number_body(region));
  remote->revoked_.store(true, std::memory_order_release);
  remote->owner_waits_ = true;
  answer_revoke_if_idle(*remote);
}

void Core::answer_revoke_if_idle(Remote& remote) {
  if (!remote.owner_waits_ || remote.users_ || !remote.peer_->is_alive()) return;
  remote.owner_waits_ = false;
  const uint64_t region = remote.region_;
  remote.peer_->remotes_.erase(region);
  send_message(*remote.peer_, MessageType::kRevoked, number_body(region));
}

// ---- immediates

std::shared_ptr<ImmCounter> Core::counter_of(const std::shared_ptr<Peer>& peer, uint32_t imm) {
  std::shared_ptr<ImmCounter>& counter = peer->imms_[imm];
  if (!counter) {
    counter = std::make_shared<ImmCounter>();
    counter->id_ = imm;
    counter->peer_ = peer;
  }
  return counter;
}

void Core::count_imm(Peer& peer, uint32_t imm, uint32_t count) {
  std::shared_ptr<ImmCounter>& counter = peer.imms_[imm];
  if (!counter) {
    counter = std::make_shared<ImmCounter>();
    counter->id_ = imm;
    counter->peer_ = find_peer(peer.engine_);
  }
  const uint64_t value = counter->value_.load(std::memory_order_relaxed) + count;
  counter->value_.store(value, std::memory_order_release);
  auto& reaches = counter->reaches_;
  for (size_t i = 0; i < reaches.size();) {
    if (reaches[i].at_least > value) {
      ++i;
      continue;
    }
    callbacks.post([call = std::move(reaches[i].callback)] { call({}); });
    reaches.erase(reaches.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

Result<std::shared_ptr<ImmCounter>> Core::imm_counter(const std::shared_ptr<Peer>& peer, uint32_t imm) {
  HoldToken hold(token);
  if (is_closed()) return closed_status();
  if (peer->state() >= PeerState::kLost)
    return Status::make(Code::kPeerLost, "transfer.imm_counter: peer '{}' is {}: {}", peer->name(),
                        to_string(peer->state()), peer->why().message());
  return counter_of(peer, imm);
}

Status Core::on_imm(const std::shared_ptr<ImmCounter>& counter, uint64_t at_least,
                    std::function<void(const Status&)> callback) {
  HoldToken hold(token);
  if (is_closed()) return closed_status();
  if (counter->value() >= at_least) {
    callbacks.post([call = std::move(callback)] { call({}); });
  } else if (counter->lost_.load(std::memory_order_acquire)) {
    callbacks.post([call = std::move(callback), status = counter->why_] { call(status); });
  } else {
    counter->reaches_.push_back({at_least, std::move(callback)});
  }
  return {};
}

uint64_t Core::next_barrier_round(const std::shared_ptr<Peer>& peer, uint32_t imm) {
  HoldToken hold(token);
  return ++barrier_rounds_[{peer.get(), imm}];
}

}  // namespace weft::transfer
