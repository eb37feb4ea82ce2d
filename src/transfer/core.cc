// SPDX-License-Identifier: Apache-2.0
//
// The token, the worker, and what comes back from the rails.
#include "transfer/core.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/random.h"
#include "base/threads.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

constexpr uint32_t kMessageBuffers = 64;  // of each kind, send and receive
constexpr size_t kEventBatch = 32;
constexpr uint64_t kPieceBytesMax = 1 << 30;  // so that a path that works shows it now and then
constexpr uint32_t kCallsPerTick = 64;
constexpr uint32_t kIdleCallsPerTick = 8;  // of who sleeps between two calls, on a machine that may be busy
constexpr uint32_t kSubmissionsPerPoll = 32;  // who only submits must hear its peers, too
constexpr auto kBufferRest = std::chrono::seconds(2);
constexpr auto kTickEvery = std::chrono::milliseconds(5);
constexpr size_t kInboxBytes = 4096;
constexpr unsigned kIdlePolls = 20000;  // of a worker with nothing under way, before it sleeps longer

uint64_t next_serial() {
  static std::atomic<uint64_t> made{0};
  return ++made;
}

std::string default_name() {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  return text("{}:{}", host, getpid());
}

}  // namespace

Core::Core(Options given)
    : options(std::move(given)),
      id(random_id()),
      serial(next_serial()),
      staging_(std::make_unique<Staging>(*this)) {
  name = options.name.empty() ? default_name() : options.name;
  events_.resize(kEventBatch);
  slots_.resize(kPeersMax);
  next_slot_ = static_cast<uint32_t>(random_key() % kPeersMax);  // strangers have that to guess, too
  for (size_t kind = 0; kind < kOpKinds; ++kind)
    counted_[kind] =
        &tally_operation(text("transfer.{}", to_string(static_cast<OpKind>(kind))), options.provider->name());
}

Core::~Core() {
  close();
}

Status Core::open() {
  message_bytes_ = 8192;
  for (size_t i = 0; i < options.nics.size(); ++i) {
    auto rail =
        options.provider->open(options.nics[i], {options.tx_depth, static_cast<uint32_t>(i), options.secret});
    if (!rail.ok()) return rail.status();
    RailState state;
    state.rail = std::move(*rail);
    const provider::Caps& caps = state.rail->caps();
    state.in_flight_max = options.tx_depth ? std::min(options.tx_depth, caps.tx_depth) : caps.tx_depth;
    state.in_flight_max = std::min(state.in_flight_max, std::max(caps.cq_depth, 2u) - 1);
    state.address = state.rail->address();
    message_bytes_ = std::min(message_bytes_, caps.message_bytes_max);
    write_bytes_max_ = std::min({write_bytes_max_, caps.write_bytes_max, kPieceBytesMax});
    state.has_tokens = caps.imm_bits >= 64;
    state.names_source = caps.source == provider::Source::kRoute;
    const bool is_safe = options.secret.empty() || provider::proves_imm(caps);
    write_imm_ = write_imm_ && caps.write_imm && caps.imm_only_bytes == 0 && is_safe;
    rails.push_back(std::move(state));
  }
  for (const RailState& state : rails)
    log_info("transfer: '{}' uses {} on {}", name, state.rail->nic().provider, state.rail->nic().name);
  if (!write_imm_) log_info("transfer: '{}': writes carry no immediates here, they follow as messages", name);
  if (address_bytes().size() + kHeadBytes + 48 + 32 * rails.size() > message_bytes_)
    return Status::invalid("nics: got {}, whose addresses do not fit one message of {} bytes", rails.size(),
                           message_bytes_);
  inbox_page_.resize(kInboxBytes);
  for (RailState& state : rails) {
    auto inbox = state.rail->enroll({inbox_page_.data(), kInboxBytes}, kRemoteWrite);
    if (!inbox.ok()) return inbox.status();
    state.inbox = *inbox;
  }
  // One set of buffers for sending, and one for receiving per rail: messages may come by any.
  const uint64_t arena_bytes = (1 + rails.size()) * kMessageBuffers * message_bytes_;
  arena_ = std::make_unique<char[]>(arena_bytes);
  char* buffer = arena_.get();
  for (uint32_t i = 0; i < kMessageBuffers; ++i, buffer += message_bytes_) free_buffers_.push_back(buffer);
  for (uint32_t rail = 0; rail < rail_count(); ++rail) {
    WEFT_TRY_ASSIGN(rails[rail].arena, rails[rail].rail->enroll({arena_.get(), arena_bytes}, kLocal));
    for (uint32_t i = 0; i < kMessageBuffers; ++i, buffer += message_bytes_) {
      Flight* flight = take_flight(Flight::Use::kReceive, rail, nullptr, nullptr);
      flight->buffer = buffer;
      post_receive(*flight);
    }
  }
  last_tick_ = Clock::now();
  if (options.has_worker) worker_ = std::thread([this] { run_worker(); });
  return {};
}

