// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl_rma/plugin.h"

#include <filesystem>

#include "base/config.h"
#include "base/cuda_copies.h"
#include "base/log.h"

namespace weft::nccl_rma {
namespace {

constexpr float kLatency_us = 20;  // for NCCL's cost model, which does not use it for RMA
constexpr int kUnknownSpeed_mbps = 10000;
constexpr int kReceivesMax = 32;  // rings of 32 * 32 commands
constexpr size_t kSaidMax = 64;
constexpr size_t kBytesMax = size_t{1} << 40;

// Where NCCL finds the NIC's place in the machine; empty where it has none.
std::string pci_path(const std::string& pci) {
  if (pci.empty()) return {};
  std::error_code error;
  const auto path = std::filesystem::canonical("/sys/bus/pci/devices/" + pci, error);
  return error ? std::string() : path.string();
}

}  // namespace

Plugin& Plugin::instance() {
  static auto* plugin = new Plugin;  // outlives threads that NCCL leaves running at exit
  return *plugin;
}

void Plugin::say(NcclLogLevel level, const std::string& words) const {
  if (const NcclLogger logger = logger_.load(std::memory_order_acquire))
    logger(level, kNcclInit | kNcclNet, "weft", 0, "%s", words.c_str());
}

// Some warnings come with every registration: each is one once.
bool Plugin::is_first(const std::string& line) {
  std::lock_guard lock(said_mutex_);
  if (said_.size() >= kSaidMax) said_.clear();
  return said_.insert(line).second;
}

Status Plugin::init(NcclLogger logger) {
  WEFT_TRY(config_status());
  copy_in_own_context();  // kernels wait for what NCCL puts
  if (logger && logger_.exchange(logger) != logger)
    set_log_sink([this](LogLevel level, const std::string& line) {
      const bool is_news = level <= LogLevel::kWarn && is_first(line);
      say(is_news ? kNcclLogWarn : kNcclLogInfo, "RMA/Weft: " + line);
    });
  {
    std::lock_guard lock(mutex_);
    if (network_) return {};
    WEFT_TRY_ASSIGN(proxy::Network network,
                    proxy::choose_network(config().proxy_provider, config().proxy_nics));
    if (network.provider->name() == "loopback" && config().proxy_provider == "auto")
      return Status::make(Code::kUnsupported,
                          "no network: neither libfabric nor libibverbs has a usable NIC here");
    for (const provider::Nic& nic : network.nics)  // NCCL must not take one of these for a NIC of its own
      devices_.push_back({text("weft/{}/{}", nic.provider, nic.name), pci_path(nic.pci)});
    network_ = std::make_unique<proxy::Network>(std::move(network));
  }
  for (const Device& device : devices_)
    say(kNcclLogInfo, text("RMA/Weft: {} ({}; {})", device.name, network_->why_provider, network_->why_nics));
  return {};
}

Result<int> Plugin::devices() {
  std::lock_guard lock(mutex_);
  if (!network_) return Status::invalid("devices: called before init");
  return static_cast<int>(devices_.size());
}

Result<const provider::Nic*> Plugin::nic(int device) const {
  std::lock_guard lock(mutex_);
  if (!network_) return Status::invalid("device: asked for before init");
  if (device < 0 || static_cast<size_t>(device) >= devices_.size())
    return Status::invalid("dev: got {}, allowed: 0 to {}", device, devices_.size() - 1);
  return &network_->nics[static_cast<size_t>(device)];
}

Status Plugin::properties(int number, PropertiesV12& properties) {
  WEFT_TRY_ASSIGN(const provider::Nic* nic, this->nic(number));
  std::lock_guard lock(mutex_);
  Device& device = devices_[static_cast<size_t>(number)];
  properties = {};
  properties.name = device.name.data();
  properties.pci_path = device.pci_path.empty() ? nullptr : device.pci_path.data();
  properties.guid = std::hash<std::string>()(device.name);
  // Memory that NICs cannot reach goes through pinned memory, and DMA-BUF is exported here: all pointers will do.
  properties.pointer_support = kPointerHost | kPointerCuda | kPointerDmabuf;
  properties.speed_mbps = nic->gbit_per_s > 0 ? static_cast<int>(nic->gbit_per_s * 1000) : kUnknownSpeed_mbps;
  properties.port = 1;
  properties.latency_us = kLatency_us;
  properties.comms_max = 1 << 16;
  properties.receives_max = kReceivesMax;
  properties.device_type = kDeviceGinProxy;
  properties.parts.count = 1;
  properties.parts.devices[0] = number;
  properties.p2p_bytes_max = properties.collective_bytes_max = kBytesMax;
  properties.multi_request_max = 1;
  properties.rail = properties.plane = kUndefinedId;
  return {};
}

}  // namespace weft::nccl_rma
