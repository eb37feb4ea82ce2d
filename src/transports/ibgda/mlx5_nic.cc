// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/mlx5_nic.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "base/random.h"
#include "providers/verbs/library.h"
#include "transports/ibgda/mlx5_device_queue.h"
#include "transports/ibgda/mlx5_opened.h"

namespace weft::ibgda {
namespace mlx5 {
namespace {

// What queues in memory of a device need besides.
template <class Find>
void find_devx(Library& library, Find find, std::string& missing) {
  Devx& devx = library.devx;
  find(devx.open_device, "mlx5dv_open_device", "MLX5_1.7");
  find(devx.umem_reg, "mlx5dv_devx_umem_reg_ex", "MLX5_1.19");
  find(devx.umem_dereg, "mlx5dv_devx_umem_dereg", "MLX5_1.7");
  find(devx.alloc_uar, "mlx5dv_devx_alloc_uar", "MLX5_1.7");
  find(devx.free_uar, "mlx5dv_devx_free_uar", "MLX5_1.7");
  find(devx.query_eqn, "mlx5dv_devx_query_eqn", "MLX5_1.7");
  find(devx.obj_create, "mlx5dv_devx_obj_create", "MLX5_1.7");
  find(devx.obj_modify, "mlx5dv_devx_obj_modify", "MLX5_1.7");
  find(devx.obj_destroy, "mlx5dv_devx_obj_destroy", "MLX5_1.7");
  library.lacks_devx = missing;
}

Result<Library> open_once() {
  void* handle = dlopen("libmlx5.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return Status::make(Code::kUnsupported, "libmlx5: {} (Debian's package ibverbs-providers)", dlerror());
  Library library;
  std::string missing;
  const auto find = [&](auto& function, const char* symbol, const char* version) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlvsym(handle, symbol, version));
    if (!function) missing += std::string(" ") + symbol;
  };
  find(library.is_supported, "mlx5dv_is_supported", "MLX5_1.8");
  find(library.create_cq, "mlx5dv_create_cq", "MLX5_1.1");
  find(library.init_obj, "mlx5dv_init_obj", "MLX5_1.2");
  if (!missing.empty())
    return Status::make(Code::kUnsupported, "libmlx5: it lacks{} (rdma-core 20 has them)", missing);
  find_devx(library, find, missing);
  return library;
}

}  // namespace

Result<Library> open_library() {
  static const Result<Library> once = open_once();
  return once;
}

}  // namespace mlx5

namespace {

class Mlx5Queue : public QueuePair {
 public:
  Mlx5Queue(std::shared_ptr<Opened> nic, uint32_t blocks) : nic_(std::move(nic)), asked_blocks_(blocks) {}
  ~Mlx5Queue() override { close(); }

  Status open() {
    WEFT_TRY(create());
    WEFT_TRY(find_memory());
    WEFT_TRY(pin());
    if (!ib::to_init(nic_->verbs, qp_, nic_->port,
                     IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC))
      return failed("starting a queue pair", nic_->name);
    psn_ = static_cast<uint32_t>(random_key()) & 0xffffff;
    return {};
  }

  const QueueMemory& memory() const override { return at_; }
  std::string address() const override { return address_of(*nic_, at_.number, psn_); }

  Status connect(std::string_view address) override {
    WEFT_TRY_ASSIGN(const QueueAddress peer, read_address(address));
    const Route route = route_to(*nic_, peer);
    if (!ib::to_ready(nic_->verbs, qp_, route.way, route.mtu, {peer.number, peer.psn, psn_}))
      return failed("connecting a queue pair", nic_->name);
    return {};
  }

  // A queue's completions keep their count when it is reset, and theirs must begin at 0: both are made anew.
  Status reset() override {
    close();
    return open();
  }

  bool is_rung_by_host() const override { return doorbell_.is_rung_by_host(); }
  void ring(uint64_t doorbell) override { doorbell_.ring(doorbell); }

