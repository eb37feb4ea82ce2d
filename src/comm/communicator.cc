// SPDX-License-Identifier: Apache-2.0
#include "comm/communicator.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/config.h"
#include "base/log.h"
#include "base/proof.h"
#include "base/tally.h"
#include "comm/choice.h"

namespace weft {
namespace {

// The record that a rank gives to the others at creation. Plain bytes: all ranks run the same build, which
// `version` checks.
struct RankDescriptor {
  static constexpr uint64_t kVersion = 2;  // changes with the fields

  uint64_t version = kVersion;
  uint64_t process = 0;
  FdAddress fds;
  int64_t ranks_per_node = 0;
  int32_t device_kind = 0;
  int32_t device_ordinal = 0;
  char host[96] = {};
  int64_t numa_node = -1;
  char gpu[32] = {};
  char gpus_beyond[256] = {};
  char transport[32] = {};
  bool can_share_vmm = false;
  bool can_share_ipc = false;
  char settings[510] = {};  // shared_settings(); one that is longer is compared as far as it fits
};

template <size_t N>
void copy_text(char (&to)[N], std::string_view from) {
  std::memcpy(to, from.data(), std::min(from.size(), N - 1));
}

std::string to_bytes(const RankDescriptor& descriptor) {
  return std::string(reinterpret_cast<const char*>(&descriptor), sizeof descriptor);
}

Result<RankDescriptor> from_bytes(const std::string& bytes, int rank) {
  RankDescriptor descriptor;
  if (bytes.size() == sizeof descriptor) std::memcpy(&descriptor, bytes.data(), sizeof descriptor);
  if (bytes.size() != sizeof descriptor || descriptor.version != RankDescriptor::kVersion)
    return Status::make(Code::kInvalid, "rank {} runs another version of Weft", rank);
  return descriptor;
}

RankDescriptor make_descriptor(const RankFacts& facts, const FdAddress& address, std::string_view transport) {
  RankDescriptor descriptor;
  descriptor.process = facts.process;
  descriptor.fds = address;
  descriptor.ranks_per_node = config().ranks_per_node;
  descriptor.device_kind = static_cast<int32_t>(facts.device.kind);
  descriptor.device_ordinal = facts.device.ordinal;
  copy_text(descriptor.host, facts.host);
  copy_text(descriptor.gpu, facts.gpu);
  copy_text(descriptor.gpus_beyond, facts.gpus_beyond);
  descriptor.numa_node = facts.numa_node;
  copy_text(descriptor.transport, transport);
  copy_text(descriptor.settings, shared_settings());
  descriptor.can_share_vmm = facts.can_share_vmm;
  descriptor.can_share_ipc = facts.can_share_ipc;
  return descriptor;
}

RankFacts to_facts(const RankDescriptor& descriptor, int rank) {
  RankFacts facts;
  facts.rank = rank;
  facts.host = descriptor.host;
  facts.process = descriptor.process;
  facts.device = {static_cast<Device::Kind>(descriptor.device_kind), descriptor.device_ordinal};
  facts.gpu = descriptor.gpu;
  facts.gpus_beyond = descriptor.gpus_beyond;
  facts.numa_node = static_cast<int>(descriptor.numa_node);
  facts.can_share_vmm = descriptor.can_share_vmm;
  facts.can_share_ipc = descriptor.can_share_ipc;
  return facts;
}

template <class T>
Status must_equal(std::string_view name, int rank, const T& theirs, const T& first) {
  if (theirs == first) return Status();
  return Status::invalid("{}: got '{}' on rank 0 and '{}' on rank {}, allowed: the same on all ranks", name,
                         first, theirs, rank);
}

// Both are lines "NAME=value", in the same order.
Status check_settings(int rank, const char* theirs, const char* first) {
  std::istringstream their_lines(theirs), first_lines(first);
  for (std::string a, b; std::getline(their_lines, a) && std::getline(first_lines, b);) {
    const size_t equals = std::min(a.find('='), a.size() - 1);
    WEFT_TRY(must_equal(a.substr(0, equals), rank, a.substr(equals + 1),
                        b.substr(std::min(equals + 1, b.size()))));
  }
  return Status();
}

// Every rank compares all descriptors with rank 0's, so every rank fails with the same words.
Status check_agreement(const std::vector<RankDescriptor>& descriptors) {
  for (int rank = 1; rank < static_cast<int>(descriptors.size()); ++rank) {
    const RankDescriptor &first = descriptors[0], &descriptor = descriptors[rank];
    WEFT_TRY(must_equal("transport", rank, std::string(descriptor.transport), std::string(first.transport)));
    WEFT_TRY(check_settings(rank, descriptor.settings, first.settings));
  }
  return Status();
}

// A Status that travels.
std::string to_bytes(const Status& status) {
  return std::string(1, static_cast<char>(status.code())) + status.message().substr(0, 400);
}

}  // namespace

Result<std::shared_ptr<Communicator>> Communicator::create(std::shared_ptr<Bootstrap> bootstrap,
                                                           Device device, double timeout_s,
                                                           std::string_view transport) {
  WEFT_TRY(logged(config_status()));
  WEFT_TRY(bootstrap->check_owner());
  auto comm = ended_by_owner(std::unique_ptr<Communicator>(new Communicator));
  comm->rank_ = bootstrap->rank();
  comm->bootstrap_ = std::move(bootstrap);
  comm->timeout_s_ = std::min(timeout_s > 0 ? timeout_s : config().timeout_s, kLongestWait_s);
  WEFT_TRY_ASSIGN(RankFacts mine, rank_facts(comm->rank_, device));
  comm->facts_.assign(1, std::move(mine));
  const std::string wanted(transport.empty() ? std::string_view(config().transport) : transport);
  WEFT_TRY(logged(comm->meet(wanted)));
  WEFT_TRY(logged(comm->connect(wanted)));
  WEFT_TRY(logged(comm->watch_peers()));
  return comm;
}

// Exchanges descriptors: afterwards the facts and addresses of all ranks are known and their settings agree.
Status Communicator::meet(std::string_view transport) {
  WEFT_TRY_ASSIGN(fd_exchange_, FdExchange::open(rank_));
  const RankDescriptor mine = make_descriptor(facts_[0], fd_exchange_->address(), transport);
  WEFT_TRY_ASSIGN(const std::vector<std::string> all, bootstrap_->all_gather(to_bytes(mine), deadline()));
  if (static_cast<int>(all.size()) != bootstrap_->size())
    return Status::make(Code::kSystem, "bootstrap: got {} answers, allowed: {}", all.size(),
                        bootstrap_->size());
  std::vector<RankDescriptor> descriptors;
  for (const std::string& bytes : all) {
    WEFT_TRY_ASSIGN(const RankDescriptor descriptor, from_bytes(bytes, static_cast<int>(descriptors.size())));
    descriptors.push_back(descriptor);
  }
  WEFT_TRY(check_agreement(descriptors));
  facts_.clear();
  for (const RankDescriptor& descriptor : descriptors) {
    addresses_.push_back(descriptor.fds);
    facts_.push_back(to_facts(descriptor, static_cast<int>(facts_.size())));
  }
  // The keys are random, and known only to ranks that came through the bootstrap.
  std::string keys;
  for (const FdAddress& address : addresses_)
    keys.append(reinterpret_cast<const char*>(&address.key), sizeof address.key);
  secret_ = bytes_of(prove(config().job_secret, "communicator", {keys}));
  number_nodes(facts_, descriptors[0].ranks_per_node);
  key_ = descriptors[0].fds.key;
  return Status();
}

// Whether mapped memory, the best way, joins all ranks: then no network is looked for.
bool Communicator::is_mapped_enough(std::string_view wanted) const {
  const Transport& mapped = *transports().front();
  if (wanted != "auto" && wanted != mapped.name()) return false;
  for (const RankFacts& one : facts_)
    for (const RankFacts& other : facts_)
      if (one.rank != other.rank && !mapped.refuses(one, other).empty()) return false;
  return true;
}

// Every rank learns what each transport of every other has to say of it.
Status Communicator::exchange_descriptors(std::string_view wanted) {
  std::string mine;
  for (const Transport* transport : transports())
    mine += (is_asked_for(wanted, *transport) ? transport->descriptor(device()) : "") + '\0';
  WEFT_TRY_ASSIGN(const std::vector<std::string> all, bootstrap_->all_gather(mine, deadline()));
  for (int rank = 0; rank < size(); ++rank) {
    size_t at = 0;
    for (const Transport* transport : transports()) {
      const size_t end = all[rank].find('\0', at);
      if (end == std::string::npos)
        return Status::make(Code::kInvalid, "rank {} runs another version of Weft", rank);
      facts_[rank].descriptors[transport->name()] = all[rank].substr(at, end - at);
      at = end + 1;
    }
  }
  return Status();
}

// Chooses the transport to each peer, and where windows lie.
Status Communicator::connect(std::string_view transport) {
  std::vector<Candidate> usable;
  if (is_mapped_enough(transport)) {
    usable.push_back({transports().front(), transports().front()->caps(device())});
  } else {
    WEFT_TRY(exchange_descriptors(transport));
    usable = candidates_for(transport, device());
  }
  // What a peer cannot reach, this rank must know too: all ranks fail here, or none.
  std::vector<std::vector<const Transport*>> chosen;
  for (int rank = 0; rank < size(); ++rank) {
    WEFT_TRY_ASSIGN(auto of_rank, select_transports(usable, facts_, rank, transport));
    chosen.push_back(std::move(of_rank));
  }
  gather_in_one_memory(chosen, usable, facts_);
  transports_ = chosen[rank_];
  for (int peer = 0; peer < size(); ++peer) {
    if (reach_between(usable, transports_[peer], facts_, rank_, peer) == Reach::kMapped)
      mapped_ranks_.push_back(peer);
    else
      addresses_[peer].key = 0;
  }
  WEFT_TRY(fd_exchange_->connect(addresses_));
  WEFT_TRY(open_links(chosen, usable));
  return choose_windows();
}

// Every rank connects where any rank has a port peer, so that all call alike.
Status Communicator::open_links(const std::vector<std::vector<const Transport*>>& chosen,
                                const std::vector<Candidate>& candidates) {
  const Transport* port = nullptr;
  for (int rank = 0; rank < size(); ++rank)
    for (int peer = 0; peer < size(); ++peer) {
      const Transport* taken = chosen[rank][peer];
      if (reach_between(candidates, taken, facts_, rank, peer) == Reach::kMapped) continue;
      if (port && taken != port)
        return Status::make(Code::kUnsupported, "transports: got {} and {}, allowed: one kind of port",
                            port->name(), taken->name());
      if (!port) port_pair_ = text("rank {} reaches rank {} through {}", rank, peer, taken->name());
      port = taken;
    }
  Group group{rank_, &facts_, {}, bootstrap_.get(), port != nullptr, timeout_s_, secret_};
  WEFT_TRY_ASSIGN(mapped_link_, transports().front()->connect(group));
  WEFT_TRY(open_memory(chosen, candidates, group));
  if (!port) return Status();
  for (int peer = 0; peer < size(); ++peer)
    if (transports_[peer] == port && std::ranges::count(mapped_ranks_, peer) == 0)
      group.peers.push_back(peer);
  if (memory_link_) {  // which reaches ports, too: nothing else stands beside it
    port_link_ = memory_link_;
    return Status();
  }
  Result<std::unique_ptr<Link>> link = port->connect(group);
  port_reaches_gpus_ = caps_of(candidates, port).reaches_gpus;
  port_stores_words_ = caps_of(candidates, port).hosts_store_words;
  if (link.ok()) {
    port_link_ = std::move(*link);
    log_info("rank {} of {}, node {}: {} ranks mapped, {} through {}: {}", rank_, size(), facts_[rank_].node,
             mapped_ranks_.size() - 1, group.peers.size(), port->name(), caps_of(candidates, port).details);
  }
  return agree_on_links(link.status());
}

Status Communicator::open_memory(const std::vector<std::vector<const Transport*>>& chosen,
                                 const std::vector<Candidate>& candidates, const Group& group) {
  WEFT_TRY_ASSIGN(const Transport* brings, who_brings_memory(chosen, candidates));
  if (!brings) return {};
  Group all = group;
  for (int peer : mapped_ranks_)
    if (peer != rank_) all.peers.push_back(peer);
  Result<std::unique_ptr<Link>> link = brings->connect(all);
  if (link.ok()) memory_link_ = std::move(*link);
  WEFT_TRY(agree_on_links(link.status()));
  log_info("rank {} of {}: {} ranks mapped through {}{}: {}", rank_, size(), all.peers.size(), brings->name(),
           group.has_ports ? ", the others its ports" : "", caps_of(candidates, brings).details);
  return {};
}

// Links are connected on all ranks or on none.
Status Communicator::agree_on_links(const Status& mine) {
  WEFT_TRY_ASSIGN(const std::vector<std::string> all, bootstrap_->all_gather(to_bytes(mine), deadline()));
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    const Code code = all[rank].empty() ? Code::kInvalid : static_cast<Code>(all[rank][0]);
    if (code != Code::kOk)
      return Status::make(code, "transport, on rank {}: {}", rank,
                          all[rank].substr(all[rank].empty() ? 0 : 1));
  }
  return mine;
}

