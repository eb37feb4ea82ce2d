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
#include "memory/host_visible.h"
#include "providers/verbs/connect.h"
#include "providers/verbs/library.h"
#include "transports/ibgda/pinned_pages.h"
#include "transports/ibgda/wire.h"

namespace weft::ibgda {
namespace mlx5 {
namespace {

Result<Library> open_once() {
  void* handle = dlopen("libmlx5.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return Status::make(Code::kUnsupported, "libmlx5: {} (package ibverbs-providers)", dlerror());
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
  return library;
}

}  // namespace

Result<Library> open_library() {
  static const Result<Library> once = open_once();
  return once;
}

}  // namespace mlx5

namespace {

namespace ib = provider::ib;

Status failed(const char* what, const std::string& nic) {
  return logged(Status::from_errno(errno, "ibgda: {} on {}", what, nic));
}

// What the queues of a NIC share.
struct Opened {
  ib::Library verbs;
  mlx5::Library direct;
  std::string name;
  Device device;
  ib::PortChoice port;
  ib::Gid gid{};
  ib::Context* context = nullptr;
  ib::Pd* pd = nullptr;
  std::unique_ptr<PinnedPages> pages;  // null on the CPU

  ~Opened() {
    if (pd) verbs.dealloc_pd(pd);
    if (context) verbs.close_device(context);
  }
};

struct QueueAddress {
  char tag[4] = {'m', 'l', 'x', '5'};
  uint32_t number = 0, psn = 0;
  ib::Gid gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0, is_ethernet = 0;
  uint32_t unused = 0;
};
static_assert(sizeof(QueueAddress) == 40);

class Mlx5Queue : public QueuePair {
 public:
  Mlx5Queue(std::shared_ptr<Opened> nic, uint32_t blocks) : nic_(std::move(nic)), asked_blocks_(blocks) {}
  ~Mlx5Queue() override { close(); }

  Status open() {
    WEFT_TRY(create());
    WEFT_TRY(find_memory());
    WEFT_TRY(pin());
    if (!ib::to_init(nic_->verbs, qp_, nic_->port.port,
                     ib::kAccessRemoteWrite | ib::kAccessRemoteRead | ib::kAccessRemoteAtomic))
      return failed("starting a queue pair", nic_->name);
    psn_ = static_cast<uint32_t>(random_key()) & 0xffffff;
    return {};
  }

  const QueueMemory& memory() const override { return at_; }
  std::string address() const override {
    QueueAddress own;
    own.number = at_.number;
    own.psn = psn_;
    own.gid = nic_->gid;
    own.lid = nic_->port.attr.lid;
    own.mtu = static_cast<uint8_t>(nic_->port.attr.active_mtu);
    own.is_ethernet = nic_->port.attr.link_layer == ib::kLinkEthernet;
    return {reinterpret_cast<const char*>(&own), sizeof own};
  }

  Status connect(std::string_view address) override {
    QueueAddress peer;
    if (address.size() != sizeof peer || address.substr(0, 4) != "mlx5")
      return Status::invalid("address: got {} bytes that no mlx5 queue made, allowed: {}", address.size(),
                             sizeof peer);
    std::memcpy(static_cast<void*>(&peer), address.data(), sizeof peer);
    const ib::AhAttr route = ib::route_to(nic_->port.port, nic_->port.gid_index,
                                          {peer.gid, peer.lid, peer.mtu, peer.is_ethernet != 0});
    const auto own_mtu = static_cast<uint8_t>(nic_->port.attr.active_mtu);
    if (!ib::to_ready(nic_->verbs, qp_, route, std::min(own_mtu, peer.mtu), {peer.number, peer.psn, psn_}))
      return failed("connecting a queue pair", nic_->name);
    return {};
  }

  // A queue's completions keep their count when it is reset, and theirs must begin at 0: both are made anew.
  Status reset() override {
    close();
    return open();
  }

  bool is_rung_by_host() const override { return word_ != nullptr; }
  void ring(uint64_t doorbell) override { store_register(register_, doorbell); }

 private:
  // As many completions as an entry could need: libmlx5 makes rings larger than they were asked for.
  Status create() {
    constexpr uint32_t kRoom = 4;
    const uint32_t entries = std::min(asked_blocks_ * kRoom, kBlocksMax);
    mlx5::CqInitAttr cq{entries - 1, nullptr, nullptr, 0, 0, mlx5::kCqMaskFlags, mlx5::kCqIgnoreOverrun,
                        nullptr};
    cq_ = nic_->direct.create_cq(nic_->context, &cq, nullptr);
    if (!cq_) return failed("making a completion queue that ignores overrun", nic_->name);
    ib::QpInitAttr init{nullptr, cq_, cq_, nullptr, {asked_blocks_, 0, 1, 0, 0}, ib::kTypeRc, 1};
    qp_ = nic_->verbs.create_qp(nic_->pd, &init);
    return qp_ ? Status() : failed("making a queue pair", nic_->name);
  }

