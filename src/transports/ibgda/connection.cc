// SPDX-License-Identifier: Apache-2.0
//
// The host half of the ibgda transport: one NIC, queues to every peer, keys of windows, and what broke.
#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "base/config.h"
#include "base/log.h"
#include "transports/ibgda/caps.h"
#include "transports/ibgda/channel.cuh"
#include "transports/ibgda/queues.h"
#include "transports/lost_peers.h"
#include "transports/transport.h"

namespace weft {
namespace ibgda {
namespace {

constexpr double kFarewell_s = 5;  // for peers to leave, too

class IbgdaLink : public Link {
 public:
  static Result<std::unique_ptr<Link>> connect(const Group& group) {
    auto link = std::unique_ptr<IbgdaLink>(new IbgdaLink(group));
    const Status opened = link->open(group);
    WEFT_TRY(link->join(group, opened));
    return std::unique_ptr<Link>(std::move(link));
  }

  ~IbgdaLink() override {
    finish();
    if (queues_) queues_->stop();  // who watches calls this object, which calls the queues
    queues_.reset();
    for (auto& [number, window] : windows_) release(window, 0);
    for (Known& window : gone_) release(window, 0);
  }

  void finish() override {
    if (std::exchange(is_finished_, true) || !queues_) return;
    queues_->leave(Deadline::after_s(std::min(kFarewell_s, timeout_s_)));
  }

  Status try_device_memory(std::byte* probe, uint64_t bytes) override {
    WEFT_TRY_ASSIGN(Enrolled made, nic_->enroll(probe, bytes, device_));
    nic_->release(made);
    return {};
  }

  Result<std::string> offer(const WindowView& window) override {
    Known& known = windows_[window.number];
    if (known.enrolled.empty() || known.enrolled.back().first != window.bytes) {
      WEFT_TRY_ASSIGN(const Enrolled made, nic_->enroll(window.local, window.bytes, window.place));
      known.enrolled.emplace_back(window.bytes, made);
    }
    known.memory = window.memory;
    const Enrolled& enrolled = known.enrolled.back().second;
    const RemotePart part{enrolled.base, big_endian(enrolled.remote_key), 0};
    return std::string(reinterpret_cast<const char*>(&part), sizeof part);
  }

  // Kernels may still use the table of before the window grew: each size has its own.
  Status accept(const WindowView& window, const std::vector<std::string>& offers) override {
    WEFT_TRY_ASSIGN(auto parts, LocalMemory::create(device_, offers.size() * sizeof(RemotePart)));
    for (size_t rank = 0; rank < offers.size(); ++rank) {
      if (offers[rank].size() != sizeof(RemotePart))
        return Status::make(Code::kSystem, "ibgda: rank {} offered no window", rank);
      WEFT_TRY(parts->write(rank * sizeof(RemotePart), offers[rank].data(), sizeof(RemotePart)));
    }
    windows_.at(window.number).parts.push_back(std::move(parts));
    return {};
  }

  // Of a window that is gone peers may still have signals under way that nobody waits for any more. A NIC would refuse
  // them, and break the queue. So its keys and memory stay until all have taken leave.
  void forget(int window, uint64_t bytes) override {
    const auto known = windows_.find(window);
    if (known == windows_.end()) return;
    (void)queues_->drain(Deadline::after_s(std::min(kFarewell_s, timeout_s_)));
    if (bytes > 0) return release(known->second, bytes);
    gone_.push_back(std::move(known->second));
    windows_.erase(known);
  }

  Result<MeshPart> mesh(const WindowView& window) override {
    const Known& known = windows_.at(window.number);
    const Enrolled& enrolled = known.enrolled.back().second;
    const bool is_near = !device_.is_host() && window.place == device_;
    const IbgdaMesh mesh{queues_->table(),
                         queues_->states(),
                         known.parts.back()->at<RemotePart>(0),
                         window.local,
                         window.bytes,
                         enrolled.base,
                         static_cast<uint64_t>(timeout_s_ * 1e9),
                         static_cast<uint32_t>(rank_),
                         static_cast<uint32_t>(ranks_),
                         queues_->per_peer(),
                         big_endian(enrolled.local_key),
                         nic_->put_shift(),
                         queues_->batch(),
                         is_near,
                         0};
    return mesh_part("IbgdaMesh", mesh);
  }

  Status status() override {
    std::lock_guard lock(mutex_);
    return wrong_.ok() ? lost_ : wrong_;
  }
  Status fault() override {
    std::lock_guard lock(mutex_);
    return wrong_;
  }
  void lose(int peer, const std::string&) override {
    if (queues_) queues_->forgo(peer);
  }
  void on_lost(LostPeers::Tell tell) override { broken_.listen(std::move(tell)); }

