// SPDX-License-Identifier: Apache-2.0
//
// Engines of one process over one provider, for tests. A new provider joins by one line in backends().
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "providers/loopback/loopback.h"
#include "transfer/engine.h"

namespace weft::transfer::testing {

constexpr double kPatience_s = 20;
inline Deadline soon(double seconds = kPatience_s) {
  return Deadline::after_s(seconds);
}

struct Backend {
  std::string label;
  std::function<Result<std::shared_ptr<provider::Provider>>()> make;
  bool is_slow = false;  // random delays: fewer rounds
};
std::vector<Backend> backends();

// A test on a backend, which is skipped where no NIC of it can be used.
class OnBackend : public ::testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    auto made = GetParam().make();
    ASSERT_TRUE(made.ok()) << made.status().message();
    provider_ = *made;
    std::string why = "no NIC";
    for (const provider::Nic& nic : provider_->probe()) {
      if (nic.usable()) return;
      why = nic.unusable_because;
    }
    GTEST_SKIP() << why;
  }
  std::shared_ptr<provider::Provider> provider_;
};

// Memory with a guard on both sides: what lies outside of [0, bytes) must stay as it was.
class Buffer {
 public:
  explicit Buffer(size_t bytes, uint8_t fill = 0xEE) : bytes_(bytes), all_(bytes + 2 * kGuard, 0xA5) {
    std::memset(data(), fill, bytes);
  }
  uint8_t* data() { return all_.data() + kGuard; }
  size_t bytes() const { return bytes_; }
  void randomize(uint32_t seed) {
    std::mt19937 random(seed);
    for (size_t i = 0; i < bytes_; ++i) data()[i] = static_cast<uint8_t>(random());
  }
  bool guards_hold() const {
    for (size_t i = 0; i < kGuard; ++i)
      if (all_[i] != 0xA5 || all_[all_.size() - 1 - i] != 0xA5) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t bytes_;
  std::vector<uint8_t> all_;
};

// One process of a transfer: an engine and one registered buffer.
struct Side {
  std::unique_ptr<Engine> engine;
  Buffer buffer{0};
  std::shared_ptr<Memory> memory;

  static Side open(std::shared_ptr<provider::Provider> provider, uint32_t rails, size_t bytes,
                   Options options = {}) {
    Side side;
    options.provider = provider;
    for (const provider::Nic& nic : provider->probe())
      if (nic.usable() && options.nics.empty()) options.nics.assign(rails, nic);
    if (options.name.empty()) options.name = "side";
    auto engine = Engine::open(std::move(options));
    if (!engine.ok()) throw std::runtime_error(engine.status().message());
    side.engine = std::move(*engine);
    side.buffer = Buffer(bytes);
    side.memory = *side.engine->enroll({side.buffer.data(), bytes}, kRemoteRead | kRemoteWrite);
    return side;
  }
  std::string descriptor() { return *engine->describe(*memory); }
};

// Two sides that know each other; a writes into b.
struct Pair {
  Side a, b;
  std::shared_ptr<Peer> b_at_a, a_at_b;
  std::shared_ptr<Remote> remote;  // b's buffer, at a

  Pair(std::shared_ptr<provider::Provider> provider, uint32_t rails_a, uint32_t rails_b, size_t bytes,
       Options options = {})
      : a(Side::open(provider, rails_a, bytes, named(options, "a"))),
        b(Side::open(provider, rails_b, bytes, named(options, "b"))) {
    connect();
  }
  ~Pair() {
    a.engine->close();  // before the buffers go
    b.engine->close();
  }
  void connect() {
    auto peer = a.engine->connect(b.engine->address(), soon());
    if (!peer.ok()) throw std::runtime_error(peer.status().message());
    b_at_a = *peer;
    auto back = b.engine->connect(a.engine->address(), soon());
    if (!back.ok()) throw std::runtime_error(back.status().message());
    a_at_b = *back;
    auto attached = a.engine->attach(b.descriptor(), soon());
    if (!attached.ok()) throw std::runtime_error(attached.status().message());
    remote = *attached;
  }
  static Options named(Options options, const char* name) {
    options.name = name;
    return options;
  }
  WriteRequest write(uint64_t src, uint64_t dst, uint64_t bytes) {
    return {a.memory, src, remote, dst, bytes, {}};
  }
  Status wait_imm(uint32_t id, uint64_t count, double seconds = kPatience_s) {
    auto counter = b.engine->imm_counter(a_at_b, id);
    return counter.ok() ? b.engine->wait_imm(*counter, count, soon(seconds)) : counter.status();
  }
};

inline How with_imm(uint32_t imm, Notify notify = Notify::kOnce) {
  How how;
  how.imm = imm;
  how.notify = notify;
  return how;
}

#define ASSERT_OK(expr)                                 \
  do {                                                  \
    const ::weft::Status ok_status = (expr);            \
    ASSERT_TRUE(ok_status.ok()) << ok_status.message(); \
  } while (false)
#define EXPECT_OK(expr)                                 \
  do {                                                  \
    const ::weft::Status ok_status = (expr);            \
    EXPECT_TRUE(ok_status.ok()) << ok_status.message(); \
  } while (false)

}  // namespace weft::transfer::testing
