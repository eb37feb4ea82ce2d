// SPDX-License-Identifier: Apache-2.0
//
// The host half of the nccl transport. Windows lie in memory that NCCL allocates and registers; where peers' parts are
// is asked once, so kernels know nothing of NCCL: they get the mesh of mapped peers.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "memory/device_memory.h"
#include "transports/mapped_peers.h"
#include "transports/nccl/library.h"

namespace weft {
namespace nccl_link {
namespace {

constexpr const char* kName = "nccl";
constexpr uint64_t kProbeBytes = uint64_t{2} << 20;

// Runs `call` with the rank's GPU current, as NCCL wants it.
template <class Call>
Status on_device(Device device, Call call) {
  if (device.is_host()) return call();
  WEFT_TRY_ASSIGN(const CudaContext current, CudaContext::enter(device.ordinal));
  return call();
}

// What a rank shows the others before the communicator is made. A Status that travels; of rank 0 the id behind it.
std::string to_bytes(const Status& status, const UniqueId& id) {
  return std::string(1, static_cast<char>(status.code())) + std::string(id.internal, sizeof id.internal) +
         status.message().substr(0, 400);
}

Result<UniqueId> take_id(const std::vector<std::string>& all) {
  UniqueId id{};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].size() < 1 + sizeof id)
      return Status::make(Code::kInvalid, "rank {} makes another call on this communicator", rank);
    const auto code = static_cast<Code>(all[rank][0]);
    if (code != Code::kOk)
      return Status::make(code, "nccl, on rank {}: {}", rank, all[rank].substr(1 + sizeof id));
  }
  std::memcpy(&id, all[0].data() + 1, sizeof id);
  return id;
}

class NcclLink : public Link {
 public:
  NcclLink(const Group& group, const Library& library)
      : nccl_(library),
        device_((*group.facts)[static_cast<size_t>(group.rank)].device),
        rank_(group.rank),
        ranks_(static_cast<int>(group.facts->size())),
        timeout_s_(group.timeout_s) {}

  // NCCL's own farewell is collective, and nothing of this communicator is under way: abort frees it at once, on this
  // rank alone.
  ~NcclLink() override {
    while (!parts_.empty()) forget(parts_.begin()->first, 0);
    end();
  }

  // Collective. The communicator, and one window for a trial: what fails is to fail here.
  Status open(const UniqueId& id) {
    WEFT_TRY(on_device(device_, [&] {
      Config config;
      return finish("ncclCommInitRankConfig", nccl_.CommInitRankConfig(&comm_, ranks_, id, rank_, &config));
    }));
    team_ = nccl_.TeamLsa(comm_);
    if (team_.ranks != ranks_)
      return Status::make(
          Code::kUnsupported,
          "rank {}, nccl: NCCL {} joins {} of {} ranks by loads and stores (its LSA team), all are needed",
          rank_, version_text(nccl_.version), team_.ranks, ranks_);
    WEFT_TRY(allocate(kProbe, kProbeBytes));
    const Status probed = map(kProbe).status();
    forget(kProbe, 0);
    return probed;
  }

  Status allocate(int window, uint64_t bytes) override {
    WEFT_TRY(broken_);
    Part& part = parts_[window];
    part.bytes = bytes;
    WEFT_TRY(on_device(device_, [&] { return check("ncclMemAlloc", nccl_.MemAlloc(&part.at, bytes)); }));
    auto* at = static_cast<std::byte*>(part.at);
    if (device_.is_host()) {
      std::memset(at, 0, bytes);
      return {};
    }
    return zero_device_memory(device_.ordinal, at, bytes);
  }

  Result<std::vector<std::byte*>> map(int window) override {
    WEFT_TRY(broken_);
    Part& part = parts_.at(window);
    WEFT_TRY(on_device(device_, [&] {
      return finish("ncclCommWindowRegister",
                    nccl_.CommWindowRegister(comm_, part.at, part.bytes, &part.window, kNoFlags));
    }));
    WEFT_TRY_ASSIGN(std::vector<std::byte*> bases,
                    nccl_.GetLsaDevicePointer ? ask_for_parts(part) : read_parts(part));
    bases[static_cast<size_t>(rank_)] = static_cast<std::byte*>(part.at);
    return bases;
  }