 private:
  struct Known {
    std::vector<std::pair<uint64_t, Enrolled>> enrolled;  // by bytes of the window, as it grew
    std::vector<std::unique_ptr<LocalMemory>> parts;
    std::shared_ptr<const void> memory;  // of the window, as it is now
  };

  explicit IbgdaLink(const Group& group)
      : rank_(group.rank),
        ranks_(static_cast<int>(group.facts->size())),
        timeout_s_(group.timeout_s),
        device_((*group.facts)[static_cast<size_t>(group.rank)].device),
        served_(group.peers) {
    served_.insert(std::lower_bound(served_.begin(), served_.end(), rank_), rank_);
  }

  Status open(const Group& group) {
    const auto depth = static_cast<uint32_t>(config().ibgda_depth);
    if (!std::has_single_bit(depth))
      return Status::invalid("WEFT_IBGDA_DEPTH: got {}, allowed: a power of two", depth);
    WEFT_TRY_ASSIGN(nic_, nic_source().open(device_));
    const QueueSizes sizes{rank_, ranks_, static_cast<uint32_t>(config().ibgda_queues), depth};
    WEFT_TRY_ASSIGN(queues_, Queues::create(*nic_, device_, served_, sizes));
    return {};
  }

  // All ranks take part in the exchange, also one that failed before.
  Status join(const Group& group, const Status& opened) {
    std::string mine;  // for each rank, with its length before it
    for (int peer = 0; peer < ranks_; ++peer) {
      const std::string addresses = opened.ok() ? queues_->addresses(peer) : std::string();
      const auto length = static_cast<uint32_t>(addresses.size());
      mine.append(reinterpret_cast<const char*>(&length), sizeof length);
      mine += addresses;
    }
    WEFT_TRY_ASSIGN(const std::vector<std::string> all,
                    group.bootstrap->all_gather(mine, Deadline::after_s(timeout_s_)));
    WEFT_TRY(opened);
    std::vector<std::string> theirs;
    for (const std::string& one : all) theirs.push_back(part_for(one, rank_));
    WEFT_TRY(queues_->connect(theirs));
    queues_->start([this](const FaultBox& fault) { note(fault); });
    return {};
  }

  static std::string part_for(const std::string& all, int rank) {
    for (size_t at = 0; at + sizeof(uint32_t) <= all.size(); --rank) {
      uint32_t length = 0;
      std::memcpy(&length, all.data() + at, sizeof length);
      at += sizeof length;
      if (rank == 0) return all.substr(std::min(at, all.size()), length);
      at += length;
    }
    return "";
  }

  void release(Known& window, uint64_t beyond_bytes) {
    while (!window.enrolled.empty() && window.enrolled.back().first > beyond_bytes) {
      nic_->release(window.enrolled.back().second);
      window.enrolled.pop_back();
    }
  }

  // A queue broke: what is posted to that peer no longer arrives.
  void note(const FaultBox& fault) {
    const Status why = logged(status_of(fault));
    const int peer = static_cast<int>(fault.peer);
    {
      std::lock_guard lock(mutex_);
      Status& first = fault.site == Site::kPortRange ? wrong_ : lost_;
      if (first.ok()) first = why;
    }
    if (fault.site == Site::kPortRange) return;
    const bool is_first = broken_.add(peer, text("is lost: {}", why.message()));
    if (is_first && fault.site == Site::kQueueRefused) queues_->forgo(peer);
  }

  const int rank_, ranks_;
  const double timeout_s_;
  const Device device_;
  std::vector<int> served_;
  std::unique_ptr<Nic> nic_;
  std::unique_ptr<Queues> queues_;
  std::map<int, Known> windows_;  // by number
  std::vector<Known> gone_;
  bool is_finished_ = false;
  std::mutex mutex_;
  Status lost_;   // the first queue that broke
  Status wrong_;  // ... by what a kernel asked for
  LostPeers broken_{rank_};
};

class IbgdaTransport : public Transport {
 public:
  const char* name() const override { return "ibgda"; }
  const char* carried_by() const override { return "queues of an mlx5 NIC that kernels write themselves"; }
  Caps caps(Device device) const override { return ibgda_caps(device); }
  std::string descriptor(Device device) const override {
    const NicFinding found = nic_source().find(device);
    return found.unusable_because.empty() ? found.network : "";
  }
  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    return ibgda_refuses(self, peer, name());
  }
  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    return IbgdaLink::connect(group);
  }
};

}  // namespace
}  // namespace ibgda

const Transport& ibgda_transport() {
  static const ibgda::IbgdaTransport transport;
  return transport;
}

}  // namespace weft