 private:
  // As many completions as an entry could need: libmlx5 makes rings larger than they were asked for.
  Status create() {
    constexpr uint32_t kRoom = 4;
    const uint32_t entries = std::min(asked_blocks_ * kRoom, kBlocksMax);
    ibv_cq_init_attr_ex cq{
        entries - 1, nullptr, nullptr, 0, 0, IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
        nullptr};
    // The extended one begins with the other.
    cq_ = reinterpret_cast<ibv_cq*>(nic_->direct.create_cq(nic_->context, &cq, nullptr));
    if (!cq_) return failed("making a completion queue that ignores overrun", nic_->name);
    ibv_qp_init_attr init{nullptr, cq_, cq_, nullptr, {asked_blocks_, 0, 1, 0, 0}, IBV_QPT_RC, 1};
    qp_ = nic_->verbs.create_qp(nic_->pd, &init);
    return qp_ ? Status() : failed("making a queue pair", nic_->name);
  }

  Status find_memory() {
    mlx5dv_qp qp{};
    mlx5dv_cq cq{};
    mlx5dv_obj object{};
    object.qp = {qp_, &qp};
    object.cq = {cq_, &cq};
    errno = nic_->direct.init_obj(&object, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ);
    if (errno != 0) return failed("mlx5dv_init_obj", nic_->name);
    const bool is_usable = qp.sq.stride == kBlockBytes && cq.cqe_size == kBlockBytes &&
                           std::has_single_bit(qp.sq.wqe_cnt) && std::has_single_bit(cq.cqe_cnt) &&
                           cq.cqe_cnt >= qp.sq.wqe_cnt && cq.cqe_cnt <= kBlocksMax;
    if (!is_usable)
      return logged(
          Status::make(Code::kUnsupported,
                       "ibgda: queues of {}: got {} blocks of {} bytes and {} completions of {}, allowed: "
                       "powers of two of 64 bytes, no fewer completions, at most {}",
                       nic_->name, qp.sq.wqe_cnt, qp.sq.stride, cq.cqe_cnt, cq.cqe_size, kBlocksMax));
    at_ = {static_cast<std::byte*>(qp.sq.buf),
           static_cast<std::byte*>(cq.buf),
           qp.dbrec,
           nullptr,
           qp.sq.wqe_cnt,
           cq.cqe_cnt,
           qp_->qp_num};
    WEFT_TRY(doorbell_.open(*nic_, qp.bf.reg));
    at_.doorbell = doorbell_.at();
    return {};
  }

  // For a GPU.
  Status pin() {
    if (!nic_->pages) return {};
    WEFT_TRY(nic_->pages->pin(at_.ring, uint64_t{at_.blocks} * kBlockBytes, PinnedPages::kMemory));
    WEFT_TRY(nic_->pages->pin(at_.completions, uint64_t{at_.entries} * kBlockBytes, PinnedPages::kMemory));
    WEFT_TRY(nic_->pages->pin(at_.record, 2 * sizeof(uint32_t), PinnedPages::kMemory));
    is_pinned_ = true;
    return {};
  }

  void close() {
    doorbell_.close();
    if (is_pinned_) {
      nic_->pages->unpin(at_.ring, uint64_t{at_.blocks} * kBlockBytes);
      nic_->pages->unpin(at_.completions, uint64_t{at_.entries} * kBlockBytes);
      nic_->pages->unpin(at_.record, 2 * sizeof(uint32_t));
    }
    is_pinned_ = false;
    if (qp_) nic_->verbs.destroy_qp(qp_);
    if (cq_) nic_->verbs.destroy_cq(cq_);
    qp_ = nullptr;
    cq_ = nullptr;
  }

