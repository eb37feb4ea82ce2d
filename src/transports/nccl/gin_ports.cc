// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/gin_ports.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/config.h"
#include "base/log.h"
#include "memory/device_memory.h"
#include "transports/nccl/device_headers.h"
#include "transports/port_fault.h"

namespace weft::nccl_link {

using nccl_gin::KnownWindow;
using nccl_gin::kWindows;

std::string why_no_gin(const Library& nccl, std::string* folder) {
  if (nccl.version < kLeastVersionOfPorts)
    return text("NCCL {} is too old for ports through GIN, which need {} or newer",
                version_text(nccl.version), version_text(kLeastVersionOfPorts));
  if (!nccl.CommQueryProperties || !nccl.DevCommCreate || !nccl.DevCommDestroy)
    return text("NCCL {} lacks the functions of a device communicator", version_text(nccl.version));
  if (nccl.serves_host) return "";
  const Result<std::string> found = find_headers(nccl.path, nccl.version);
  if (found.ok() && folder) *folder = *found;
  return found.status().message();
}

GinPorts::GinPorts(Device device, int rank, int ranks, uint32_t records, double timeout_s)
    : device_(device),
      rank_(static_cast<uint32_t>(rank)),
      ranks_(static_cast<uint32_t>(ranks)),
      records_(records),
      timeout_s_(timeout_s),
      is_used_(kWindows),
      uses_(kWindows) {}

GinPorts::~GinPorts() {
  stop();
}

void GinPorts::stop() {
  helper_ = {};
  std::lock_guard lock(helping_);
  inbox_ = nullptr;
}

Result<std::unique_ptr<GinPorts>> GinPorts::create(Device device, int rank, int ranks, uint32_t records,
                                                   double timeout_s) {
  auto ports = std::unique_ptr<GinPorts>(new GinPorts(device, rank, ranks, records, timeout_s));
  const auto count = static_cast<uint64_t>(ranks);
  WEFT_TRY_ASSIGN(ports->fault_, HostVisible::create(device, sizeof(FaultBox)));
  WEFT_TRY_ASSIGN(ports->outgoing_, LocalMemory::create(device, count * sizeof(nccl_gin::Outgoing)));
  WEFT_TRY_ASSIGN(ports->incoming_, LocalMemory::create(device, count * sizeof(nccl_gin::Incoming)));
  WEFT_TRY_ASSIGN(ports->table_, LocalMemory::create(device, kWindows * sizeof(KnownWindow)));
  return ports;
}

Requirements GinPorts::requirements(const Properties& properties) const {
  const bool is_new = properties.version >= static_cast<uint32_t>(kNewDevComm);
  Requirements wanted{};
  wanted.size = is_new ? sizeof wanted : offsetof(Requirements, gin_stride);
  wanted.magic = properties.magic;
  wanted.version = properties.version;
  wanted.gin_contexts = static_cast<int32_t>(config().nccl_contexts);
  wanted.gin_signals = static_cast<int32_t>(2 * ranks_);
  wanted.gin_counters = static_cast<int32_t>(ranks_);
  wanted.gin_connection = 1;
  wanted.gin_strong_signals = true;
  wanted.gin_type = properties.gin_type;
  wanted.uses_runtime_version = is_new;
  return wanted;
}

Status GinPorts::start(const void* dev_comm, uint64_t bytes, void* inbox_window, std::byte* inbox) {
  WEFT_TRY_ASSIGN(comm_, LocalMemory::create(device_, bytes));
  WEFT_TRY(comm_->write(0, dev_comm, bytes));
  inbox_window_ = inbox_window;
  inbox_ = inbox;
  if (!device_.is_host()) return {};
  helper_ = std::jthread([this](const std::stop_token& stop) {
    while (!stop.stop_requested())
      if (!help()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
  return {};
}

Result<std::string> GinPorts::offer(int window) {
  Known& known = windows_[window];
  if (!known.places) {
    const auto free = std::ranges::find(is_used_, false);
    if (free == is_used_.end()) {
      windows_.erase(window);
      return Status::make(Code::kCapacity,
                          "nccl: got {} windows at a time with ports through GIN, allowed: {}", kWindows + 1,
                          kWindows);
    }
    *free = true;
    known.slot = static_cast<uint32_t>(free - is_used_.begin());
    known.use = ++uses_[known.slot] % nccl_gin::kUses;
    WEFT_TRY_ASSIGN(known.places, LocalMemory::create(device_, ranks_ * sizeof(uint64_t)));
  }
  const uint64_t bits = nccl_gin::window_bits(known.slot, known.use);
  return std::string(reinterpret_cast<const char*>(&bits), sizeof bits);
}

Status GinPorts::accept(const WindowView& view, const std::vector<std::string>& offers) {
  const Known& known = windows_.at(view.number);
  std::vector<uint64_t> places(offers.size());
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    if (offers[rank].size() != sizeof places[rank])
      return Status::make(Code::kSystem, "nccl: rank {} offered no window", rank);
    std::memcpy(&places[rank], offers[rank].data(), sizeof places[rank]);
  }
  WEFT_TRY(known.places->write(0, places.data(), places.size() * sizeof places[0]));
  return write_window(known.slot, {view.local, view.bytes, known.use});
}

void GinPorts::forget(int window) {
  const auto known = windows_.find(window);
  if (known == windows_.end()) return;
  const Status gone = write_window(known->second.slot, {});
  if (!gone.ok()) log_warn("{}", gone.message());
  if (!device_.is_host()) (void)logged(wait_for_device(device_.ordinal));
  is_used_[known->second.slot] = false;
  windows_.erase(known);
}

Status GinPorts::write_window(uint32_t slot, const KnownWindow& window) {
  std::lock_guard lock(helping_);
  return table_->write(slot * sizeof window, &window, sizeof window);
}

NcclMesh GinPorts::mesh(const WindowView& view, void* window) const {
  NcclMesh mesh = of_no_window();
  mesh.window = window;
  mesh.places = windows_.at(view.number).places->at<uint64_t>(0);
  mesh.own = view.local;
  mesh.bytes = view.bytes;
  return mesh;
}

NcclMesh GinPorts::of_no_window() const {
  NcclMesh mesh{};
  mesh.comm = comm_->at<nccl_gin::DevComm>(0);
  mesh.inbox_window = inbox_window_;
  mesh.inbox = reinterpret_cast<const nccl_gin::Record*>(inbox_);
  mesh.outgoing = outgoing_->at<nccl_gin::Outgoing>(0);
  mesh.incoming = incoming_->at<nccl_gin::Incoming>(0);
  mesh.windows = table_->at<KnownWindow>(0);
  mesh.timeout_ns = static_cast<uint64_t>(timeout_s_ * 1e9);
  mesh.fault = fault_->at<FaultBox>(0);
  mesh.self = rank_;
  mesh.count = ranks_;
  mesh.records = records_;
  return mesh;
}

bool GinPorts::help() {
  if (!device_.is_host()) return false;
  std::lock_guard lock(helping_);
  if (!inbox_) return false;
  return nccl_gin::help(of_no_window());
}

namespace {

Status status_of(const FaultBox& fault) {
  const std::string who = text("rank {}, nccl", fault.self);
  const double waited_s = static_cast<double>(fault.waited_ns) / 1e9;
  switch (fault.site) {
    case Site::kPortRange:
      return outside_window("nccl", fault);
    case Site::kPortLayout:
      return Status::make(
          Code::kUnsupported,
          "{}: NCCL's device communicator is not laid out as its headers say: expected rank {}, "
          "saw {} (WEFT_NCCL_INCLUDE names other headers)",
          who, fault.expected, fault.seen);
    case Site::kPortFull:
      return Status::make(
          Code::kPeerLost,
          "{}, signal: waited {} s for rank {} to take in signals, which it does while its kernels "
          "wait: expected {} taken, saw {}",
          who, waited_s, fault.peer, fault.expected, fault.seen);
    case Site::kQueueOrder:
      return Status::make(
          Code::kPeerLost,
          "{}, signal: waited {} s for other threads to post what goes to rank {}: expected {} "
          "records, saw {}",
          who, waited_s, fault.peer, fault.expected, fault.seen);
    case Site::kQueueRoom:
      return Status::make(Code::kPeerLost,
                          "{}, post: waited {} s for room in NCCL's queue to rank {}: expected room for {} "
                          "descriptors, saw {}",
                          who, waited_s, fault.peer, fault.expected, fault.seen);
    default:
      return Status::make(
          Code::kPeerLost,
          "{}, flush: waited {} s for NCCL to be done with what goes to rank {}: expected {}, saw {}", who,
          waited_s, fault.peer, fault.expected, fault.seen);
  }
}

}  // namespace

Status GinPorts::status() const {
  const auto* box = fault_->at<FaultBox>(0);
  return load_acquire(&box->raised) == 0 ? Status() : status_of(*box);
}

Status GinPorts::fault() const {
  Status all = status();
  return all.code() == Code::kPeerLost ? Status() : all;
}

int GinPorts::lost_peer() const {
  return status().code() == Code::kPeerLost ? static_cast<int>(fault_->at<FaultBox>(0)->peer) : -1;
}

}  // namespace weft::nccl_link