void Core::close() {
  if (closed_.exchange(true, std::memory_order_acq_rel)) return;
  stopping_.store(true, std::memory_order_release);
  if (worker_.joinable()) worker_.join();
  {
    HoldToken hold(token);
    start_submitted();
    for (int i = 0; i < 4 && !rails.empty(); ++i) poll_rails();  // farewells of peers that are gone already
    std::vector<std::shared_ptr<Peer>> all;
    for (auto& [engine, peer] : peers_) all.push_back(peer);
    for (auto& peer : all)
      if (peer->is_alive()) send_message(*peer, MessageType::kBye, farewell());
    for (int i = 0; i < 64 && !rails.empty(); ++i) {  // give the farewells a chance to leave
      flush_messages();
      poll_rails();
    }
    for (auto& peer : all)
      if (peer->state() <= PeerState::kConnected) lose_peer(*peer, PeerState::kClosed, closed_status());
    while (active_) {
      orphan_flights_of(*active_);
      active_->packs_left_ = 0;
      active_->in_flight_ = 0;
      fail(*active_, closed_status());
    }
    staging_->drop_all();
    arrived_.clear();
    for (auto& state : rails) state.rail->stop();
    for (auto& [region, entry] : regions_) {
      entry.memory->alive_.store(false, std::memory_order_release);
      release_rails(*entry.memory);
    }
    regions_.clear();
    for (auto& state : rails) {
      if (state.inbox.handle) state.rail->release(state.inbox);
      if (state.arena.handle) state.rail->release(state.arena);
    }
    for (auto& state : rails) state.rail.reset();
    rails.clear();
    peers_.clear();
  }
  callbacks.stop();
}

bool Core::wants_staging(const Memory& memory, const Remote& remote, size_t pieces, uint64_t bytes) const {
  return staging_->wants(memory, remote, pieces, bytes);
}

Status Core::check_own(const char* argument, uint64_t maker) const {
  if (maker == serial) return {};
  return Status::invalid("{}: got one of another engine, allowed: one that engine '{}' made", argument, name);
}

Status Core::closed_status() const {
  return Status::make(Code::kClosed, "transfer engine '{}': is closed", name);
}

void Core::submit(std::shared_ptr<Transfer> transfer) {
  if (token.try_take()) {  // no thread holds the token: post right here
    copied_ = 0;
    start_submitted();
    start(std::move(transfer));
    if (++submissions_ % kSubmissionsPerPoll == 0) progress_held();
    token.give();
    return;
  }
  Transfer* raw = transfer.get();
  raw->self_ = std::move(transfer);
  raw->next_submitted_ = submitted_.load(std::memory_order_relaxed);
  while (!submitted_.compare_exchange_weak(raw->next_submitted_, raw, std::memory_order_release,
                                           std::memory_order_relaxed)) {
  }
  while (submitted_.load(std::memory_order_relaxed) && token.try_take()) {
    start_submitted();
    token.give();
  }
}

bool Core::progress() {
  bool any = false;
  do {
    if (!token.try_take()) return any;
    any = progress_held() || any;
    token.give();
  } while (submitted_.load(std::memory_order_relaxed));
  return any;
}

