// SPDX-License-Identifier: Apache-2.0
//
// The host half of the nvshmem transport. Windows lie in NVSHMEM's symmetric heap; nvshmem_ptr() says where the parts of a node's
// peers are, once, and kernels get the mesh of mapped peers. Ranks of other nodes are ports (ports.h, channel.cuh).
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "base/nvjitlink.h"
#include "memory/device_memory.h"
#include "transports/library_transport.h"
#include "transports/nvshmem/device_library.h"
#include "transports/nvshmem/ports.h"
#include "transports/nvshmem/session.h"

namespace weft {
namespace nvshmem_link {
namespace {

constexpr const char *kName = "nvshmem", *kTitle = "NVSHMEM";
constexpr double kFarewell_s = 5;  // for peers to leave, too

// Why kernels cannot be linked with NVSHMEM's device code; empty where they can.
std::string why_no_ports(const Library& nvshmem) {
  if (nvshmem.serves_host) return "";
  const Result<DeviceLibrary> found = find_device_library(nvshmem.path, nvshmem.version);
  return found.ok() ? open_nvjitlink().status().message() : found.status().message();
}

class NvshmemLink : public LibraryLink {
 public:
  NvshmemLink(const Group& group, Session& session)
      : LibraryLink(group), session_(session), bootstrap_(*group.bootstrap) {}
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
    if (std::exchange(is_finished_, true) || !ports_ || !ports_->has_far() || lost_.any()) return;
    const Status left = session_.meet(std::min(kFarewell_s, timeout_s_));
    if (!left.ok()) log_info("{}", left.message());
  }

  Result<MeshPart> mesh(const WindowView& window) override {
    const NvshmemMesh mesh = ports_->mesh(window);
    return mesh_part("NvshmemMesh", mesh, sources_);
  }

  Status fault() override { return ports_ ? ports_->fault() : Status(); }
  Status status() override { return ports_ ? ports_->status() : Status(); }
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
  bool is_finished_ = false;
  std::map<int, Part> parts_;  // by the number of a window
  std::shared_ptr<const DeviceSources> sources_;
  std::unique_ptr<ShmemPorts> ports_;  // where any rank has some; its thread uses what is above
};

Result<const Library*> serving(Device device) {
  return library_for(device, kTitle, config().nvshmem_library, open_library);
}

// What a rank shows the others before NVSHMEM starts. Of rank 0 with the id.
std::string shown(const UniqueId& id, bool is_running) {
  return std::string(reinterpret_cast<const char*>(&id), sizeof id) + (is_running ? '1' : '0');
}

Result<UniqueId> agree(const std::vector<std::string>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank].back() != all[0].back())
      return Status::invalid(
          "nvshmem: NVSHMEM runs on rank {} and not on rank {}, allowed: on all ranks or on none",
          all[rank].back() == '1' ? rank : 0, all[rank].back() == '1' ? 0 : rank);
  UniqueId id{};
  std::memcpy(&id, all[0].data(), sizeof id);
  return id;
}

class NvshmemTransport : public LibraryTransport {
 public:
  NvshmemTransport() : LibraryTransport(kName, kTitle) {}
  const char* carried_by() const override {
    return "NVSHMEM's symmetric memory: mapped peers, and ports by its device calls";
  }

  // All ranks take part in the exchange, also one that failed before.
  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    Session& session = Session::of_process();
    const Result<const Library*> nvshmem = serving((*group.facts)[static_cast<size_t>(group.rank)].device);
    UniqueId mine{};
    Status ready = nvshmem.status();
    const bool is_running = ready.ok() && (*nvshmem)->nvshmemx_init_status() >= kIsInitialized;
    if (ready.ok() && !is_running && group.rank == 0 && (*nvshmem)->nvshmemx_get_uniqueid(&mine) != 0)
      ready = Status::make(Code::kSystem, "nvshmemx_get_uniqueid failed (NVSHMEM_DEBUG=INFO says more)");
    WEFT_TRY_ASSIGN(const std::vector<std::string> all,
                    gather_ready(group, kName, ready, shown(mine, is_running)));
    WEFT_TRY_ASSIGN(const UniqueId id, agree(all));
    WEFT_TRY(session.start(group, **nvshmem, id));
    auto link = std::make_unique<NvshmemLink>(group, session);
    if (group.has_ports) WEFT_TRY(link->open_ports(**nvshmem));
    return std::unique_ptr<Link>(std::move(link));
  }

 private:
  Result<LibraryFacts> look(Device device) const override {
    WEFT_TRY_ASSIGN(const Library* nvshmem, serving(device));
    return LibraryFacts{nvshmem->version, nvshmem->path, "other nodes by its device calls",
                        why_no_ports(*nvshmem)};
  }
  std::string refuses_both(const RankFacts& self, const RankFacts& peer) const override {
    return self.process == peer.process ? "NVSHMEM takes one rank for each process" : "";
  }
};

}  // namespace
}  // namespace nvshmem_link

const Transport& nvshmem_transport() {
  static const nvshmem_link::NvshmemTransport transport;
  return transport;
}

}  // namespace weft