std::string Communicator::why_not_all_mapped() const {
  return port_pair_;
}

// Ranks that are threads of this process die with it, and need no watching.
Status Communicator::watch_peers() {
  WEFT_TRY_ASSIGN(peers_, PeerWatch::open(rank_));
  std::vector<bool> is_other_process;
  for (const RankFacts& facts : facts_) is_other_process.push_back(facts.process != facts_[rank_].process);
  WEFT_TRY(peers_->meet(*fd_exchange_, is_other_process, deadline()));
  fd_exchange_->ask(peers_.get());
  if (!port_pair_.empty()) WEFT_TRY(meet_other_nodes());
  if (!port_link_) return {};
  port_link_->on_lost([this](int peer, const std::string& how) {
    if (rendezvous_)
      rendezvous_->report(peer, how, false);
    else
      peers_->lose(peer, how);
  });
  return {};
}

// Rank 0's process holds a connection of every rank, over which each hears of deaths on other nodes; a rank
// tells what it sees on its own. Without it, the network's silence has to do.
Status Communicator::meet_other_nodes() {
  constexpr double kJoin_s = 10;
  const Deadline until = Deadline::after_s(std::min(kJoin_s, timeout_s_));
  Result<UniqueId> unique_id = UniqueId{};
  if (rank_ == 0) unique_id = open_rendezvous(config().interface);
  const UniqueId shown = unique_id.ok() ? *unique_id : UniqueId{};
  const std::string mine(reinterpret_cast<const char*>(&shown), sizeof shown);
  WEFT_TRY_ASSIGN(const std::vector<std::string> all,
                  bootstrap_->all_gather(mine + PeerWatch::who_am_i(), deadline()));
  std::vector<std::string> who;
  for (const std::string& one : all) who.push_back(one.substr(std::min(one.size(), sizeof shown)));
  peers_->introduce(std::move(who));
  Status joined = unique_id.status();
  std::shared_ptr<RendezvousBootstrap> rendezvous;
  UniqueId theirs{};
  std::memcpy(&theirs, all[0].data(), std::min(all[0].size(), sizeof theirs));
  if (joined.ok()) {
    auto made = join_rendezvous(theirs, rank_, size(), until);
    joined = made.status();
    if (made.ok()) rendezvous = std::move(*made);
  }
  WEFT_TRY_ASSIGN(const std::vector<std::string> verdicts,
                  bootstrap_->all_gather(to_bytes(joined), deadline()));
  for (int rank = 0; rank < size(); ++rank)
    if (verdicts[rank].empty() || static_cast<Code>(verdicts[rank][0]) != Code::kOk) {
      log_warn(
          "rank {}: deaths on other nodes are noticed only after {} s, because rank {} did not reach rank 0 "
          "on "
          "its network interface (WEFT_INTERFACE): {}",
          rank_, config().peer_dead_s, rank,
          verdicts[rank].substr(std::min<size_t>(1, verdicts[rank].size())));
      return {};
    }
  rendezvous_ = std::move(rendezvous);
  rendezvous_->on_lost([this](int peer, const std::string& how) {
    if (port_link_ && peer != rank_) port_link_->lose(peer, how);
    peers_->lose(peer, peer == rank_ ? "(this rank) was given up by the others: it " + how : how);
  });
  peers_->tell([this](int peer, const std::string& how) {
    if (port_link_) port_link_->lose(peer, how);
    rendezvous_->report(peer, how, true);
  });
  return {};
}