  // A library that was aborted has given up its windows by itself.
  void forget(int window, uint64_t bytes) override {
    const auto known = parts_.find(window);
    if (known == parts_.end() || bytes > 0) return;
    const Part part = known->second;
    parts_.erase(known);
    const Status gone = on_device(device_, [&]() -> Status {
      if (part.window && comm_)
        WEFT_TRY(check("ncclCommWindowDeregister", nccl_.CommWindowDeregister(comm_, part.window)));
      return part.at ? check("ncclMemFree", nccl_.MemFree(part.at)) : Status();
    });
    if (!gone.ok()) log_warn("{}", gone.message());
  }

 private:
  static constexpr int kProbe = -1;   // no window's number
  static constexpr int kNoFlags = 0;  // no collectives of NCCL run on windows

  struct Part {
    void* at = nullptr;  // this rank's part
    uint64_t bytes = 0;
    Window window = nullptr;
  };

  Status unsupported(std::string_view why) const {
    return Status::make(
        Code::kUnsupported,
        "rank {}, nccl: NCCL {} does not support symmetric memory here ({}): it takes peer access "
        "between all GPUs of a node, NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE not 0",
        rank_, version_text(nccl_.version), why);
  }

  Result<std::vector<std::byte*>> ask_for_parts(const Part& part) {
    if (!part.window) return unsupported("it registered no window");
    std::vector<std::byte*> bases;
    for (int rank = 0; rank < ranks_; ++rank) {
      void* at = nullptr;
      WEFT_TRY(on_device(device_, [&] {
        return check("ncclGetLsaDevicePointer",
                     nccl_.GetLsaDevicePointer(part.window, 0, lsa_rank(rank), &at));
      }));
      if (!at) return unsupported(text("rank {}'s part has no address", rank));
      bases.push_back(static_cast<std::byte*>(at));
    }
    return bases;
  }

  // NCCL 2.28 has no call for it; its windows say where they are.
  Result<std::vector<std::byte*>> read_parts(const Part& part) {
    if (!part.window) return unsupported("it registered no window");
    WindowFields fields{};
    WEFT_TRY(read_fields(part.window, fields));
    if (fields.world_rank != rank_ || fields.lsa_rank != lsa_rank(rank_) || fields.lsa_flat_base == 0)
      return unsupported("its window is not laid out as Weft knows it");
    std::vector<std::byte*> bases;
    for (int rank = 0; rank < ranks_; ++rank)
      bases.push_back(reinterpret_cast<std::byte*>(
          fields.lsa_flat_base + (uint64_t{fields.stride_4g} << 32) * static_cast<uint64_t>(lsa_rank(rank))));
    return bases;
  }

  // Where symmetric memory is unsupported, what NCCL 2.28 calls a window is something else, in memory of the host.
  Status read_fields(Window window, WindowFields& fields) {
    if (device_.is_host()) {
      std::memcpy(&fields, window, sizeof fields);
      return {};
    }
    const auto at = reinterpret_cast<CUdeviceptr>(window);
    unsigned kind = 0;
    WEFT_TRY_ASSIGN(const CudaContext current, CudaContext::enter(device_.ordinal));
    const CUresult known =
        current.driver().cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
    if (known != CUDA_SUCCESS || kind != CU_MEMORYTYPE_DEVICE)
      return unsupported("it registered the buffer on this rank alone");
    return copy_from_device(device_.ordinal, &fields, reinterpret_cast<const std::byte*>(window),
                            sizeof fields);
  }

  int lsa_rank(int rank) const { return rank - (rank_ - team_.rank); }

  // A call that may go on after it returned, whatever it returned: waits for it. Past the deadline nothing of the
  // communicator can be relied on.
  Status finish(const char* call, int result) {
    const Deadline until = Deadline::after_s(timeout_s_);
    const auto is_done = [&] {
      if (!comm_ || (result != kSuccess && result != kInProgress)) return true;
      int state = kSuccess;
      const int asked = nccl_.CommGetAsyncError(comm_, &state);
      result = asked == kSuccess ? state : asked;
      return result != kInProgress;
    };
    if (wait_until(until, is_done) && result == kSuccess) return {};
    broken_ =
        result == kInProgress
            ? Status::make(
                  Code::kPeerLost,
                  "rank {}, {}: waited {} s for the other {} ranks: expected success, saw 'in progress'",
                  rank_, call, timeout_s_, ranks_ - 1)
            : check(call, result);
    end();
    return broken_;
  }

