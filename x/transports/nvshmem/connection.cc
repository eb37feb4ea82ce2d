// SPDX-License-Identifier: Apache-2.0
//
// The host half of the nvshmem transport. Windows lie in NVSHMEM's symmetric heap; nvshmem_ptr() says where peers' parts
// are, once, and kernels get the mesh of mapped peers.
#include <cstring>
#include <map>

#include "base/config.h"
#include "base/log.h"
#include "memory/device_memory.h"
#include "transports/mapped_peers.h"
#include "transports/nvshmem/session.h"

namespace weft {
namespace nvshmem_link {
namespace {

constexpr const char* kName = "nvshmem";

class NvshmemLink : public Link {
 public:
  NvshmemLink(const Group& group, Session& session)
      : session_(session),
        bootstrap_(*group.bootstrap),
        device_((*group.facts)[static_cast<size_t>(group.rank)].device),
        rank_(group.rank),
        ranks_(static_cast<int>(group.facts->size())),
        timeout_s_(group.timeout_s) {}
  ~NvshmemLink() override {
    while (!parts_.empty()) forget(parts_.begin()->first, 0);
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
      bases.push_back(session_.part(part.block, peer));
      if (!bases.back())
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
    if (known->second.block != kNoBlock) session_.give(known->second.block);
    parts_.erase(known);
  }

 private:
  static constexpr int kNoBlock = -1;
  struct Part {
    int block = kNoBlock;
    uint64_t bytes = 0;
  };

  Session& session_;
  Bootstrap& bootstrap_;
  const Device device_;
  const int rank_, ranks_;
  const double timeout_s_;
  std::map<int, Part> parts_;  // by the number of a window
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

class NvshmemTransport : public Transport {
 public:
  const char* name() const override { return kName; }
  const char* carried_by() const override { return "NVSHMEM's symmetric memory; its peers are mapped"; }

  Caps caps(Device device) const override {
    const Result<const Library*> nvshmem = library_for(device);
    Caps caps;
    if (nvshmem.ok()) {
      caps = mapped_caps(device);
      caps.details = text("NVSHMEM {}, {}; by name alone: WEFT_TRANSPORT=nvshmem", (*nvshmem)->version,
                          (*nvshmem)->path);
    } else {
      caps.unusable_because = nvshmem.status().message();
    }
    caps.reach = Reach::kMapped;
    caps.brings_memory = true;
    caps.only_by_name = true;
    return caps;
  }

  // The version; empty where it cannot be used.
  std::string descriptor(Device device) const override {
    const Result<const Library*> nvshmem = library_for(device);
    return nvshmem.ok() ? (*nvshmem)->version : "";
  }

  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    for (const RankFacts* one : {&self, &peer}) {
      const auto descriptor = one->descriptors.find(kName);
      if (descriptor == one->descriptors.end() || descriptor->second.empty())
        return text("rank {} has no NVSHMEM that it could use", one->rank);
    }
    const std::string &mine = self.descriptors.at(kName), &theirs = peer.descriptors.at(kName);
    if (mine != theirs)
      return text("rank {} has NVSHMEM {}, rank {} has NVSHMEM {}", self.rank, mine, peer.rank, theirs);
    if (self.process == peer.process) return "NVSHMEM takes one rank for each process";
    return why_not_mapped(self, peer);
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
    return std::unique_ptr<Link>(new NvshmemLink(group, session));
  }
};

}  // namespace
}  // namespace nvshmem_link

const Transport& nvshmem_transport() {
  static const nvshmem_link::NvshmemTransport transport;
  return transport;
}

}  // namespace weft
