// SPDX-License-Identifier: Apache-2.0
//
// The host half of the jitter transport: another transport does all the work, and is asked a little later.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "base/config.h"
#include "kernels/target/target.h"
#include "memory/local_memory.h"
#include "transports/jitter/channel.cuh"
#include "transports/transport.h"

namespace weft {
namespace jitter {
namespace {

// What it stands in front of. Its mesh is named in transports/list.h.
constexpr const char* kBehind = "proxy";

const Transport& behind() {
  const auto is_it = [](const Transport* one) { return std::string_view(one->name()) == kBehind; };
  return **std::ranges::find_if(transports(), is_it);
}

uint64_t most_ns() {
  return static_cast<uint64_t>(config().jitter_us) * 1000;
}

class JitterLink : public Link {
 public:
  JitterLink(std::unique_ptr<Link> link, std::unique_ptr<LocalMemory> drawn, uint64_t seed)
      : behind_(std::move(link)), drawn_(std::move(drawn)), dial_{drawn_->at<uint64_t>(0), seed, most_ns()} {}

  void finish() override { behind_->finish(); }
  Result<std::string> offer(const WindowView& window) override { return behind_->offer(window); }
  Status accept(const WindowView& window, const std::vector<std::string>& offers) override {
    return behind_->accept(window, offers);
  }
  void forget(int window, uint64_t bytes) override { behind_->forget(window, bytes); }

  Result<MeshPart> mesh(const WindowView& window) override {
    WEFT_TRY_ASSIGN(MeshPart part, behind_->mesh(window));
    part.type = text("JitterMesh<weft::{}>", part.type);
    const auto* dial = reinterpret_cast<const std::byte*>(&dial_);
    part.value.insert(part.value.end(), dial, dial + sizeof dial_);
    return part;
  }

  // After something has come, threads that wait look away for a while, and what comes next is late.
  bool help() override {
    if (now_ns() < away_until_ns_.load(std::memory_order_relaxed) || !behind_->help()) return false;
    const uint64_t wait = wait_ns(~dial_.seed, turns_.fetch_add(1, std::memory_order_relaxed), dial_.most_ns);
    if (wait > 0) away_until_ns_.store(now_ns() + wait, std::memory_order_relaxed);
    return true;
  }

  bool rest() override { return behind_->rest(); }

  Status status() override { return behind_->status(); }
  Status fault() override { return behind_->fault(); }
  void lose(int peer, const std::string& how) override { behind_->lose(peer, how); }
  void on_lost(std::function<void(int, const std::string&)> tell) override {
    behind_->on_lost(std::move(tell));
  }

 private:
  const std::unique_ptr<Link> behind_;
  const std::unique_ptr<LocalMemory> drawn_;
  const Dial dial_;
  std::atomic<uint64_t> turns_{0}, away_until_ns_{0};
};

class JitterTransport : public Transport {
 public:
  const char* name() const override { return "jitter:proxy"; }
  const char* carried_by() const override { return "proxy, after random waits: for tests"; }

  Caps caps(Device device) const override {
    Caps caps = behind().caps(device);
    caps.only_by_name = true;
    caps.latency_us += static_cast<double>(config().jitter_us) / (2 * kOneIn);
    caps.details += text("; one call in {} waits up to {} us", kOneIn, config().jitter_us);
    return caps;
  }

  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    return behind().refuses(self, peer);
  }

  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    WEFT_TRY_ASSIGN(std::unique_ptr<Link> link, behind().connect(group));
    const Device device = (*group.facts)[static_cast<size_t>(group.rank)].device;
    WEFT_TRY_ASSIGN(auto drawn, LocalMemory::create(device, sizeof(uint64_t)));
    const auto seed = static_cast<uint64_t>(config().jitter_seed) << 32 | static_cast<uint64_t>(group.rank);
    return std::unique_ptr<Link>(new JitterLink(std::move(link), std::move(drawn), seed));
  }
};

}  // namespace
}  // namespace jitter

const Transport& jitter_transport() {
  static const jitter::JitterTransport transport;
  return transport;
}

}  // namespace weft
