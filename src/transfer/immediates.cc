// SPDX-License-Identifier: Apache-2.0
//
// Counters of immediates, and who waits for them. Signals of ports are applied elsewhere: transports/proxy/peer_records.cc.
#include "transfer/core.h"

namespace weft::transfer {

std::shared_ptr<ImmCounter> Core::counter_of(const std::shared_ptr<Peer>& peer, uint32_t key) {
  std::shared_ptr<ImmCounter>& counter = peer->imms_[key];
  if (!counter) {
    counter = std::make_shared<ImmCounter>();
    counter->key_ = key;
    counter->maker_ = serial;
    counter->peer_ = peer;
  }
  return counter;
}

void Core::count_imm(Peer& peer, uint32_t key, uint32_t count) {
  const auto known = peer.imms_.find(key);
  const std::shared_ptr<ImmCounter> counter =
      known == peer.imms_.end() ? counter_of(find_peer(peer.engine_), key) : known->second;
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

Result<std::shared_ptr<ImmCounter>> Core::imm_counter(const std::shared_ptr<Peer>& peer, uint32_t key) {
  HoldToken hold(token);
  if (is_closed()) return closed_status();
  if (peer->state() >= PeerState::kLost)
    return Status::make(Code::kPeerLost, "transfer.imm_counter: peer '{}' is {}: {}", peer->name(),
                        to_string(peer->state()), peer->why().message());
  return counter_of(peer, key);
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

uint64_t Core::next_barrier_round(const std::shared_ptr<Peer>& peer, uint32_t id) {
  HoldToken hold(token);
  return ++barrier_rounds_[{peer.get(), id}];
}

}  // namespace weft::transfer
