// SPDX-License-Identifier: Apache-2.0
//
// The host half of the proxy transport: one engine, the proxy threads, and what kernels are given of them.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "base/config.h"
#include "base/cuda_copies.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "kernels/core/fault.h"
#include "transports/lost_peers.h"
#include "transports/port_fault.h"
#include "transports/proxy/channel.cuh"
#include "transports/proxy/proxy.h"
#include "transports/transport.h"

namespace weft {
namespace proxy {
namespace {

constexpr double kDrain_s = 1;     // for what a call had queued when it failed
constexpr double kFarewell_s = 5;  // for peers to confirm what was sent before this rank leaves

// What is in pinned memory beside the FIFOs: the words that flush() polls, and the link's own fault box.
struct Shared {
  uint64_t flushed_at, fault_at, end;
};
Shared shared_words(uint64_t ranks) {
  Shared at{};
  at.fault_at = ranks * sizeof(uint64_t);
  at.end = at.fault_at + sizeof(FaultBox);
  return at;
}

size_t cores_per_rank(size_t ranks) {
  return std::max(1u, std::thread::hardware_concurrency()) / std::max<size_t>(1, ranks);
}

uint32_t proxy_count(size_t peers, size_t ranks) {
  if (peers == 0) return 1;
  if (config().proxies > 0) return static_cast<uint32_t>(std::min<int64_t>(config().proxies, 64));
  return static_cast<uint32_t>(std::clamp<size_t>(cores_per_rank(ranks), 1, 4));
}

class ProxyLink : public Link {
 public:
  static Result<std::unique_ptr<Link>> connect(const Group& group) {
    auto link = std::unique_ptr<ProxyLink>(new ProxyLink(group));
    const Status opened = link->open(group);
    const Status joined = link->join(group, opened);
    if (!joined.ok()) return joined;
    return std::unique_ptr<Link>(std::move(link));
  }

  ~ProxyLink() override {
    stop_helper();
    finish();
    for (const auto& proxy : proxies_) proxy->stop();
    if (engine_) engine_->close();
  }

  void finish() override {
    if (std::exchange(is_finished_, true)) return;
    const Deadline until = farewell();
    for (const auto& proxy : proxies_) proxy->finish(until);
  }

  Result<std::string> offer(const WindowView& window) override {
    if (reach_of(window) > kWindowBytesMax)
      return Status::make(Code::kCapacity, "window with port peers: got {} bytes, allowed: at most {}",
                          reach_of(window), kWindowBytesMax);
    const auto known = region_of_.find(window.number);
    const uint32_t region = known != region_of_.end() ? known->second : regions_.open();
    if (region == kRegions)
      return Status::make(Code::kCapacity, "windows with port peers: got one more, allowed: {} at a time",
                          kRegions);
    region_of_[window.number] = region;
    Regions::Own own = regions_.own(region);
    // Ports write to a window's first bytes alone where it has a host part: these do not grow.
    const bool is_known = own.base && (window.host_bytes > 0 || own.bytes == window.bytes);
    if (!is_known) {
      WEFT_TRY_ASSIGN(own, register_window(window));
      regions_.add(region, own);
    }
    std::string offer{static_cast<char>(region), static_cast<char>(regions_.use(region))};
    for (const auto& memory : {own.host.memory, own.device.memory}) {
      std::string descriptor;
      if (memory) {
        WEFT_TRY_ASSIGN(descriptor, engine_->describe(*memory));
      }
      offer += static_cast<char>(descriptor.size());
      offer += descriptor;
    }
    return offer;
  }

  // With memory as the device's part of a window would be: register it, and let it go again.
  Status try_device_memory(std::byte* probe, uint64_t bytes) override {
    WEFT_TRY(orders_writes());
    WEFT_TRY_ASSIGN(const auto memory, register_in_place(probe, bytes, device_));
    return engine_->unregister(memory, farewell());
  }

