// SPDX-License-Identifier: Apache-2.0
#include "transports/library_transport.h"

#include <utility>

#include "transports/mapped_peers.h"

namespace weft {
namespace {

// Estimates for ports, until a network has been measured: a host thread carries each put, over a NIC of 100 Gbit/s.
constexpr double kPortLatencyUs = 25, kPortGbS = 12.5;
constexpr size_t kReasonBytes = 400;  // of what a rank that is not ready tells the others

std::set<int> with_self(const Group& group) {
  std::set<int> ranks(group.peers.begin(), group.peers.end());
  ranks.insert(group.rank);
  return ranks;
}

// (version, why it has no ports)
std::pair<std::string, std::string> parts_of(const std::string& descriptor) {
  const size_t line = descriptor.find('\n');
  return {descriptor.substr(0, line), line == std::string::npos ? "" : descriptor.substr(line + 1)};
}

}  // namespace

Caps LibraryTransport::caps(Device device) const {
  const Result<LibraryFacts> library = look(device);
  Caps caps;
  if (library.ok()) {
    const std::string& lack = library->why_no_ports;
    caps = mapped_caps(device);
    caps.details = text("{} {}, {}; {}; by name alone: WEFT_TRANSPORT={}", title_, library->version,
                        library->where, lack.empty() ? library->ports : "no ports: " + lack, name_);
  } else {
    caps.unusable_because = library.status().message();
  }
  caps.reach = Reach::kMapped;
  caps.brings_memory = true;
  caps.only_by_name = true;
  return caps;
}

std::string LibraryTransport::descriptor(Device device) const {
  const Result<LibraryFacts> library = look(device);
  return library.ok() ? library->version + "\n" + library->why_no_ports : "";
}

Caps LibraryTransport::towards(const Caps& caps, const RankFacts& self, const RankFacts& peer) const {
  if (self.node == peer.node) return caps;
  Caps port = caps;
  port.reach = Reach::kPort;
  port.ordering = Ordering::kSignals;
  port.latency_us = kPortLatencyUs;
  port.bandwidth_gb_s = kPortGbS;
  return port;
}

std::string LibraryTransport::refuses(const RankFacts& self, const RankFacts& peer) const {
  for (const RankFacts* one : {&self, &peer}) {
    const auto descriptor = one->descriptors.find(name_);
    if (descriptor == one->descriptors.end() || descriptor->second.empty())
      return text("rank {} has no {} that it could use", one->rank, title_);
  }
  const auto [mine, my_lack] = parts_of(self.descriptors.at(name_));
  const auto [theirs, their_lack] = parts_of(peer.descriptors.at(name_));
  if (mine != theirs)
    return text("rank {} has {} {}, rank {} has {} {}", self.rank, title_, mine, peer.rank, title_, theirs);
  if (const std::string why = refuses_both(self, peer); !why.empty()) return why;
  if (self.node == peer.node) return why_not_mapped(self, peer);
  for (const auto& [rank, lack] : {std::pair(self.rank, my_lack), std::pair(peer.rank, their_lack)})
    if (!lack.empty()) return text("rank {} reaches its node alone: {}", rank, lack);
  return "";
}

LibraryLink::LibraryLink(const Group& group)
    : device_((*group.facts)[static_cast<size_t>(group.rank)].device),
      rank_(group.rank),
      ranks_(static_cast<int>(group.facts->size())),
      mapped_(with_self(group)),
      timeout_s_(group.timeout_s),
      lost_(group.rank) {}

Result<std::vector<std::string>> gather_ready(const Group& group, const char* transport, const Status& mine,
                                              const std::string& shown) {
  const std::string words =
      std::string(1, static_cast<char>(mine.code())) + shown + mine.message().substr(0, kReasonBytes);
  WEFT_TRY_ASSIGN(std::vector<std::string> all,
                  group.bootstrap->all_gather(words, Deadline::after_s(group.timeout_s)));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].size() < 1 + shown.size())
      return Status::invalid("rank {} makes another call on this communicator", rank);
    const auto code = static_cast<Code>(all[rank][0]);
    if (code != Code::kOk)
      return Status::make(code, "{}, on rank {}: {}", transport, rank, all[rank].substr(1 + shown.size()));
  }
  for (std::string& one : all) one = one.substr(1, shown.size());
  return all;
}

}  // namespace weft
