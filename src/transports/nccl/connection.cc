// SPDX-License-Identifier: Apache-2.0
//
// The host half of the nccl transport. Windows lie in memory that NCCL allocates and registers; where the parts of peers are
// that it maps is asked once. Kernels on ranks that have no others know nothing of NCCL: they get the mesh of mapped peers.
// The others are reached through NCCL's GIN (gin_ports.h, channel.cuh).
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "memory/device_memory.h"
#include "transports/library_transport.h"
#include "transports/nccl/device_headers.h"
#include "transports/nccl/gin_ports.h"
#include "transports/nccl/library.h"

namespace weft {
namespace nccl_link {
namespace {

constexpr const char *kName = "nccl", *kTitle = "NCCL";
constexpr uint64_t kProbeBytes = uint64_t{2} << 20;
constexpr double kFarewell_s = 5;  // for peers to leave, too

// Runs `call` with the rank's GPU current, as NCCL wants it.
template <class Call>
Status on_device(Device device, Call call) {
  if (device.is_host()) return call();
  WEFT_TRY_ASSIGN(const CudaContext current, CudaContext::enter(device.ordinal));
  return call();
}

class NcclLink : public LibraryLink {
 public:
  NcclLink(const Group& group, const Library& library)
      : LibraryLink(group), nccl_(library), has_ports_(group.has_ports) {}

  // NCCL's own farewell is collective, and nothing of this communicator is under way: abort frees it at once, on this
  // rank alone.
  ~NcclLink() override {
    finish();
    ports_.reset();
    end_dev_comm();  // nothing reads or writes windows any more
    while (!parts_.empty()) forget(parts_.begin()->first, 0);
    for (const Part& part : gone_) release(part);
    end();
  }

  // Collective. The communicator, and one window for a trial: what fails is to fail here.
  Status open(const UniqueId& id) {
    WEFT_TRY(on_device(device_, [&] {
      Config config;
      return wait_for("ncclCommInitRankConfig", nccl_.CommInitRankConfig(&comm_, ranks_, id, rank_, &config));
    }));
    team_ = nccl_.TeamLsa(comm_);
    for (const int peer : mapped_)
      if (lsa_rank(peer) < 0 || lsa_rank(peer) >= team_.ranks)
        return Status::make(Code::kUnsupported,
                            "rank {}, nccl: NCCL {} joins {} of {} ranks by loads and stores (its LSA team), "
                            "rank {} is needed "
                            "and not among them",
                            rank_, version_text(nccl_.version), team_.ranks, ranks_, peer);
    if (has_ports_) WEFT_TRY(find_gin());
    WEFT_TRY(allocate(kProbe, kProbeBytes));
    const Status probed = map(kProbe).status();
    forget(kProbe, 0);
    WEFT_TRY(probed);
    return has_ports_ ? open_gin() : Status();
  }

  // Nothing goes before all ranks are done: NCCL takes no leave of peers, and gives up what is under way.
  void finish() override {
    if (std::exchange(is_finished_, true) || !ports_ || !broken_.ok() || lost_.any()) return;
    farewell_s_ = std::min(kFarewell_s, timeout_s_);
    if (!allocate(kProbe, kProbeBytes).ok()) return;
    const Status left = map(kProbe).status();
    if (!left.ok()) log_info("{}", left.message());
    forget(kProbe, 0);
  }

  Result<std::string> offer(const WindowView& window) override { return ports_->offer(window.number); }
  Status accept(const WindowView& window, const std::vector<std::string>& offers) override {
    return ports_->accept(window, offers);
  }
  Result<MeshPart> mesh(const WindowView& window) override {
    const NcclMesh mesh = ports_->mesh(window, parts_.at(window.number).window);
    return mesh_part("NcclMesh", mesh, sources_);
  }

  bool help() override { return ports_ && ports_->help(); }
  Status fault() override { return ports_->fault(); }
  Status status() override {
    WEFT_TRY(broken_);
    const Status why = ports_->status();
    if (ports_->lost_peer() >= 0) lose(ports_->lost_peer(), text("is lost: {}", why.message()));
    return why;
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
      return wait_for("ncclCommWindowRegister",
                      nccl_.CommWindowRegister(comm_, part.at, part.bytes, &part.window,
                                               has_ports_ ? kSymmetric : kNoFlags));
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
    if (ports_) ports_->forget(window);
    const Part part = known->second;
    parts_.erase(known);
    // Puts from it, which nobody here waits for, may be under way until all have taken leave.
    if (ports_ && window >= 0) return gone_.push_back(part);
    release(part);
  }

