// SPDX-License-Identifier: Apache-2.0
//
// Memory: registrations of this engine, and those of peers that it may use.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "transfer/core.h"

namespace weft::transfer {

Result<std::shared_ptr<Memory>> Core::enroll(const provider::Range& range, uint32_t access) {
  auto memory = std::make_shared<Memory>();
  memory->maker_ = serial;
  memory->range_ = range;
  memory->access_ = access & ~uint32_t{kReadOnly};
  memory->is_read_only_ = (access & kReadOnly) != 0;
  const EngineId secret = random_id();
  std::memcpy(memory->secret_.data(), secret.bytes.data(), secret.bytes.size());
  HoldToken hold(token);
  if (is_closed()) return closed_status();
  memory->path_ = choose_memory_path(range.kind, options.nics);
  for (size_t i = 0; i < rails.size() && !memory->is_staged(); ++i) {
    auto made = rails[i].rail->enroll(range, access);
    if (made.ok()) {
      if (memory->path_.path == MemoryPath::kDmabuf && !made->is_dmabuf)
        memory->path_ = {MemoryPath::kPeerMemory,
                         text("{} could not take its DMA-BUF", rails[i].rail->nic().name)};
      memory->rails_.push_back(*made);
      continue;
    }
    release_rails(*memory);
    if (range.kind == provider::MemoryKind::kHost) return made.status();
    memory->path_ = {MemoryPath::kStaged, made.status().message()};
  }
  if (memory->is_staged())
    log_warn("transfer: device memory goes through pinned host memory: {}", memory->path_.reason);
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

Result<TemporaryKeys> Core::keys(const Memory& memory) const {
  if (!(memory.access_ & kTemporary) || !memory.is_registered())
    return Status::invalid("memory: got a lasting registration, allowed: one with kTemporary");
  if (memory.rails_.size() > TemporaryKeys::kRailsMax)
    return Status::make(Code::kUnsupported, "memory on {} rails, allowed: 1 to {}", memory.rails_.size(),
                        TemporaryKeys::kRailsMax);
  TemporaryKeys keys;
  keys.bytes = memory.bytes();
  for (const provider::Registration& made : memory.rails_) keys.keys[keys.rails++] = {made.base, made.rkey};
  return keys;
}

Result<std::shared_ptr<Remote>> Core::adopt(const std::shared_ptr<Peer>& peer,
                                            const TemporaryKeys& keys) const {
  if (keys.rails > TemporaryKeys::kRailsMax || keys.rails != peer->address_.rails.size())
    return Status::invalid("keys: peer '{}' gave keys for {} rails, it has {}", peer->name(), keys.rails,
                           peer->address_.rails.size());
  auto remote = std::make_shared<Remote>();
  remote->peer_ = peer;
  remote->bytes_ = keys.bytes;
  remote->access_ = kRemoteWrite | kTemporary;
  remote->rails_.assign(keys.keys, keys.keys + keys.rails);
  return remote;
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

// ---- memory of peers

Result<std::shared_ptr<Remote>> Core::attach(std::string_view bytes, Deadline until) {
  WEFT_TRY_ASSIGN(const Descriptor descriptor, parse_descriptor(bytes));
  auto pending = std::make_shared<PendingAttach>();
  uint64_t request_id = 0;
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
      if (auto remote = known->second.lock();
          remote && !remote->is_revoked() && same_secret(remote->secret_, descriptor.secret))
        return remote;
    request_id = next_request_id_++;
    pending->region = descriptor.region;
    pending->secret = descriptor.secret;
    attaches_[request_id] = pending;
    send_message(*pending->peer, MessageType::kAttach,
                 to_body(Attach{request_id, descriptor.region, descriptor.secret}));
  }
  const bool came =
      wait(until, [&] { return pending->is_answered.load(std::memory_order_acquire) || is_closed(); });
  HoldToken hold(token);
  attaches_.erase(request_id);
  if (is_closed()) return closed_status();
  if (!came)
    return Status::make(Code::kPeerLost, "transfer.attach: no answer of peer '{}' in time",
                        pending->peer->name());
  WEFT_TRY(Status(pending->status));
  return pending->remote;
}

void Core::on_attach(Peer& peer, const Attach& attach) {
  Attached answer;
  answer.request_id = attach.request_id;
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
  const auto found = attaches_.find(attached.request_id);
  if (found == attaches_.end()) return;
  PendingAttach& pending = *found->second;
  Peer& peer = *pending.peer;
  if (!attached.refusal.empty()) {
    pending.status =
        Status::invalid("descriptor: got memory that peer '{}' refuses: {}", peer.name(), attached.refusal);
  } else if (!attached.must_stage && attached.rails.size() != peer.address_.rails.size()) {
    pending.status = Status::invalid("descriptor: peer '{}' gave keys for {} rails, it has {}", peer.name(),
                                     attached.rails.size(), peer.address_.rails.size());
  } else if (auto known = peer.remotes_.find(pending.region); known != peer.remotes_.end() &&
                                                              !known->second.expired() &&
                                                              !known->second.lock()->is_revoked()) {
    pending.remote = known->second.lock();  // attached twice at once: one handle, which the owner can revoke
  } else {
    pending.remote = std::make_shared<Remote>();
    pending.remote->secret_ = pending.secret;
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

}  // namespace weft::transfer