// Deaths are reported until the ports have closed: no port waits for the farewell of a dead rank.
Communicator::~Communicator() {
  if (peers_) peers_->tell({});
  if (port_link_) port_link_->finish();
  if (rendezvous_) rendezvous_->on_lost({});
}

// Over the sockets where they reach everybody: faster, and a dead peer is found at once.
Status Communicator::barrier() {
  WEFT_TRY(check_owner());
  if (!port_pair_.empty()) return lost_in("barrier", bootstrap().all_gather("", deadline()).status());
  fd_exchange_->begin_call();
  return fd_exchange_->all_gather({}, "barrier", deadline()).status();
}

// With what is known of who was lost, where that is why it failed.
Status Communicator::lost_in(std::string_view operation, Status status) {
  if (status.code() != Code::kPeerLost) return status;
  const std::string lost = peers_->lost();
  return lost.empty() ? status : Status::make(Code::kPeerLost, "rank {}, {}: {}", rank_, operation, lost);
}

// A link notices that a connection broke, others how its process ended, a moment later.
Status Communicator::port_status() {
  const Status status = port_link_->status();
  if (status.code() != Code::kPeerLost) return status;
  const std::string lost = peers_->lost_by_now();
  return lost.empty() ? status : Status::make(Code::kPeerLost, "{}; {}", status.message(), lost);
}

