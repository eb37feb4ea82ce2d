// SPDX-License-Identifier: Apache-2.0
//
// The host half of the nvshmem transport. Windows lie in NVSHMEM's symmetric heap; nvshmem_ptr() says where the parts of a node's
// peers are, once, and kernels get the mesh of mapped peers. Ranks of other nodes are ports (ports.h, channel.cuh).
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "base/nvjitlink.h"
#include "memory/device_memory.h"
#include "transports/mapped_peers.h"
#include "transports/nvshmem/device_library.h"
#include "transports/nvshmem/ports.h"
#include "transports/nvshmem/session.h"

namespace weft {
namespace nvshmem_link {
namespace {

constexpr const char* kName = "nvshmem";
constexpr double kFarewell_s = 5;  // for peers to leave, too
// Estimates for ports, until a network has been measured: a host thread carries each put, over a NIC of 100 Gbit/s.
constexpr double kPortLatencyUs = 25, kPortGbS = 12.5;

// Why kernels cannot be linked with NVSHMEM's device code; empty where they can.
std::string why_no_ports(const Library& nvshmem) {
  if (nvshmem.serves_host) return "";
  const Result<DeviceLibrary> found = find_device_library(nvshmem.path, nvshmem.version);
  return found.ok() ? open_nvjitlink().status().message() : found.status().message();
}

class NvshmemLink : public Link {
 public:
  NvshmemLink(const Group& group, Session& session)
      : session_(session),
        bootstrap_(*group.bootstrap),
        device_((*group.facts)[static_cast<size_t>(group.rank)].device),
        rank_(group.rank),
        ranks_(static_cast<int>(group.facts->size())),
        mapped_(group.peers.begin(), group.peers.end()),
        timeout_s_(group.timeout_s) {
    mapped_.insert(rank_);
  }
  ~NvshmemLink() override {
    finish();
    while (!parts_.empty()) forget(parts_.begin()->first, 0);
  }

  // For a group with ports.
  Status open_ports(const Library& nvshmem) {
    WEFT_TRY_ASSIGN(ports_,
                    ShmemPorts::create(device_, rank_, ranks_, timeout_s_, nvshmem.host_calls,
                                       [this](int peer, const std::string& how) { lose(peer, how); }));
    if (device_.is_host()) return {};
    WEFT_TRY(open_nvjitlink().status());
    WEFT_TRY_ASSIGN(const DeviceLibrary where, find_device_library(nvshmem.path, nvshmem.version));
    WEFT_TRY_ASSIGN(sources_, device_sources(where));
    return {};
  }

  // Far peers may still have to get what NVSHMEM carries for kernels that have ended: nobody leaves before all are done.
  void finish() override {
    if (std::exchange(is_finished_, true) || !ports_ || !ports_->has_far() || !lost_.empty()) return;
    const Status left = session_.meet(std::min(kFarewell_s, timeout_s_));
    if (!left.ok()) log_info("{}", left.message());
  }

  Result<MeshPart> mesh(const WindowView& window) override {
    const NvshmemMesh mesh = ports_->mesh(window);
    MeshPart part{"NvshmemMesh", std::vector<std::byte>(sizeof mesh), sources_};
    std::memcpy(part.value.data(), &mesh, sizeof mesh);
    return part;
  }

  Status fault() override { return ports_ ? ports_->fault() : Status(); }
  Status status() override { return ports_ ? ports_->status() : Status(); }
  void lose(int peer, const std::string& how) override {
    std::lock_guard lock(mutex_);
    if (lost_.try_emplace(peer, how).second && tell_ && peer != rank_) tell_(peer, how);
  }
  void on_lost(std::function<void(int, const std::string&)> tell) override {
    std::lock_guard lock(mutex_);
    tell_ = std::move(tell);
    for (const auto& [peer, how] : lost_) tell_(peer, how);
  }

  // NVSHMEM's allocation is collective: map() makes it.
  Status allocate(int window, uint64_t bytes) override {
    parts_[window] = {kNoBlock, bytes};
    return {};
  }