  Status find_memory() {
    mlx5::DirectQp qp{};
    mlx5::DirectCq cq{};
    mlx5::Object object{};
    object.qp = {qp_, &qp};
    object.cq = {cq_, &cq};
    errno = nic_->direct.init_obj(&object, mlx5::kObjectQp | mlx5::kObjectCq);
    if (errno != 0) return failed("mlx5dv_init_obj", nic_->name);
    const bool is_usable = qp.sends.stride == kBlockBytes && cq.entry_bytes == kBlockBytes &&
                           std::has_single_bit(qp.sends.blocks) && std::has_single_bit(cq.entries) &&
                           cq.entries >= qp.sends.blocks && cq.entries <= kBlocksMax;
    if (!is_usable)
      return logged(
          Status::make(Code::kUnsupported,
                       "ibgda: queues of {}: got {} blocks of {} bytes and {} completions of {}, allowed: "
                       "powers of two of 64 bytes, no fewer completions, at most {}",
                       nic_->name, qp.sends.blocks, qp.sends.stride, cq.entries, cq.entry_bytes, kBlocksMax));
    at_ = {static_cast<std::byte*>(qp.sends.buffer),
           static_cast<std::byte*>(cq.buffer),
           qp.record,
           static_cast<uint64_t*>(qp.doorbell.reg),
           qp.sends.blocks,
           cq.entries,
           qp_->qp_num};
    register_ = at_.doorbell;
    return {};
  }

  // For a GPU. Its driver may refuse to map the register; then the host rings.
  Status pin() {
    if (!nic_->pages) return {};
    WEFT_TRY(nic_->pages->pin(at_.ring, uint64_t{at_.blocks} * kBlockBytes, PinnedPages::kMemory));
    WEFT_TRY(nic_->pages->pin(at_.completions, uint64_t{at_.entries} * kBlockBytes, PinnedPages::kMemory));
    WEFT_TRY(nic_->pages->pin(at_.record, 2 * sizeof(uint32_t), PinnedPages::kMemory));
    is_pinned_ = true;
    const Status mapped = nic_->pages->pin(register_, sizeof(uint64_t), PinnedPages::kRegister);
    if (mapped.ok()) {
      is_register_pinned_ = true;
      return {};
    }
    WEFT_TRY_ASSIGN(word_, HostVisible::create(nic_->device, sizeof(uint64_t)));
    at_.doorbell = word_->at<uint64_t>(0);
    log_info("ibgda: a thread of the host rings {}'s doorbells: {}", nic_->name, mapped.message());
    return {};
  }

  void close() {
    if (is_register_pinned_) nic_->pages->unpin(register_, sizeof(uint64_t));
    if (is_pinned_) {
      nic_->pages->unpin(at_.ring, uint64_t{at_.blocks} * kBlockBytes);
      nic_->pages->unpin(at_.completions, uint64_t{at_.entries} * kBlockBytes);
      nic_->pages->unpin(at_.record, 2 * sizeof(uint32_t));
    }
    is_pinned_ = is_register_pinned_ = false;
    word_.reset();
    if (qp_) nic_->verbs.destroy_qp(qp_);
    if (cq_) nic_->verbs.destroy_cq(cq_);
    qp_ = nullptr;
    cq_ = nullptr;
  }

  const std::shared_ptr<Opened> nic_;
  const uint32_t asked_blocks_;
  ib::Cq* cq_ = nullptr;
  ib::Qp* qp_ = nullptr;
  QueueMemory at_;
  uint64_t* register_ = nullptr;
  std::unique_ptr<HostVisible> word_;  // where the register cannot be mapped
  bool is_pinned_ = false, is_register_pinned_ = false;
  uint32_t psn_ = 0;
};

class Mlx5Nic : public Nic {
 public:
  explicit Mlx5Nic(std::shared_ptr<Opened> opened) : nic_(std::move(opened)) {}
  const std::string& name() const override { return nic_->name; }