 private:
  struct Part {
    void* at = nullptr;  // this rank's part
    uint64_t bytes = 0;
    Window window = nullptr;
  };

  void release(const Part& part) {
    const Status gone = on_device(device_, [&]() -> Status {
      if (part.window && comm_)
        WEFT_TRY(check("ncclCommWindowDeregister", nccl_.CommWindowDeregister(comm_, part.window)));
      return part.at ? check("ncclMemFree", nccl_.MemFree(part.at)) : Status();
    });
    if (!gone.ok()) log_warn("{}", gone.message());
  }

  static constexpr int kProbe = -1, kInbox = -2;  // no window's numbers
  static constexpr int kNoFlags = 0;              // no collectives of NCCL run on windows
  static constexpr int kSymmetric = 1;            // NCCL_WIN_COLL_SYMMETRIC: GIN reaches them

  Status unsupported(std::string_view why) const {
    return Status::make(
        Code::kUnsupported,
        "rank {}, nccl: NCCL {} does not support symmetric memory here ({}): it takes peer access "
        "between all GPUs of a node, NCCL_CUMEM_ENABLE and NCCL_WIN_ENABLE not 0",
        rank_, version_text(nccl_.version), why);
  }

  // Which back end of GIN NCCL has here, and what kernels are compiled with for it.
  Status find_gin() {
    std::string folder;
    if (const std::string why = why_no_gin(nccl_, &folder); !why.empty())
      return Status::make(Code::kUnsupported, "rank {}, nccl: {}", rank_, why);
    properties_.size = nccl_.version >= kNewDevComm ? sizeof properties_ : offsetof(Properties, more);
    properties_.magic = Config{}.magic;
    properties_.version = static_cast<uint32_t>(nccl_.version);
    WEFT_TRY(on_device(device_, [&] {
      return check("ncclCommQueryProperties", nccl_.CommQueryProperties(comm_, &properties_));
    }));
    const auto type = static_cast<GinType>(properties_.gin_type);
    if (type == GinType::kNone)
      return Status::make(
          Code::kUnsupported,
          "rank {}, nccl: NCCL {} has no GIN here, which reaches ranks of other nodes: it takes a NIC that "
          "it knows, "
          "or a network by plug-in (NCCL_RMA_PLUGIN=$(python -m weft.nccl_rma_path) NCCL_GIN_TYPE=2); "
          "NCCL_DEBUG=INFO says what it lacks",
          rank_, version_text(nccl_.version));
    if (type == GinType::kEfaGda)
      return Status::make(
          Code::kUnsupported,
          "rank {}, nccl: NCCL's GIN of type {} has weak signals alone, allowed: PROXY, GDAKI, GPI "
          "(NCCL_GIN_TYPE chooses)",
          rank_, to_string(type));
    if (properties_.dev_comm_bytes > kDevCommRoom)
      return Status::make(Code::kUnsupported,
                          "rank {}, nccl: ncclDevComm takes {} bytes, allowed: at most {}", rank_,
                          properties_.dev_comm_bytes, kDevCommRoom);
    if (device_.is_host()) return {};
    WEFT_TRY_ASSIGN(sources_, device_sources(folder, type, properties_.dev_comm_bytes));
    return {};
  }

  // Collective: the device communicator, and the inbox.
  Status open_gin() {
    const auto records = static_cast<uint32_t>(config().nccl_records);
    if (!std::has_single_bit(records))
      return Status::invalid("WEFT_NCCL_RECORDS: got {}, allowed: a power of two", records);
    WEFT_TRY_ASSIGN(ports_, GinPorts::create(device_, rank_, ranks_, records, timeout_s_));
    const Requirements wanted = ports_->requirements(properties_);
    WEFT_TRY(on_device(device_, [&] {
      return wait_for("ncclDevCommCreate", nccl_.DevCommCreate(comm_, &wanted, dev_comm_.data()));
    }));
    has_dev_comm_ = true;
    const uint64_t bytes = (ports_->inbox_bytes() + kProbeBytes - 1) / kProbeBytes * kProbeBytes;
    WEFT_TRY(allocate(kInbox, bytes));
    WEFT_TRY(map(kInbox).status());
    const Part& inbox = parts_.at(kInbox);
    return ports_->start(dev_comm_.data(), dev_comm_.size(), inbox.window, static_cast<std::byte*>(inbox.at));
  }