  Status accept(const WindowView& window, const std::vector<std::string>& offers) override {
    std::vector<Regions::Theirs> theirs(offers.size());
    std::vector<Regions::Name> names(offers.size());
    for (int peer : peers_) {
      const std::string& offer = offers[static_cast<size_t>(peer)];
      if (offer.size() < 2 || static_cast<uint8_t>(offer[0]) >= kRegions)
        return Status::make(Code::kSystem, "proxy: rank {} offered no window", peer);
      names[static_cast<size_t>(peer)] = {static_cast<uint8_t>(offer[0]), static_cast<uint8_t>(offer[1])};
      std::string_view left = std::string_view(offer).substr(2);
      for (auto* part :
           {&theirs[static_cast<size_t>(peer)].host, &theirs[static_cast<size_t>(peer)].device}) {
        const size_t length = left.empty() ? 0 : static_cast<uint8_t>(left[0]);
        if (length > 0 && length < left.size()) {
          WEFT_TRY_ASSIGN(*part, engine_->attach(left.substr(1, length), Deadline::after_s(timeout_s_)));
        }
        left.remove_prefix(std::min(left.size(), length + 1));
      }
    }
    if (window.payload_in_place) WEFT_TRY(touch_device_parts(window.number, theirs));
    regions_.set_theirs(region_of_[window.number], std::move(theirs), std::move(names));
    return Status();
  }

  void forget(int window, uint64_t bytes) override {
    const auto known = region_of_.find(window);
    if (known == region_of_.end()) return;
    const Deadline until = farewell();
    // Device code may have asked for more than has been done.
    for (const auto& proxy : proxies_) proxy->drain(until);
    for (const auto& memory : regions_.cut(known->second, bytes)) (void)engine_->unregister(memory, until);
    if (bytes > 0) return;
    region_of_.erase(known);
    touched_.erase(window);
  }

  bool takes_temporary() const override { return takes_temporary_; }

  Result<uint32_t> register_temporary(std::byte* memory, uint64_t bytes) override {
    WEFT_TRY_ASSIGN(std::shared_ptr<transfer::Memory> made,
                    engine_->enroll({memory, bytes}, provider::kRemoteWrite | provider::kTemporary));
    if (const std::optional<uint32_t> registration = temporary_.open(made)) return *registration + 1;
    WEFT_TRY(engine_->unregister(made, farewell()));
    return Status::make(Code::kCapacity, "proxy: got one more temporary registration, allowed: {} at a time",
                        kTemporaries);
  }

  // A living peer takes what is queued, or refuses it, in no time. The memory is gone in any case.
  void reclaim(const std::vector<uint32_t>& registrations, bool is_done) override {
    const Deadline until = is_done ? farewell() : Deadline::after_s(std::min(kDrain_s, timeout_s_));
    if (!is_done)
      for (const auto& proxy : proxies_) proxy->drain(until);
    for (const uint32_t registration : registrations)
      (void)engine_->unregister(temporary_.close(registration - 1), until);
  }

  Result<MeshPart> mesh(const WindowView& window) override {
    const auto to_host_part = -static_cast<int64_t>(window.before);
    const PortPlaces places{to_host_part, window.payload_in_place ? 0 : to_host_part};
    const ProxyMesh mesh{fifos_->at<Fifo>(0),
                         shared_->at<uint64_t>(at_.flushed_at),
                         window.local,
                         window.before,
                         reach_of(window),
                         places,
                         static_cast<uint64_t>(timeout_s_ * 1e9),
                         fault_,
                         static_cast<uint32_t>(rank_),
                         static_cast<uint32_t>(ranks_),
                         static_cast<uint32_t>(proxies_.size()),
                         region_of_.at(window.number)};
    return mesh_part("ProxyMesh", mesh);
  }

  bool help() override {
    bool any = false;
    for (const auto& proxy : proxies_) any = proxy->help() || any;
    return any;
  }

  bool rest() override { return proxies_[0]->rest(); }

  Status status() override {
    WEFT_TRY(fault());
    std::lock_guard lock(mutex_);
    return status_;
  }

  Status fault() override {
    std::lock_guard lock(mutex_);
    if (!broken_.ok() || load_acquire(&fault_->raised) == 0) return broken_;
    // What device code could not hand over is missing for good: the way is broken.
    broken_ = logged(
        fault_->site == Site::kPortRange
            ? outside_window("proxy", *fault_)
            : Status::make(Code::kPeerLost,
                           "rank {}, proxy: the thread that serves rank {} is behind: expected position "
                           "{}, saw {}",
                           fault_->self, fault_->peer, fault_->expected, fault_->seen));
    return broken_;
  }

  // The proxies end it in their next turn: whoever tells may hold locks.
  void lose(int peer, const std::string& how) override {
    if (!connected_.contains(peer)) return;
    std::lock_guard lock(gone_mutex_);
    gone_.emplace_back(peer, how);
    has_gone_.store(true, std::memory_order_release);
  }