  Result<std::vector<std::byte*>> map(int window) override {
    Part& part = parts_.at(window);
    const auto exchange = [&](const std::string& mine) {
      return bootstrap_.all_gather(mine, Deadline::after_s(timeout_s_));
    };
    WEFT_TRY_ASSIGN(part.block, session_.take(part.bytes, exchange, timeout_s_));
    std::vector<std::byte*> bases;
    for (int peer = 0; peer < ranks_; ++peer) {
      std::byte* const at = session_.part(part.block, peer);
      bases.push_back(mapped_.contains(peer) ? at : nullptr);
      if (!mapped_.contains(peer)) {
        if (!at) WEFT_TRY(use_far_peer(peer));
      } else if (!at)
        return Status::make(
            Code::kUnsupported,
            "rank {}, nvshmem: NVSHMEM gives no address for memory of rank {} (no peer access, or "
            "NVSHMEM_DISABLE_P2P)",
            rank_, peer);
    }
    std::byte* own = bases[static_cast<size_t>(rank_)];
    if (device_.is_host())
      std::memset(own, 0, part.bytes);
    else
      WEFT_TRY(zero_device_memory(device_.ordinal, own, part.bytes));
    return bases;
  }

  void forget(int window, uint64_t bytes) override {
    const auto known = parts_.find(window);
    if (known == parts_.end() || bytes > 0) return;
    // What this rank's kernels put to far peers may be under way after they have ended, and so may what peers put here.
    const bool is_settled = !ports_ || !ports_->has_far();
    if (known->second.block != kNoBlock && is_settled) session_.give(known->second.block);
    parts_.erase(known);
  }

 private:
  // Kernels poll words themselves, so what a NIC wrote before a word must be visible with it. NVSHMEM's own waits have a remedy
  // where the GPU does not see to that.
  Status use_far_peer(int peer) {
    if (!device_.is_host()) {
      WEFT_TRY_ASSIGN(
          const int order,
          cuda_device_attribute(device_.ordinal, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING));
      if (order < CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER)
        return Status::make(
            Code::kUnsupported,
            "rank {}, nvshmem: rank {} is reached by a NIC, whose writes {} does not order "
            "(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: expected {} or more, saw {})",
            rank_, peer, device_, CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, order);
    }
    ports_->set_far();
    return {};
  }

  static constexpr int kNoBlock = -1;
  struct Part {
    int block = kNoBlock;
    uint64_t bytes = 0;
  };

  Session& session_;
  Bootstrap& bootstrap_;
  const Device device_;
  const int rank_, ranks_;
  std::set<int> mapped_;  // this rank, too
  const double timeout_s_;
  bool is_finished_ = false;
  std::map<int, Part> parts_;  // by the number of a window
  std::shared_ptr<const DeviceSources> sources_;
  std::mutex mutex_;
  std::map<int, std::string> lost_;  // peers, and how
  std::function<void(int, const std::string&)> tell_;
  std::unique_ptr<ShmemPorts> ports_;  // where any rank has some; its thread uses what is above
};

// What serves ranks on `device`, or why nothing does.
Result<const Library*> library_for(Device device) {
  const Status host_has_none(Code::kUnsupported, "NVSHMEM joins GPUs, this rank is on the CPU");
  if (device.is_host() && config().nvshmem_library.empty()) return host_has_none;
  WEFT_TRY_ASSIGN(const Library* nvshmem, open_library());
  if (device.is_host() && !nvshmem->serves_host) return host_has_none;
  if (!device.is_host() && nvshmem->serves_host)
    return Status::make(Code::kUnsupported, "{} stands in for NVSHMEM on CPUs, this rank is on a GPU",
                        nvshmem->path);
  return nvshmem;
}

// What a rank shows the others before NVSHMEM starts. A Status that travels; of rank 0 the id behind it.
std::string to_bytes(const Status& status, bool is_running, const UniqueId& id) {
  return std::string{static_cast<char>(status.code()), is_running ? '1' : '0'} +
         std::string(reinterpret_cast<const char*>(&id), sizeof id) + status.message().substr(0, 400);
}

Result<UniqueId> take_id(const std::vector<std::string>& all) {
  UniqueId id{};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].size() < 2 + sizeof id)
      return Status::make(Code::kInvalid, "rank {} makes another call on this communicator", rank);
    const auto code = static_cast<Code>(all[rank][0]);
    if (code != Code::kOk)
      return Status::make(code, "nvshmem, on rank {}: {}", rank, all[rank].substr(2 + sizeof id));
    if (all[rank][1] != all[0][1])
      return Status::invalid(
          "nvshmem: NVSHMEM runs on rank {} and not on rank {}, allowed: on all ranks or on none",
          all[rank][1] == '1' ? rank : 0, all[rank][1] == '1' ? 0 : rank);
  }
  std::memcpy(&id, all[0].data() + 2, sizeof id);
  return id;
}