  Result<std::unique_ptr<QueuePair>> create_queue(uint32_t blocks) override {
    auto queue = std::make_unique<Mlx5Queue>(nic_, blocks);
    WEFT_TRY(queue->open());
    return std::unique_ptr<QueuePair>(std::move(queue));
  }

  // Without relaxed ordering: a signal must not overtake what was put before it.
  Result<Enrolled> enroll(std::byte* data, uint64_t bytes, Device device) override {
    const int access =
        ib::kAccessLocalWrite | ib::kAccessRemoteRead | ib::kAccessRemoteWrite | ib::kAccessRemoteAtomic;
    ib::Mr* mr = nic_->verbs.reg_mr(nic_->pd, data, bytes, access);
    if (!mr) return logged(Status::from_errno(errno, "ibgda: registering {} bytes on {}", bytes, nic_->name));
    return Enrolled{mr, mr->lkey, mr->rkey, reinterpret_cast<uint64_t>(data)};
  }
  void release(Enrolled& enrolled) override {
    if (enrolled.handle) nic_->verbs.dereg_mr(static_cast<ib::Mr*>(enrolled.handle));
    enrolled = {};
  }

 private:
  const std::shared_ptr<Opened> nic_;
};

// Calls visit(device, name, why it is of no use or empty, context, port) for each device while they are held.
using Visit =
    std::function<void(const std::string& name, const std::string& why, ib::Context*, const ib::PortChoice&)>;
void each_device(const ib::Library& verbs, const mlx5::Library& direct, const Visit& visit) {
  int count = 0;
  ib::Device** devices = verbs.get_device_list(&count);
  for (int i = 0; devices && i < count; ++i) {
    const std::string name = verbs.get_device_name(devices[i]);
    ib::Context* context = nullptr;
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
  return port.attr.link_layer == ib::kLinkEthernet ? "RoCE" : "InfiniBand";
}

}  // namespace

NicFinding Mlx5Nics::find(Device device) {
  if (!verbs_.ok()) return {verbs_.status().message(), "", "", 0};
  if (!direct_.ok()) return {direct_.status().message(), "", "", 0};
  NicFinding found;
  std::string reasons;
  each_device(*verbs_, *direct_,
              [&](const std::string& name, const std::string& why, ib::Context*, const ib::PortChoice& port) {
                const std::string reason = why.empty() && !is_wanted(name) ? "not in WEFT_PROXY_NICS" : why;
                if (!reason.empty()) {
                  reasons += text("{}{}: {}", reasons.empty() ? "" : "; ", name, reason);
                } else if (found.network.empty()) {
                  found.network = network_of(port);
                  found.details = text("{} on {} port {}", found.network, name, static_cast<int>(port.port));
                }
              });
  if (!found.network.empty()) {
    if (!device.is_host()) found.details += ", through pinned memory of the host; " + doorbell_expectation();
    return found;
  }
  found.unusable_because =
      reasons.empty() ? "libibverbs finds no RDMA device" : "no mlx5 NIC is usable: " + reasons;
  return found;
}

Result<std::unique_ptr<Nic>> Mlx5Nics::open(Device device) {
  WEFT_TRY(Status(verbs_.status()));
  WEFT_TRY(Status(direct_.status()));
  auto opened = std::make_shared<Opened>();
  opened->verbs = *verbs_;
  opened->direct = *direct_;
  opened->device = device;
  each_device(*verbs_, *direct_,
              [&](const std::string& name, const std::string& why, ib::Context*, const ib::PortChoice& port) {
                if (!why.empty() || !is_wanted(name) || !opened->name.empty()) return;
                opened->name = name;
                opened->port = port;
              });
  if (opened->name.empty())
    return Status::make(Code::kUnsupported, "ibgda: {}", find(device).unusable_because);
  int count = 0;
  ib::Device** devices = verbs_->get_device_list(&count);
  for (int i = 0; devices && i < count; ++i)
    if (verbs_->get_device_name(devices[i]) == opened->name)
      opened->context = verbs_->open_device(devices[i]);
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
  return std::unique_ptr<Nic>(std::make_unique<Mlx5Nic>(std::move(opened)));
}

namespace {

// Every communicator asks; devices are opened to answer. Looked for once for each of the settings that decide.
class OnceFound : public Mlx5Nics {
 public:
  using Mlx5Nics::Mlx5Nics;
  NicFinding find(Device device) override {
    const std::string key =
        text("{}/{}/{}/{}", device.is_host(), config().proxy_nics, config().ib_port, config().gid_index);
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
  static OnceFound source(ib::open_library(), mlx5::open_library());
  return source;
}

}  // namespace weft::ibgda