  void on_lost(LostPeers::Tell tell) override { lost_.listen(std::move(tell)); }

 private:
  explicit ProxyLink(const Group& group)
      : rank_(group.rank),
        ranks_(static_cast<int>(group.facts->size())),
        timeout_s_(group.timeout_s),
        peers_(group.peers) {}

  static RankPlace place_of_rank(const Group& group) {
    const RankFacts& self = (*group.facts)[static_cast<size_t>(group.rank)];
    RankPlace here{{self.gpu, self.numa_node}, 0};
    for (int rank = 0; rank < group.rank; ++rank)
      here.index += (*group.facts)[static_cast<size_t>(rank)].host == self.host;
    return here;
  }

  // Bytes from its first one that ports may write to.
  static uint64_t reach_of(const WindowView& window) { return window.before + window.port_bytes; }

  // Places count from the host part on, where there is one.
  Result<Regions::Own> register_window(const WindowView& window) {
    Regions::Own own{window.local - window.before, window.bytes, {}, {}, 0};
    const uint64_t host_bytes = window.host_bytes > 0 ? window.host_bytes : window.bytes;
    constexpr uint32_t kAccess = provider::kRemoteWrite | provider::kRemoteRead;
    own.host = {0, host_bytes, nullptr};
    WEFT_TRY_ASSIGN(own.host.memory, engine_->enroll({own.base, host_bytes}, kAccess));
    if (!window.payload_in_place) return own;
    own.device = {window.before, window.port_bytes, nullptr};
    WEFT_TRY_ASSIGN(own.device.memory, register_in_place(window.local, own.device.bytes, window.place));
    return own;
  }

  // Memory of a window never goes through staging slots, whose copies could wait for the kernel that waits for them.
  Result<std::shared_ptr<transfer::Memory>> register_in_place(std::byte* at, uint64_t bytes, Device place) {
    provider::Range range{at, bytes};
    if (!place.is_host()) range = {at, bytes, provider::MemoryKind::kCuda, place.ordinal};
    WEFT_TRY_ASSIGN(auto memory, engine_->enroll(range, provider::kRemoteWrite | provider::kRemoteRead));
    if (!memory->is_staged()) return memory;
    const std::string why = memory->path().reason;
    WEFT_TRY(engine_->unregister(memory, farewell()));
    return Status(Code::kUnsupported, why);
  }

  // Writes the last bytes of each peer's device part, which are zero as yet, as ours are: whatever the network has to map
  // for it is mapped now, and not while a kernel waits.
  Status touch_device_parts(int window, const std::vector<Regions::Theirs>& theirs) {
    constexpr uint64_t kBytes = 16;
    const Regions::Part mine = regions_.own(region_of_[window]).device;
    if (!touched_.insert(window).second) return Status();
    const Deadline until = Deadline::after_s(timeout_s_);
    for (int peer : peers_) {
      const auto& there = theirs[static_cast<size_t>(peer)].device;
      if (!there) return Status::make(Code::kSystem, "proxy: rank {} offered no memory of its device", peer);
      transfer::WriteRequest request{mine.memory, mine.bytes - kBytes, there, mine.bytes - kBytes, kBytes,
                                     {}};
      request.how.timeout_s = timeout_s_;
      WEFT_TRY_ASSIGN(const auto write, engine_->write(std::move(request)));
      wait_until(until, [&] { return write->is_finished(); });
      if (!write->is_finished())
        return Status::make(Code::kPeerLost, "proxy: the first write to rank {} did not end in {} s", peer,
                            timeout_s_);
      WEFT_TRY(write->status());
    }
    return Status();
  }

  // The receiving host stores words once the NIC says that what came before them is there: the GPU must see both in that
  // order. Copy engines are done before they say so.
  Status orders_writes() const {
    if (is_of_copy_engines_) return {};
    WEFT_TRY_ASSIGN(
        const int ordering,
        cuda_device_attribute(device_.ordinal, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING));
    if (ordering > CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) return {};
    return Status::make(Code::kUnsupported,
                        "{} does not order what a NIC writes to it before what the host tells its mates",
                        device_);
  }

  Deadline farewell() const { return Deadline::after_s(std::min(kFarewell_s, timeout_s_)); }

