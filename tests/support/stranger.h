// SPDX-License-Identifier: Apache-2.0
//
// Who reaches a rail and is no engine: says what it likes, hears what comes.
//   Stranger stranger(provider);
//   stranger.say(message, parse_address(engine->address())->rails[0]);
//   Insider insider(provider, "the secret");     // knows the secret, and the protocol
//   ASSERT_TRUE(insider.connect(engine->address()));
//   insider.say(insider.message(MessageType::kNotify, to_body(Notified{7, 1})));
// Threads: one at a time.
#pragma once

#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "providers/fabric/abi.h"
#include "providers/fabric/fabric.h"
#include "providers/provider.h"
#include "transfer/wire.h"

namespace weft::transfer::testing {

class Stranger {
 public:
  explicit Stranger(std::shared_ptr<provider::Provider> provider, const std::string& secret = "");
  ~Stranger();
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  provider::Rail& rail() { return *rail_; }
  std::function<void()> meanwhile;  // called while this waits
  provider::Route route_to(const std::string& rail_address);
  void forget_route();
  RailKey inbox() const { return {registration_.base, registration_.rkey}; }
  // False: the rail takes it not within `seconds`.
  bool say(const std::string& message, const std::string& rail_address, double seconds = 5);
  // A write of no bytes that carries an immediate.
  bool write_imm(uint64_t imm, const RailKey& to, const std::string& rail_address, double seconds = 5);
  // A message of libfabric that carries data as an immediate does. False on other rails, too.
  bool say_with_data(uint64_t data, const std::string& rail_address, double seconds = 5);
  std::string hear(double seconds = 20);  // empty: nothing came
  void poll();
  // Until what was said has left, or the rail has failed it.
  bool settle(double seconds = 5);

 private:
  struct Buffer {
    provider::Context context;
    bool is_free = true;
  };
  char* buffer(size_t i) { return memory_.data() + i * kBufferBytes; }
  size_t free_buffer(double seconds);
  static constexpr size_t kBufferBytes = 8192, kReceives = 16, kSends = 64;

  std::shared_ptr<provider::Provider> provider_;
  std::unique_ptr<provider::Rail> rail_;
  std::vector<char> memory_;
  std::vector<Buffer> buffers_;  // receives, then sends
  provider::Registration registration_;
  std::deque<std::string> heard_;
  std::string to_;
  provider::Route route_ = provider::kNoRoute;
};

// A peer by the protocol alone.
class Insider : public Stranger {
 public:
  Insider(std::shared_ptr<provider::Provider> provider, std::string secret);

  // As an engine of that address, which is the caller here.
  bool connect(const std::string& engine_address);
  std::string message(MessageType type, std::string_view body);
  bool say(const std::string& message) { return Stranger::say(message, there_.rails[0]); }
  bool write_imm(uint64_t imm) { return Stranger::write_imm(imm, inbox_there_, there_.rails[0]); }

  const EngineId& id() const { return id_; }
  const SenderKeys& keys() const { return keys_; }  // what it shows
  uint32_t slot() const { return slot_; }           // its number over there
  uint32_t life() const { return life_; }
  const RailKey& inbox_there() const { return inbox_there_; }
  const Address& there() const { return there_; }

 private:
  std::string hello(const EngineId& to);