Status Communicator::agree(std::string_view operation, const std::vector<Agreed>& mine) {
  constexpr size_t kNumbers = 4;  // of an entry: its value and the word
  std::vector<uint64_t> values;
  for (const Agreed& entry : mine) {
    uint64_t word[kNumbers - 1] = {};
    std::memcpy(word, entry.word.data(), std::min(entry.word.size(), sizeof word));
    values.push_back(entry.value);
    values.insert(values.end(), std::begin(word), std::end(word));
  }
  WEFT_TRY_ASSIGN(const auto all, show(operation, values));
  auto said = [&](int rank, size_t at) {
    const uint64_t* entry = &all[rank][at * kNumbers];
    if (mine[at].word.empty()) return std::to_string(entry[0]);
    const std::string word(reinterpret_cast<const char*>(entry + 1), (kNumbers - 1) * sizeof *entry);
    return word.substr(0, word.find('\0'));
  };
  for (size_t at = 0; at < mine.size(); ++at)
    for (int rank = 0; rank < size(); ++rank)
      if (said(rank, at) != said(0, at))
        return Status::invalid("{}: got {} on rank {} and {} on rank {}, allowed: the same on all ranks",
                               mine[at].name, said(0, at), 0, said(rank, at), rank);
  return {};
}

Result<std::vector<std::vector<uint64_t>>> Communicator::show(std::string_view operation,
                                                              const std::vector<uint64_t>& mine) {
  const std::string shown(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(uint64_t));
  WEFT_TRY_ASSIGN(const std::vector<std::string> all, show_all(operation, shown));
  std::vector<std::vector<uint64_t>> numbers(all.size());
  for (int rank = 0; rank < size(); ++rank) {
    const std::string& theirs = all[rank];
    if (theirs.size() != shown.size())
      return Status::invalid("rank {} makes another call on this communicator", rank);
    numbers[rank].resize(mine.size());
    if (!theirs.empty()) std::memcpy(numbers[rank].data(), theirs.data(), theirs.size());
  }
  return numbers;
}