  // What this rank can do by itself: memory, engine, threads.
  Status open(const Group& group) {
    const Device device = device_ = (*group.facts)[static_cast<size_t>(rank_)].device;
    if (ranks_ > static_cast<int>(kPeersMax))
      return Status::make(Code::kCapacity, "proxy: got {} ranks, allowed: at most {}", ranks_, kPeersMax);
    WEFT_TRY_ASSIGN(const Network network,
                    choose_network(config().proxy_provider, config().proxy_nics, place_of_rank(group)));
    is_of_copy_engines_ = network.nics[0].caps.copy_engines;
    // Kernels wait for these copies.
    if (is_of_copy_engines_ && config().proxy_copies == "own") copy_in_own_context();
    transfer::Options options;
    options.provider = network.provider;
    options.nics = network.nics;
    options.name = text("rank {}", rank_);
    options.secret = group.secret;
    options.timeout_s = timeout_s_;
    options.has_worker = false;  // proxy threads poll
    WEFT_TRY_ASSIGN(engine_, transfer::Engine::open(std::move(options)));
    takes_temporary_ =
        device.is_host() && network.nics.size() <= transfer::TemporaryKeys::kRailsMax &&
        std::ranges::all_of(network.nics, [](const auto& nic) { return nic.caps.takes_temporary; });
    if_unreached_ = network.if_unreached;
    traffic_.reset(new Traffic{*engine_, regions_, temporary_, network.pace, timeout_s_, rank_});
    const uint32_t proxies = proxy_count(peers_.size(), ranks_on_host(group));
    is_crowded_ = device.is_host() && proxies == 1 && cores_per_rank(ranks_on_host(group)) < 2;
    at_ = shared_words(static_cast<uint64_t>(ranks_));
    WEFT_TRY_ASSIGN(shared_, HostVisible::create(device, at_.end));
    fault_ = shared_->at<FaultBox>(at_.fault_at);
    std::vector<std::unique_ptr<Proxy>> made;
    WEFT_TRY_ASSIGN(fifos_, LocalMemory::create(device, proxies * kFifosPerProxy * sizeof(Fifo)));
    for (uint32_t i = 0; i < proxies; ++i) {
      WEFT_TRY_ASSIGN(auto proxy, Proxy::create(device, static_cast<uint64_t>(config().proxy_fifo)));
      for (uint32_t k = 0; k < kFifosPerProxy; ++k)
        WEFT_TRY(fifos_->write((k * proxies + i) * sizeof(Fifo), &proxy->fifo(k), sizeof(Fifo)));
      made.push_back(std::move(proxy));
    }
    idle_proxies_ = std::move(made);
    for (int peer : served()) {
      uint64_t* flushed = shared_->at<uint64_t>(at_.flushed_at) + peer;
      WEFT_TRY_ASSIGN(queues_[peer], PeerQueue::create(*traffic_, peer, flushed));
    }
    return Status();
  }

  // The peers, and this rank itself, in order.
  std::vector<int> served() const {
    std::vector<int> all = peers_;
    all.insert(std::lower_bound(all.begin(), all.end(), rank_), rank_);
    return all;
  }

  size_t ranks_on_host(const Group& group) const {
    const auto is_here = [&](const RankFacts& facts) {
      return facts.host == (*group.facts)[static_cast<size_t>(rank_)].host;
    };
    return static_cast<size_t>(std::ranges::count_if(*group.facts, is_here));
  }

  // Meets the peers. All ranks take part in both exchanges, also one that failed before.
  Status join(const Group& group, const Status& opened) {
    const auto exchange = [&](const std::string& mine) {
      return group.bootstrap->all_gather(mine, Deadline::after_s(timeout_s_));
    };
    WEFT_TRY_ASSIGN(const std::vector<std::string> addresses,
                    exchange(opened.ok() ? engine_->address() : std::string()));
    Status connected = opened.ok() ? start_engine(addresses) : opened;
    std::string inboxes(
        1, takes_temporary_ ? '1' : '0');  // then a descriptor for each rank, with its length before it
    for (int peer = 0; peer < ranks_; ++peer) {
      std::string inbox;
      if (connected.ok() && queues_.contains(peer) && peer != rank_) {
        Result<std::string> made = queues_[peer]->describe_inbox();
        if (made.ok()) inbox = *made;
        connected = made.status();
      }
      const auto length = static_cast<uint32_t>(inbox.size());
      inboxes.append(reinterpret_cast<const char*>(&length), sizeof length);
      inboxes += inbox;
    }
    WEFT_TRY_ASSIGN(const std::vector<std::string> all, exchange(connected.ok() ? inboxes : std::string()));
    if (connected.ok()) connected = attach_inboxes(all);
    takes_temporary_ =
        std::ranges::all_of(all, [](const std::string& theirs) { return theirs.starts_with('1'); });
    stop_helper();
    if (connected.ok()) start_proxies();
    return connected;
  }