  std::shared_ptr<provider::Provider> provider_;
  std::string secret_;
  EngineId id_ = random_id();
  Address there_;
  SenderKeys keys_;
  RailKey inbox_there_;
  uint32_t slot_ = 0, life_ = 1, next_ = 1, next_sign_ = 1;
};

inline Stranger::Stranger(std::shared_ptr<provider::Provider> provider, const std::string& secret)
    : provider_(std::move(provider)),
      memory_((kReceives + kSends) * kBufferBytes),
      buffers_(kReceives + kSends) {
  for (const provider::Nic& nic : provider_->probe()) {
    if (!nic.usable() || rail_) continue;
    auto opened = provider_->open(nic, {0, 0, secret});
    if (!opened.ok()) throw std::runtime_error(opened.status().message());
    rail_ = std::move(*opened);
  }
  auto made = rail_->enroll({memory_.data(), memory_.size()}, provider::kRemoteWrite);
  if (!made.ok()) throw std::runtime_error(made.status().message());
  registration_ = *made;
  for (size_t i = 0; i < kReceives; ++i)
    rail_->post_recv(buffer(i), kBufferBytes, registration_.lkey, &buffers_[i].context);
}

inline Stranger::~Stranger() {
  (void)settle(1);
  rail_->stop();
  rail_->release(registration_);
}

inline provider::Route Stranger::route_to(const std::string& rail_address) {
  if (to_ == rail_address) return route_;
  auto resolved = rail_->resolve(rail_address);
  if (!resolved.ok()) throw std::runtime_error(resolved.status().message());
  to_ = rail_address;
  return route_ = *resolved;
}

inline void Stranger::forget_route() {
  if (route_ != provider::kNoRoute) rail_->forget(route_);
  route_ = provider::kNoRoute;
  to_.clear();
}

inline void Stranger::poll() {
  if (meanwhile) meanwhile();
  provider::Event events[8];
  const size_t count = rail_->poll(events, 8);
  for (size_t i = 0; i < count; ++i)
    for (size_t b = 0; b < buffers_.size(); ++b) {
      if (events[i].context != &buffers_[b].context) continue;
      if (b >= kReceives) {
        buffers_[b].is_free = true;
        continue;
      }
      if (events[i].kind == provider::EventKind::kReceived) heard_.emplace_back(buffer(b), events[i].bytes);
      rail_->post_recv(buffer(b), kBufferBytes, registration_.lkey, &buffers_[b].context);
    }
}

inline size_t Stranger::free_buffer(double seconds) {
  size_t found = 0;
  wait_until(Deadline::after_s(seconds), [&] {
    poll();
    for (size_t b = kReceives; b < buffers_.size() && !found; ++b)
      if (buffers_[b].is_free) found = b;
    return found != 0;
  });
  return found;
}

inline bool Stranger::say(const std::string& message, const std::string& rail_address, double seconds) {
  const size_t b = free_buffer(seconds);
  if (b == 0) return false;
  std::memcpy(buffer(b), message.data(), message.size());
  provider::Posted posted = provider::Posted::kAgain;
  wait_until(Deadline::after_s(seconds), [&] {
    poll();
    posted = rail_->post_send(route_to(rail_address), buffer(b), message.size(), registration_.lkey,
                              &buffers_[b].context);
    return posted != provider::Posted::kAgain;
  });
  buffers_[b].is_free = posted != provider::Posted::kOk;
  return posted <= provider::Posted::kDone;
}

inline bool Stranger::write_imm(uint64_t imm, const RailKey& to, const std::string& rail_address,
                                double seconds) {
  const size_t b = free_buffer(seconds);
  if (b == 0) return false;
  provider::RmaOp op;
  op.to = route_to(rail_address);
  op.piece = {buffer(b), registration_.lkey, to.base, to.rkey, 0};
  op.has_imm = true;
  op.imm = imm;
  op.context = &buffers_[b].context;
  provider::Posted posted = provider::Posted::kAgain;
  wait_until(Deadline::after_s(seconds), [&] {
    poll();
    posted = rail_->post_write(op);
    return posted != provider::Posted::kAgain;
  });
  buffers_[b].is_free = posted != provider::Posted::kOk;
  return posted <= provider::Posted::kDone;
}

inline bool Stranger::say_with_data(uint64_t data, const std::string& rail_address, double seconds) {
  fid_ep* const endpoint = provider::fabric_objects(*rail_).endpoint;
  const size_t b = endpoint ? free_buffer(seconds) : 0;
  if (b == 0) return false;
  const uint64_t to = provider::fabric_address(*rail_, route_to(rail_address));
  ssize_t code = -EAGAIN;
  wait_until(Deadline::after_s(seconds), [&] {
    poll();
    code = endpoint->msg->senddata(endpoint, nullptr, 0, nullptr, data, to, &buffers_[b].context);
    return code != -EAGAIN;
  });
  buffers_[b].is_free = code != 0;
  return code == 0;
}

inline bool Stranger::settle(double seconds) {
  return wait_until(Deadline::after_s(seconds), [&] {
    poll();
    for (size_t b = kReceives; b < buffers_.size(); ++b)
      if (!buffers_[b].is_free) return false;
    return true;
  });
}

inline std::string Stranger::hear(double seconds) {
  wait_until(Deadline::after_s(seconds), [&] {
    poll();
    return !heard_.empty();
  });
  if (heard_.empty()) return "";
  std::string message = std::move(heard_.front());
  heard_.pop_front();
  return message;
}

inline Insider::Insider(std::shared_ptr<provider::Provider> provider, std::string secret)
    : Stranger(provider, secret), provider_(std::move(provider)), secret_(std::move(secret)) {}

inline std::string Insider::hello(const EngineId& to) {
  Hello hello;
  hello.address = {
      id_, "an insider", provider_->name(), mark_of(secret_, id_), this_process_name(), {rail().address()}};
  hello.slot = 5;
  hello.inbox = {inbox()};
  hello.nonce = random_nonce();
  hello.salt = random_nonce();
  const MessageHead head{MessageType::kHello, id_, life_, 0, 0};
  hello.proof = prove_hello(secret_, head, hello, to);
  return to_bytes(head, to_body(hello));
}

inline bool Insider::connect(const std::string& engine_address) {
  there_ = *parse_address(engine_address);
  forget_route();  // the last life's may be broken
  if (!say(hello(there_.engine))) return false;
  for (std::string heard = hear(); !heard.empty(); heard = hear()) {
    const auto head = parse_head(heard);
    if (!head.ok() || head->type != MessageType::kWelcome) continue;
    const auto welcome = parse_hello(std::string_view(heard).substr(kHeadBytes));
    if (!welcome.ok()) return false;
    keys_ = sender_keys(secret_, id_, there_.engine, welcome->salt);
    slot_ = welcome->slot;
    life_ = head->life;
    next_ = next_sign_ = 1;
    inbox_there_ = welcome->inbox[0];
    return true;
  }
  return false;
}

inline std::string Insider::message(MessageType type, std::string_view body) {
  const bool is_sign = type == MessageType::kHeartbeat || type == MessageType::kBye;
  std::string bytes = to_bytes({type, id_, life_, is_sign ? next_sign_++ : next_++, 0}, body);
  seal(bytes, keys_.mac);
  return bytes;
}

}  // namespace weft::transfer::testing