  const std::shared_ptr<Opened> nic_;
  const uint32_t asked_blocks_;
  ibv_cq* cq_ = nullptr;
  ibv_qp* qp_ = nullptr;
  QueueMemory at_;
  Doorbell doorbell_;
  bool is_pinned_ = false;
  uint32_t psn_ = 0;
};

class Mlx5Nic : public Nic {
 public:
  explicit Mlx5Nic(std::shared_ptr<Opened> opened) : nic_(std::move(opened)) {}
  const std::string& name() const override { return nic_->name; }

  Result<std::unique_ptr<QueuePair>> create_queue(uint32_t blocks) override {
    if (nic_->way != RoomWay::kNone) {
      auto queue = std::make_unique<DeviceQueue>(nic_, blocks);
      WEFT_TRY(queue->open());
      return std::unique_ptr<QueuePair>(std::move(queue));
    }
    auto queue = std::make_unique<Mlx5Queue>(nic_, blocks);
    WEFT_TRY(queue->open());
    return std::unique_ptr<QueuePair>(std::move(queue));
  }

  Result<Enrolled> enroll(std::byte* data, uint64_t bytes, Device place) override {
    WEFT_TRY_ASSIGN(ibv_mr * mr, register_memory(data, bytes, place));
    return Enrolled{mr, mr->lkey, mr->rkey, reinterpret_cast<uint64_t>(data)};
  }
  void release(Enrolled& enrolled) override {
    if (enrolled.handle) nic_->verbs.dereg_mr(static_cast<ibv_mr*>(enrolled.handle));
    enrolled = {};
  }

 private:
  // Without relaxed ordering: a signal must not overtake what was put before it.
  static constexpr int kAccess =
      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

  Result<ibv_mr*> register_memory(std::byte* data, uint64_t bytes, Device place) {
    const bool is_exported = nic_->way != RoomWay::kNone;
    if (place == nic_->device && (is_exported || !place.is_host())) return register_device(data, bytes);
    ibv_mr* mr = nic_->verbs.reg_mr(nic_->pd, data, bytes, kAccess);
    if (mr) return mr;
    return logged(Status::from_errno(errno, "ibgda: registering {} bytes on {}", bytes, nic_->name));
  }

  // The way that queues went: a completion in memory of the host could be seen before bytes that a get brought to memory of
  // the device.
  Result<ibv_mr*> register_device(std::byte* data, uint64_t bytes) {
    if (nic_->way == RoomWay::kNone)
      return Status::make(Code::kUnsupported, "queues of {} lie in memory of the host", nic_->name);
    if (const std::string why = nic_->rooms->no_order(); !why.empty())
      return Status::make(Code::kUnsupported, "{}", why);
    ibv_mr* mr = nullptr;
    if (nic_->way == RoomWay::kPeerMemory) {
      mr = nic_->verbs.reg_mr(nic_->pd, data, bytes, kAccess);
    } else if (!nic_->verbs.reg_dmabuf_mr) {
      return Status::make(Code::kUnsupported, "libibverbs lacks ibv_reg_dmabuf_mr (rdma-core 34 has it)");
    } else {
      WEFT_TRY_ASSIGN(const RoomFile exported, nic_->rooms->export_file(data, bytes));
      mr = nic_->verbs.reg_dmabuf_mr(nic_->pd, exported.offset, bytes, reinterpret_cast<uint64_t>(data),
                                     exported.file.get(), kAccess);
    }
    if (mr) return mr;
    return Status::make(Code::kUnsupported, "{} does not take {} bytes of a window of {} by {}: {}",
                        nic_->name, bytes, nic_->rooms->name(),
                        nic_->way == RoomWay::kDmabuf ? "DMA-BUF" : "peer memory", std::strerror(errno));
  }