  // Peers answer while this rank waits for others, so a thread moves the engine until the proxies do.
  Status start_engine(const std::vector<std::string>& addresses) {
    helper_ = std::thread([this] {
      while (!stop_helper_.load(std::memory_order_acquire)) {
        engine_->progress();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    });
    for (int peer : peers_) {
      const std::string& address = addresses[static_cast<size_t>(peer)];
      if (address.empty()) return Status::make(Code::kPeerLost, "proxy: rank {} could not start", peer);
      auto connected = engine_->connect(address, Deadline::after_s(timeout_s_));
      if (!connected.ok() && connected.status().code() == Code::kPeerLost)
        return Status(Code::kPeerLost, connected.status().message() + if_unreached_);
      WEFT_TRY(connected.status());
      connected_[peer] = *connected;
      WEFT_TRY(queues_[peer]->connect(std::move(*connected)));
    }
    return Status();
  }

  Status attach_inboxes(const std::vector<std::string>& all) {
    for (int peer : peers_) {
      const std::string& theirs = all[static_cast<size_t>(peer)];
      std::string mine;  // the descriptor that is for this rank
      for (size_t at = 1, rank = 0; at + sizeof(uint32_t) <= theirs.size(); ++rank) {
        uint32_t length = 0;
        std::memcpy(&length, theirs.data() + at, sizeof length);
        at += sizeof length;
        if (rank == static_cast<size_t>(rank_)) mine = theirs.substr(std::min(at, theirs.size()), length);
        at += length;
      }
      if (mine.empty()) return Status::make(Code::kPeerLost, "proxy: rank {} could not connect", peer);
      WEFT_TRY(queues_[peer]->attach(mine, Deadline::after_s(timeout_s_)));
    }
    return Status();
  }

  void stop_helper() {
    stop_helper_.store(true, std::memory_order_release);
    if (helper_.joinable()) helper_.join();
  }

  void start_proxies() {
    for (auto& [rank, queue] : queues_)
      idle_proxies_[static_cast<size_t>(rank) % idle_proxies_.size()]->add(std::move(queue));
    queues_.clear();
    proxies_ = std::move(idle_proxies_);
    Proxy::Network network{[this] { progress(); }, nullptr};
    if (is_crowded_) network.sleep = [this](uint64_t most_ns) { return engine_->sleep(most_ns); };
    for (const auto& proxy : proxies_)
      proxy->start(network, [this](const PeerQueue& queue) { note_loss(queue); });
  }

  void progress() {
    if (has_gone_.load(std::memory_order_acquire)) end_gone();
    engine_->progress();
  }

  void end_gone() {
    std::vector<std::pair<int, std::string>> gone;
    {
      std::lock_guard lock(gone_mutex_);
      gone.swap(gone_);
      has_gone_.store(false, std::memory_order_relaxed);
    }
    for (const auto& [peer, how] : gone) engine_->lose(connected_.at(peer), Status(Code::kPeerLost, how));
  }

  void note_loss(const PeerQueue& queue) {
    const Status why = logged(queue.status());
    {
      std::lock_guard lock(mutex_);
      if (status_.ok()) status_ = why;
    }
    lost_.add(queue.rank(), text("is lost: {}", queue.how()));
  }

  const int rank_, ranks_;
  const double timeout_s_;
  const std::vector<int> peers_;
  Device device_;
  bool is_of_copy_engines_ = false;
  Regions regions_;
  TemporaryRegistrations temporary_;
  bool takes_temporary_ = false;
  std::map<int, uint32_t> region_of_;  // by the number of a window
  std::set<int> touched_;              // windows
  std::unique_ptr<transfer::Engine> engine_;
  std::unique_ptr<Traffic> traffic_;
  std::unique_ptr<HostVisible> shared_;
  std::unique_ptr<LocalMemory> fifos_;  // those of all proxies, as device code reads them
  Shared at_{};
  FaultBox* fault_ = nullptr;
  std::map<int, std::unique_ptr<PeerQueue>> queues_;          // until the proxies have them
  std::map<int, std::shared_ptr<transfer::Peer>> connected_;  // by rank; constant once proxies run
  std::mutex gone_mutex_;
  std::vector<std::pair<int, std::string>> gone_;  // peers, and how, for the proxies to end
  std::atomic<bool> has_gone_{false};
  bool is_finished_ = false;
  std::string if_unreached_;  // Network::if_unreached
  bool is_crowded_ = false;   // fewer than two cores for each rank, and one proxy for all peers
  std::vector<std::unique_ptr<Proxy>> idle_proxies_, proxies_;
  std::thread helper_;
  std::atomic<bool> stop_helper_{false};
  std::mutex mutex_;
  Status status_;  // who was lost first
  Status broken_;
  LostPeers lost_{rank_};
};

// The network that this process would use, or why none; looked for once.
const Result<Network>& network_here() {
  static std::mutex mutex;
  static std::map<std::string, Result<Network>> known;
  std::lock_guard lock(mutex);
  const std::string key = config().proxy_provider + "/" + config().proxy_nics;
  auto found = known.find(key);
  if (found == known.end())
    found = known.emplace(key, choose_network(config().proxy_provider, config().proxy_nics)).first;
  return found->second;
}

class ProxyTransport : public Transport {
 public:
  const char* name() const override { return "proxy"; }
  const char* carried_by() const override { return "host threads and the transfer engine, over any network"; }