// Every rank's bytes, by rank: over the sockets of mapped ranks, or over the bootstrap where not all are.
Result<std::vector<std::string>> Communicator::show_all(std::string_view operation, const std::string& mine) {
  WEFT_TRY(check_owner());
  if (!port_pair_.empty()) {
    Result<std::vector<std::string>> all = bootstrap().all_gather(mine, deadline());
    if (!all.ok()) return lost_in(operation, all.status());
    return all;
  }
  fd_exchange_->begin_call();
  WEFT_TRY_ASSIGN(std::vector<FdMessage> messages,
                  fd_exchange_->all_gather({mine, {}}, operation, deadline()));
  std::vector<std::string> all;
  for (FdMessage& message : messages) all.push_back(std::move(message.bytes));
  return all;
}

TallyCaller Communicator::tally_caller() const {
  TallyCaller caller{key_, rank_, size(), text("{}", device()), {}};
  for (const Transport* transport : transports_)
    caller.transports.emplace_back(transport ? transport->name() : "");
  return caller;
}

Communicator::WindowPlace Communicator::find_window(const std::byte* address) const {
  std::lock_guard lock(windows_mutex_);
  for (size_t i = 0; i < windows_.size(); ++i) {
    const KnownWindow& window = windows_[i];
    if (window.base && address >= window.base && address < window.base + window.bytes)
      return {static_cast<int>(i), static_cast<uint64_t>(address - window.base)};
  }
  return {};
}

std::vector<std::byte* const*> Communicator::window_tables() const {
  std::lock_guard lock(windows_mutex_);
  std::vector<std::byte* const*> tables;
  for (const KnownWindow& window : windows_) tables.push_back(window.base ? window.table : nullptr);
  return tables;
}

void Communicator::add_window(int number, const std::byte* base, uint64_t bytes, std::byte* const* table) {
  std::lock_guard lock(windows_mutex_);
  if (windows_.size() <= static_cast<size_t>(number)) windows_.resize(static_cast<size_t>(number) + 1);
  windows_[static_cast<size_t>(number)] = {base, bytes, table};
  ++windows_version_;
}

void Communicator::resize_window(int number, uint64_t bytes) {
  std::lock_guard lock(windows_mutex_);
  windows_[static_cast<size_t>(number)].bytes = bytes;
}

void Communicator::remove_window(int number) {
  std::lock_guard lock(windows_mutex_);
  windows_[static_cast<size_t>(number)].base = nullptr;
  ++windows_version_;
}

}  // namespace weft