bool Core::progress_held() {
  start_submitted();
  if (rails.empty()) return false;  // closed
  bool any = poll_rails();
  if (!unposted_receives_.empty()) post_receives_again();
  if (!waiting_.empty()) pump();
  any = any || copied_ > 0;
  if (staging_->is_busy()) staging_->pump_all();
  if (!out_messages_.empty()) flush_messages();
  if (++progress_calls_ % (any ? kCallsPerTick : kIdleCallsPerTick) == 0) {
    const Clock::time_point now = Clock::now();
    if (now - last_tick_ >= kTickEvery) tick(now);
  }
  return any;
}

// The worker leaves the token to threads that wait, and sleeps longer the longer nothing has happened.
void Core::run_worker() {
  if (options.worker_cpu >= 0) pin_this_thread(options.worker_cpu, "a worker of the transfer engine");
  unsigned idle = 0;
  while (!stopping_.load(std::memory_order_acquire)) {
    bool busy = false;
    if (waiters_.load(std::memory_order_relaxed) >
        0) {  // they make progress; each wake-up here would cost them
      std::this_thread::sleep_for(std::chrono::microseconds(500));
      continue;
    }
    if (token.try_take()) {
      start_submitted();
      busy = poll_rails();
      if (active_) idle = std::min(idle, kIdlePolls - 1);
      post_receives_again();
      pump();
      busy = busy || copied_ > 0;
      staging_->pump_all();
      flush_messages();
      if (const Clock::time_point now = Clock::now(); now - last_tick_ >= kTickEvery) tick(now);
      token.give();
    }
    idle = busy ? 0 : idle + 1;
    if (idle > kIdlePolls)
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    else
      back_off(idle);
  }
}

void Core::start_submitted() {
  if (!submitted_.load(std::memory_order_relaxed)) return;
  Transfer* list = submitted_.exchange(nullptr, std::memory_order_acquire);
  Transfer* in_order = nullptr;
  while (list) {
    Transfer* next = list->next_submitted_;
    list->next_submitted_ = in_order;
    in_order = list;
    list = next;
  }
  while (in_order) {
    Transfer* next = in_order->next_submitted_;
    start(std::move(in_order->self_));
    in_order = next;
  }
}

bool Core::poll_rails() {
  bool any = false;
  ++turn_;
  copied_ = 0;
  for (size_t i = 0; i < rails.size(); ++i) {
    const size_t came = rails[i].rail->poll(events_.data(), events_.size());
    for (size_t e = 0; e < came; ++e) on_event(rails[i], events_[e]);
    any = any || came > 0;
  }
  return any;
}

void Core::on_event(RailState& rail, Event& event) {
  if (event.kind == EventKind::kImm) return on_imm_event(rail, event);
  if (event.kind == EventKind::kServed || !event.context) return;
  Flight& flight = *static_cast<Flight*>(event.context);
  if (flight.use != Flight::Use::kReceive) return on_flight_end(rail, flight, event);
  if (event.kind == EventKind::kReceived)
    on_message(std::string_view(flight.buffer, event.bytes));
  else
    refusals_.warn("transfer: a receive failed on {}: {}", rail.rail->nic().name, event.text);
  if (!closed_.load(std::memory_order_relaxed)) post_receive(flight);
}

void Core::on_flight_end(RailState& rail, Flight& flight, Event& event) {
  // The path goes first, and takes what is under way on it along, this flight too.
  if (event.kind == EventKind::kFailed && event.peer_gone && !flight.is_orphan)
    lose_path(*flight.peer, flight.rail, event.text);
  if (event.kind == EventKind::kFailed && event.key_refused && flight.transfer)
    note_revoked(*flight.transfer);
  if (event.kind == EventKind::kFailed && event.key_refused && !flight.is_orphan && !was_asked_back(flight))
    lose_peer(*flight.peer, PeerState::kLost,
              Status(Code::kPeerLost,
                     "its memory is no longer registered: it has given this engine up, or closed its own"));
  if (flight.buffer) free_buffers_.push_back(flight.buffer);
  if (flight.is_orphan) return free_flight(&flight);
  count_out(flight, false);
  const Flight ended = flight;
  free_flight(&flight);
  Transfer* transfer = ended.transfer;
  do {
    Transfer* const next = transfer ? std::exchange(transfer->next_gathered_, nullptr) : nullptr;
    on_part_end(rail, ended, transfer, event);
    transfer = next;
  } while (transfer);
}