  Caps caps(Device device) const override {
    Caps caps;
    caps.reach = Reach::kPort;
    caps.needs_registration = true;
    caps.has_atomics = true;
    caps.hosts_store_words = true;
    caps.ordering = Ordering::kSignals;
    caps.max_put_bytes = UINT64_MAX;  // cut into commands
    const Result<Network>& network = network_here();
    if (!network.ok()) {
      caps.unusable_because = network.status().message();
    } else {
      const provider::Nic& nic = network->nics[0];
      caps.latency_us = 40;  // two hosts' threads and a network between
      caps.bandwidth_gb_s = nic.gbit_per_s > 0 ? nic.gbit_per_s / 8 * network->nics.size() : 2;
      const uint64_t bytes = network->pace.bytes_in_flight;
      const bool is_mib = bytes % (1 << 20) == 0;
      std::string names = nic.name;
      for (size_t i = 1; i < network->nics.size(); ++i) names += ", " + network->nics[i].name;
      caps.details =
          text("{} ({}) on {} ({}), at most {} {} and {} writes in flight", network->provider->name(),
               network->why_provider, names, network->why_nics, is_mib ? bytes >> 20 : bytes,
               is_mib ? "MiB" : "bytes", network->pace.writes_in_flight);
      if (!device.is_host())
        caps.details += text(", words in memory of the host{}",
                             nic.caps.device_memory ? "" : ", payload too: it does not reach memory of GPUs");
    }
    return caps;
  }

  // provider;process or host it is limited to
  std::string descriptor(Device) const override {
    const Result<Network>& network = network_here();
    if (!network.ok()) return "";
    const provider::Caps& reach = network->nics[0].caps;
    return text("{};{}", network->provider->name(),
                reach.same_process ? "process"
                : reach.same_host  ? "host"
                                   : "");
  }

  std::string refuses(const RankFacts& self, const RankFacts& peer) const override {
    const auto mine = self.descriptors.find(name()), theirs = peer.descriptors.find(name());
    if (mine == self.descriptors.end() || mine->second.empty())
      return text("rank {} has no network", self.rank);
    if (theirs == peer.descriptors.end() || theirs->second.empty())
      return text("rank {} has no network", peer.rank);
    if (self.device.kind != peer.device.kind)
      return text("one rank uses {}, the other {}", self.device, peer.device);
    const std::string provider = mine->second.substr(0, mine->second.find(';'));
    if (mine->second != theirs->second)
      return text("one rank uses {}, the other {} (WEFT_PROXY_PROVIDER)", provider,
                  theirs->second.substr(0, theirs->second.find(';')));
    if (mine->second.ends_with(";process") && self.process != peer.process)
      return text("{} joins threads of one process", provider);
    // libfabric's shm shares the memory of an endpoint among the threads of a process, also once it is closed.
    if (mine->second.ends_with(";host") && (self.host != peer.host || self.process == peer.process))
      return text("{} joins processes of one host", provider);
    return "";
  }

  Result<std::unique_ptr<Link>> connect(const Group& group) const override {
    return ProxyLink::connect(group);
  }
};

}  // namespace
}  // namespace proxy

const Transport& proxy_transport() {
  static const proxy::ProxyTransport transport;
  return transport;
}

}  // namespace weft