  const std::shared_ptr<Opened> nic_;
};

// Calls visit(device, name, why it is of no use or empty, context, port) for each device while they are held.
using Visit =
    std::function<void(const std::string& name, const std::string& why, ibv_context*, const ib::PortChoice&)>;
void each_device(const ib::Library& verbs, const mlx5::Library& direct, const Visit& visit) {
  int count = 0;
  ibv_device** devices = verbs.get_device_list(&count);
  for (int i = 0; devices && i < count; ++i) {
    const std::string name = verbs.get_device_name(devices[i]);
    ibv_context* context = nullptr;
    ib::PortChoice port;
    std::string why;
    if (!direct.is_supported(devices[i])) {
      why = "not of the mlx5 family";
    } else if (context = verbs.open_device(devices[i]); !context) {
      why = "cannot be opened: " + std::string(std::strerror(errno));
    } else {
      port = ib::choose_port(verbs, context, name);
      why = port.unusable_because;
    }
    visit(name, why, context, port);
    if (context) verbs.close_device(context);
  }
  if (devices) verbs.free_device_list(devices);
}

bool is_wanted(const std::string& name) {
  const std::string wanted = "," + config().proxy_nics + ",";
  return config().proxy_nics.empty() || wanted.find("," + name + ",") != std::string::npos;
}

std::string network_of(const ib::PortChoice& port) {
  return port.attr.link_layer == IBV_LINK_LAYER_ETHERNET ? "RoCE" : "InfiniBand";
}

}  // namespace

// The CPU's memory is where libibverbs puts queues anyway.
Result<std::unique_ptr<QueueRooms>> Mlx5Nics::gpu_rooms(Device device) {
  if (device.is_host()) return std::unique_ptr<QueueRooms>();
  return cuda_rooms(device);
}

NicFinding Mlx5Nics::find(Device device) {
  if (!verbs_.ok()) return {verbs_.status().message(), "", "", 0};
  if (!direct_.ok()) return {direct_.status().message(), "", "", 0};
  NicFinding found;
  std::string reasons;
  each_device(*verbs_, *direct_,
              [&](const std::string& name, const std::string& why, ibv_context*, const ib::PortChoice& port) {
                const std::string reason = why.empty() && !is_wanted(name) ? "not in WEFT_PROXY_NICS" : why;
                if (!reason.empty()) {
                  reasons += text("{}{}: {}", reasons.empty() ? "" : "; ", name, reason);
                } else if (found.network.empty()) {
                  found.network = network_of(port);
                  found.details = text("{} on {} port {}", found.network, name, static_cast<int>(port.port));
                }
              });
  if (!found.network.empty()) {
    if (!device.is_host()) found.details += ", " + where_memory_lies(device) + "; " + doorbell_expectation();
    return found;
  }
  found.unusable_because =
      reasons.empty() ? "libibverbs finds no RDMA device" : "no mlx5 NIC is usable: " + reasons;
  return found;
}

// For people: what a communicator of GPUs may expect.
std::string Mlx5Nics::where_memory_lies(Device device) const {
  const std::string neither =
      direct_->lacks_devx.empty() ? no_device_memory(device) : "libmlx5 lacks" + direct_->lacks_devx;
  if (!neither.empty()) return "queues and windows in pinned memory of the host: " + neither;
  std::string no_windows = no_device_windows(device);
  if (config().port_windows == "host") no_windows = "WEFT_PORT_WINDOWS=host";
  if (no_windows.empty()) return "queues and windows in memory of the GPU where the kernel takes that";
  return "queues in memory of the GPU where the kernel takes that, windows in pinned memory of the host: " +
         no_windows;
}

// Where queues may lie in memory of the device. Why not; empty: nobody has asked the kernel yet, or it is the CPU.
std::string Mlx5Nics::prepare_rooms(Opened& opened) const {
  if (!make_rooms_) return "";
  auto rooms = make_rooms_(opened.device);
  if (!rooms.ok()) return rooms.status().message();
  if (!*rooms) return "";
  if (!opened.direct.lacks_devx.empty())
    return "libmlx5 lacks" + opened.direct.lacks_devx + " (rdma-core 44 has them)";
  opened.rooms = std::move(*rooms);
  return "";
}

// With commands (DevX) where queues may lie in memory of the device, else without. `why_host`: why without.
void Mlx5Nics::open_context(Opened& opened, ibv_device* device, std::string& why_host) const {
  if (opened.rooms) {
    mlx5dv_context_attr attr{MLX5DV_CONTEXT_FLAGS_DEVX, 0};
    opened.context = opened.direct.devx.open_device(device, &attr);
    if (opened.context) return;
    why_host = text("no commands (DevX) on {}: {}", opened.name, std::strerror(errno));
    opened.rooms.reset();
  }
  opened.context = opened.verbs.open_device(device);
}

Result<std::unique_ptr<Nic>> Mlx5Nics::open(Device device) {
  WEFT_TRY(Status(verbs_.status()));
  WEFT_TRY(Status(direct_.status()));
  auto opened = std::make_shared<Opened>();
  opened->verbs = *verbs_;
  opened->direct = *direct_;
  opened->device = device;
  each_device(*verbs_, *direct_,
              [&](const std::string& name, const std::string& why, ibv_context*, const ib::PortChoice& port) {
                if (!why.empty() || !is_wanted(name) || !opened->name.empty()) return;
                opened->name = name;
                opened->port = port;
              });
  if (opened->name.empty())
    return Status::make(Code::kUnsupported, "ibgda: {}", find(device).unusable_because);
  int count = 0;
  ibv_device** devices = verbs_->get_device_list(&count);
  std::string why_host = prepare_rooms(*opened);
  for (int i = 0; devices && i < count; ++i)
    if (verbs_->get_device_name(devices[i]) == opened->name) open_context(*opened, devices[i], why_host);
  if (devices) verbs_->free_device_list(devices);
  if (!opened->context) return failed("ibv_open_device", opened->name);
  const int gid = opened->port.gid_index;
  if (gid >= 0 && verbs_->query_gid(opened->context, opened->port.port, gid, &opened->gid) != 0)
    return failed("ibv_query_gid", opened->name);
  opened->pd = verbs_->alloc_pd(opened->context);
  if (!opened->pd) return failed("ibv_alloc_pd", opened->name);
  if (!device.is_host()) {
    WEFT_TRY_ASSIGN(opened->pages, PinnedPages::create(device));
  }
  log_info("ibgda: {} port {}, GID {}", opened->name, static_cast<int>(opened->port.port), gid);
  if (opened->rooms) {
    const std::string worse = choose_room_way(*opened);
    why_host += worse;
    if (opened->way != RoomWay::kNone)
      log_info("ibgda: queues of {} lie in memory of {}, by {}{}{}", opened->name, opened->rooms->name(),
               opened->way == RoomWay::kDmabuf ? "DMA-BUF" : "peer memory", worse.empty() ? "" : "; not by ",
               worse);
  }
  if (!why_host.empty() && opened->way == RoomWay::kNone)
    log_info("ibgda: queues of {} lie in pinned memory of the host: {}", opened->name, why_host);
  return std::unique_ptr<Nic>(std::make_unique<Mlx5Nic>(std::move(opened)));
}

namespace {

// Every communicator asks; devices are opened to answer. Looked for once for each of the settings that decide.
class OnceFound : public Mlx5Nics {
 public:
  using Mlx5Nics::Mlx5Nics;
  NicFinding find(Device device) override {
    const std::string key =
        text("{}/{}/{}/{}/{}", device.is_host() ? -1 : device.ordinal, config().proxy_nics, config().ib_port,
             config().gid_index, config().port_windows);
    std::lock_guard lock(mutex_);
    auto known = known_.find(key);
    if (known == known_.end()) known = known_.emplace(key, Mlx5Nics::find(device)).first;
    return known->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, NicFinding> known_;
};

}  // namespace

NicSource& mlx5_nics() {
  static OnceFound source(ib::open_library(), mlx5::open_library(), Mlx5Nics::gpu_rooms);
  return source;
}

}  // namespace weft::ibgda