// After a refused write: the peer's temporary registration is over.
void Core::note_revoked(const Transfer& transfer) {
  for (uint32_t target = 0; target <= transfer.more_.size(); ++target)
    if (const auto& remote = transfer.remote(target); remote && (remote->access_ & kTemporary))
      remote->revoked_.store(true, std::memory_order_release);
}

// Whether the peer has said that it wants the memory of a flight back. A silent peer whose registration is over does
// not count this engine among its peers.
bool Core::was_asked_back(const Flight& flight) const {
  const auto is_asked = [&](const std::shared_ptr<Remote>& remote) {
    return remote && remote->peer_.get() == flight.peer && remote->is_revoked();
  };
  for (const Transfer* t = flight.transfer; t; t = t->next_gathered_)
    if (is_asked(t->remote_) || std::any_of(t->more_.begin(), t->more_.end(), is_asked)) return true;
  return false;
}

// Applies the end of a flight to the transfer that it carried, if any.
void Core::on_part_end(RailState& rail, const Flight& ended, Transfer* transfer, const Event& event) {
  if (transfer) --transfer->in_flight_;
  if (event.kind == EventKind::kFailed) {
    const std::shared_ptr<Transfer> keep = transfer ? transfer->self_ : nullptr;
    if (ended.use == Flight::Use::kPack && transfer)
      staging_->on_post_failed(*ended.peer, ended.slot, *transfer);
    if (transfer && !transfer->is_finished())
      fail(*transfer,
           Status::make(Code::kSystem, "transfer.{}: to peer '{}' on {}: {}", to_string(transfer->kind_),
                        ended.peer->name(), rail.rail->nic().name, event.text));
    return;
  }
  if (ended.use == Flight::Use::kPack) staging_->on_posted(*ended.peer, ended.slot);
  if (transfer && ended.use == Flight::Use::kPiece)
    note_moved(*transfer, ended.moved_bytes, ended.moved_pieces);
  if (transfer) settle(*transfer);
}

// What goes into an immediate on a rail.
uint64_t Core::imm_to(const Peer& peer, uint32_t rail, ImmClass kind, uint32_t imm) const {
  const uint32_t low = encode_imm(kind, peer.slot_there_, imm);
  return rails[rail].has_tokens ? with_token(low, peer.keys_out_.token) : low;
}

// Whether an immediate that names a peer can be from it alone, as far as its rail can tell.
bool Core::is_of(const Peer& peer, const RailState& rail, const Event& event) const {
  if (!write_imm_) return false;  // peers send none
  if (rail.has_tokens && imm_token(event.imm) != peer.keys_in_.token) return false;
  if (!rail.names_source) return true;
  const auto number = static_cast<uint32_t>(&rail - rails.data());
  return peer.paths_[number].route == event.from ||
         std::find(peer.more_routes_.begin(), peer.more_routes_.end(), std::pair(number, event.from)) !=
             peer.more_routes_.end();
}

void Core::on_imm_event(const RailState& rail, const Event& event) {
  const auto imm = static_cast<uint32_t>(event.imm);
  Peer* peer = slots_[imm_sender(imm)];
  if (!peer || !peer->is_alive()) return log_debug("transfer: an immediate of a connection that is gone");
  if (!is_of(*peer, rail, event))
    return refusals_.warn("transfer: '{}' drops an immediate that says it is of '{}', and is not", name,
                          peer->name());
  peer->heard_ = last_tick_;
  switch (imm_class(imm)) {
    case ImmClass::kCount:
    case ImmClass::kBarrier:
      return count_imm(*peer, counter_key(imm_class(imm), imm_id(imm)), 1);
    case ImmClass::kStage:
      return staging_->on_filled(*peer, imm_id(imm));
    default:
      log_debug("transfer: an immediate of unknown class from '{}'", peer->name());
  }
}