  Status check(const char* call, int result) {
    if (result == kSuccess) return {};
    const char* last = comm_ ? nccl_.GetLastError(comm_) : nullptr;
    return Status::make(Code::kSystem, "rank {}, {}: NCCL {}: {}{}{}", rank_, call,
                        version_text(nccl_.version), nccl_.GetErrorString(result), last && *last ? ": " : "",
                        last ? last : "");
  }

  void end() {
    if (!comm_) return;
    const Comm comm = std::exchange(comm_, nullptr);
    (void)on_device(device_, [&] { return nccl_.CommAbort(comm), Status(); });
  }

  const Library& nccl_;
  const Device device_;
  const int rank_, ranks_;
  const double timeout_s_;
  Comm comm_ = nullptr;
  Team team_{};
  std::map<int, Part> parts_;  // by the number of a window
  Status broken_;
};

// What serves ranks on `device`, or why nothing does.
Result<const Library*> library_for(Device device) {
  const Status host_has_none(Code::kUnsupported, "NCCL joins GPUs, this rank is on the CPU");
  if (device.is_host() && config().nccl_library.empty()) return host_has_none;
  WEFT_TRY_ASSIGN(const Library* nccl, open_library());
  if (device.is_host() && !nccl->serves_host) return host_has_none;
  if (!device.is_host() && nccl->serves_host)
    return Status::make(Code::kUnsupported, "{} stands in for NCCL on CPUs, this rank is on a GPU",
                        nccl->path);
  return nccl;
}

class NcclTransport : public Transport {
 public:
  const char* name() const override { return kName; }
  const char* carried_by() const override {
    return "windows of the process's own NCCL; its peers are mapped";
  }

  Caps caps(Device device) const override {
    const Result<const Library*> nccl = library_for(device);
    Caps caps;
    if (nccl.ok()) {
      caps = mapped_caps(device);
      caps.details = text("NCCL {}{}, {}; by name alone: WEFT_TRANSPORT=nccl", version_text((*nccl)->version),
                          (*nccl)->was_loaded ? ", as this process has loaded it" : "", (*nccl)->path);
    } else {
      caps.unusable_because = nccl.status().message();
    }
    caps.reach = Reach::kMapped;
    caps.brings_memory = true;
    caps.only_by_name = true;
    return caps;
  }

  // The version; empty where it cannot be used.
  std::string descriptor(Device device) const override {
    const Result<const Library*> nccl = library_for(device);
    return nccl.ok() ? version_text((*nccl)->version) : "";
  }

  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    for (const RankFacts* one : {&self, &peer}) {
      const auto descriptor = one->descriptors.find(kName);
      if (descriptor == one->descriptors.end() || descriptor->second.empty())
        return text("rank {} has no NCCL that it could use", one->rank);
    }
    const std::string &mine = self.descriptors.at(kName), &theirs = peer.descriptors.at(kName);
    if (mine != theirs)
      return text("rank {} has NCCL {}, rank {} has NCCL {}", self.rank, mine, peer.rank, theirs);
    if (!self.gpu.empty() && self.gpu == peer.gpu && self.host == peer.host)
      return text("both ranks are on GPU {}; NCCL takes one rank for each", self.gpu);
    return why_not_mapped(self, peer);
  }

  // All ranks take part in the exchange, also one that failed before.
  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    const Result<const Library*> nccl = library_for((*group.facts)[static_cast<size_t>(group.rank)].device);
    UniqueId id{};
    Status ready = nccl.status();
    if (ready.ok() && group.rank == 0 && (*nccl)->GetUniqueId(&id) != kSuccess)
      ready =
          Status::make(Code::kSystem, "ncclGetUniqueId failed (no network interface for NCCL to meet on?)");
    WEFT_TRY_ASSIGN(const std::vector<std::string> all,
                    group.bootstrap->all_gather(to_bytes(ready, id), Deadline::after_s(group.timeout_s)));
    WEFT_TRY_ASSIGN(id, take_id(all));
    auto link = std::make_unique<NcclLink>(group, **nccl);
    WEFT_TRY(link->open(id));
    return std::unique_ptr<Link>(std::move(link));
  }
};

}  // namespace
}  // namespace nccl_link

const Transport& nccl_transport() {
  static const nccl_link::NcclTransport transport;
  return transport;
}

}  // namespace weft