std::pair<std::string, std::string> parts_of(const std::string& descriptor) {
  const size_t line = descriptor.find('\n');
  return {descriptor.substr(0, line), line == std::string::npos ? "" : descriptor.substr(line + 1)};
}

class NvshmemTransport : public Transport {
 public:
  const char* name() const override { return kName; }
  const char* carried_by() const override {
    return "NVSHMEM's symmetric memory: mapped peers, and ports by its device calls";
  }

  Caps caps(Device device) const override {
    const Result<const Library*> nvshmem = library_for(device);
    Caps caps;
    if (nvshmem.ok()) {
      caps = mapped_caps(device);
      const std::string lack = why_no_ports(**nvshmem);
      caps.details =
          text("NVSHMEM {}, {}; {}; by name alone: WEFT_TRANSPORT=nvshmem", (*nvshmem)->version,
               (*nvshmem)->path, lack.empty() ? "other nodes by its device calls" : "no ports: " + lack);
    } else {
      caps.unusable_because = nvshmem.status().message();
    }
    caps.reach = Reach::kMapped;
    caps.brings_memory = true;
    caps.only_by_name = true;
    return caps;
  }

  // The version, and why it has no ports behind a line; empty where it cannot be used.
  std::string descriptor(Device device) const override {
    const Result<const Library*> nvshmem = library_for(device);
    return nvshmem.ok() ? (*nvshmem)->version + "\n" + why_no_ports(**nvshmem) : "";
  }

  // Ranks of a node are mapped; those of others are ports.
  Caps towards(const Caps& caps, const RankFacts& self, const RankFacts& peer) const override {
    if (self.node == peer.node) return caps;
    Caps port = caps;
    port.reach = Reach::kPort;
    port.ordering = Ordering::kSignals;
    port.latency_us = kPortLatencyUs;
    port.bandwidth_gb_s = kPortGbS;
    return port;
  }

  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    for (const RankFacts* one : {&self, &peer}) {
      const auto descriptor = one->descriptors.find(kName);
      if (descriptor == one->descriptors.end() || descriptor->second.empty())
        return text("rank {} has no NVSHMEM that it could use", one->rank);
    }
    const auto [mine, my_lack] = parts_of(self.descriptors.at(kName));
    const auto [theirs, their_lack] = parts_of(peer.descriptors.at(kName));
    if (mine != theirs)
      return text("rank {} has NVSHMEM {}, rank {} has NVSHMEM {}", self.rank, mine, peer.rank, theirs);
    if (self.process == peer.process) return "NVSHMEM takes one rank for each process";
    if (self.node == peer.node) return why_not_mapped(self, peer);
    for (const auto& [rank, lack] : {std::pair(self.rank, my_lack), std::pair(peer.rank, their_lack)})
      if (!lack.empty()) return text("rank {} reaches its node alone: {}", rank, lack);
    return "";
  }

  // All ranks take part in the exchange, also one that failed before.
  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    Session& session = Session::of_process();
    const Result<const Library*> nvshmem =
        library_for((*group.facts)[static_cast<size_t>(group.rank)].device);
    UniqueId id{};
    Status ready = nvshmem.status();
    const bool is_running = ready.ok() && (*nvshmem)->nvshmemx_init_status() >= kIsInitialized;
    if (ready.ok() && !is_running && group.rank == 0 && (*nvshmem)->nvshmemx_get_uniqueid(&id) != 0)
      ready = Status::make(Code::kSystem, "nvshmemx_get_uniqueid failed (NVSHMEM_DEBUG=INFO says more)");
    WEFT_TRY_ASSIGN(
        const std::vector<std::string> all,
        group.bootstrap->all_gather(to_bytes(ready, is_running, id), Deadline::after_s(group.timeout_s)));
    WEFT_TRY_ASSIGN(id, take_id(all));
    WEFT_TRY(session.start(group, **nvshmem, id));
    auto link = std::make_unique<NvshmemLink>(group, session);
    if (group.has_ports) WEFT_TRY(link->open_ports(**nvshmem));
    return std::unique_ptr<Link>(std::move(link));
  }
};

}  // namespace
}  // namespace nvshmem_link

const Transport& nvshmem_transport() {
  static const nvshmem_link::NvshmemTransport transport;
  return transport;
}

}  // namespace weft