void Core::tick(Clock::time_point now) {
  const Clock::duration slept = now - last_tick_;
  last_tick_ = now;
  for (; !resting_buffers_.empty() && resting_buffers_.front().until <= now; resting_buffers_.pop_front())
    free_buffers_.push_back(resting_buffers_.front().buffer);
  check_deadlines(now);
  check_peers(now, slept);
}

Flight* Core::take_flight(Flight::Use use, uint32_t rail, Peer* peer, Transfer* transfer) {
  if (!free_flights_) {
    flight_blocks_.push_back(std::make_unique<Flight[]>(kFlightBlock));
    for (uint32_t i = 0; i < kFlightBlock; ++i) free_flight(&flight_blocks_.back()[i]);
  }
  Flight* flight = free_flights_;
  free_flights_ = flight->next_free;
  flight->use = use;
  flight->rail = rail;
  flight->peer = peer;
  flight->transfer = transfer;
  flight->bytes = 0;
  flight->carries = 1;
  flight->moved_bytes = flight->moved_pieces = 0;
  return flight;
}

void Core::free_flight(Flight* flight) {
  flight->use = Flight::Use::kFree;
  flight->is_orphan = false;
  flight->peer = nullptr;
  flight->transfer = nullptr;
  flight->buffer = nullptr;
  flight->next_free = free_flights_;
  free_flights_ = flight;
}

// The network still holds it, but nobody waits for it any more. It may never come back: a message's buffer is
// used again after a while.
void Core::orphan(Flight& flight) {
  if (flight.use == Flight::Use::kFree || flight.use == Flight::Use::kReceive || flight.is_orphan) return;
  flight.is_orphan = true;
  count_out(flight, false);
  for (Transfer* t = flight.transfer; t; t = std::exchange(t->next_gathered_, nullptr)) --t->in_flight_;
  if (flight.carries_message()) {
    resting_buffers_.push_back({flight.buffer, Clock::now() + kBufferRest});
    flight.buffer = nullptr;
  }
  flight.transfer = nullptr;
  flight.peer = nullptr;
}

// Keeps count of what the network holds, per rail and path.
void Core::count_out(const Flight& flight, bool has_left) {
  const uint32_t change = has_left ? 1 : UINT32_MAX;  // or one less
  rails[flight.rail].in_flight += change;
  if (flight.peer->paths_.empty()) return;
  Peer::Path& path = flight.peer->paths_[flight.rail];
  if (!has_left || path.in_flight == 0) path.moved = last_tick_;
  path.in_flight += change * flight.carries;
  if (flight.carries_message()) path.messages_out += change;
}

void Core::post_receive(Flight& flight) {
  RailState& state = rails[flight.rail];
  const Posted posted = state.rail->post_recv(flight.buffer, message_bytes_, state.arena.lkey, &flight);
  if (posted == Posted::kAgain) unposted_receives_.push_back(&flight);
  if (posted == Posted::kFatal) log_warn("transfer: cannot post a receive: {}", state.rail->refusal());
}

void Core::post_receives_again() {
  std::vector<Flight*> again;
  again.swap(unposted_receives_);
  for (Flight* flight : again) post_receive(*flight);
}

std::string Core::address_bytes() const {
  Address address{id,
                  name.substr(0, kNameBytesMax),
                  options.provider->name(),
                  mark_of(options.secret, id),
                  this_process_name(),
                  {}};
  for (const RailState& state : rails) address.rails.push_back(state.address);
  return to_bytes(address);
}

std::string Core::dump() {
  HoldToken hold(token);
  std::string out = text("transfer engine '{}' ({}), {} rails\n", name, to_text(id), rails.size());
  for (const auto& [engine, peer] : peers_)
    out += text("  peer '{}' ({}): {}, life {}\n", peer->name(), peer->id(), to_string(peer->state()),
                peer->life_);
  for (Transfer* t = active_; t; t = t->active_next_)
    out += text("  {} of {} bytes: {}, {}\n", to_string(t->kind_), t->bytes(), to_string(t->phase()),
                describe_progress(*t));
  return out;
}

}  // namespace weft::transfer