  Result<std::vector<std::byte*>> ask_for_parts(const Part& part) {
    if (!part.window) return unsupported("it registered no window");
    std::vector<std::byte*> bases;
    for (int rank = 0; rank < ranks_; ++rank) {
      void* at = nullptr;
      if (!mapped_.contains(rank)) {
        bases.push_back(nullptr);
        continue;
      }
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
  Status wait_for(const char* call, int result) {
    const double limit_s = farewell_s_ > 0 ? farewell_s_ : timeout_s_;
    const Deadline until = Deadline::after_s(limit_s);
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
                  rank_, call, limit_s, ranks_ - 1)
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

  void end_dev_comm() {
    if (!std::exchange(has_dev_comm_, false) || !comm_) return;
    const Status gone = on_device(device_, [&] {
      return wait_for("ncclDevCommDestroy", nccl_.DevCommDestroy(comm_, dev_comm_.data()));
    });
    if (!gone.ok()) log_info("{}", gone.message());
  }

  void end() {
    if (!comm_) return;
    if (ports_) ports_->stop();
    const Comm comm = std::exchange(comm_, nullptr);
    (void)on_device(device_, [&] { return nccl_.CommAbort(comm), Status(); });
  }

  const Library& nccl_;
  const bool has_ports_;
  double farewell_s_ = 0;
  bool is_finished_ = false;
  Comm comm_ = nullptr;
  Team team_{};
  std::map<int, Part> parts_;  // by the number of a window
  std::vector<Part> gone_;     // of windows with ports
  Status broken_;
  // Ports through GIN, where any rank has some.
  Properties properties_{};
  alignas(16) std::array<std::byte, kDevCommRoom> dev_comm_{};  // ncclDevComm: NCCL fills it
  bool has_dev_comm_ = false;
  std::shared_ptr<const DeviceSources> sources_;
  std::unique_ptr<GinPorts> ports_;
};

Result<const Library*> serving(Device device) {
  return library_for(device, kTitle, config().nccl_library, open_library);
}

class NcclTransport : public LibraryTransport {
 public:
  NcclTransport() : LibraryTransport(kName, kTitle) {}
  const char* carried_by() const override {
    return "windows of the process's own NCCL: mapped peers, and ports through its GIN";
  }

  // All ranks take part in the exchange, also one that failed before.
  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    const Result<const Library*> nccl = serving((*group.facts)[static_cast<size_t>(group.rank)].device);
    UniqueId id{};
    Status ready = nccl.status();
    if (ready.ok() && group.rank == 0 && (*nccl)->GetUniqueId(&id) != kSuccess)
      ready =
          Status::make(Code::kSystem, "ncclGetUniqueId failed (no network interface for NCCL to meet on?)");
    WEFT_TRY_ASSIGN(const std::vector<std::string> ids,
                    gather_ready(group, kName, ready, std::string(id.internal, sizeof id.internal)));
    std::memcpy(&id, ids[0].data(), sizeof id);
    auto link = std::make_unique<NcclLink>(group, **nccl);
    WEFT_TRY(link->open(id));
    return std::unique_ptr<Link>(std::move(link));
  }

 private:
  Result<LibraryFacts> look(Device device) const override {
    WEFT_TRY_ASSIGN(const Library* nccl, serving(device));
    return LibraryFacts{version_text(nccl->version),
                        (nccl->was_loaded ? "as this process has loaded it, " : "") + nccl->path,
                        "other nodes through its GIN, if it has any", why_no_gin(*nccl)};
  }
  std::string refuses_both(const RankFacts& self, const RankFacts& peer) const override {
    if (self.gpu.empty() || self.gpu != peer.gpu || self.host != peer.host) return "";
    return text("both ranks are on GPU {}; NCCL takes one rank for each", self.gpu);
  }
};

}  // namespace
}  // namespace nccl_link

const Transport& nccl_transport() {
  static const nccl_link::NcclTransport transport;
  return transport;
}

}  // namespace weft
