// SPDX-License-Identifier: Apache-2.0
#include "transports/transport.h"

#include <algorithm>
#include <map>
#include <utility>

#include "transports/list.h"
#include "transports/mapped_peers.h"

namespace weft {
namespace {

std::string names_of(const std::vector<Candidate>& candidates) {
  std::string names = "auto";
  for (const Candidate& candidate : candidates) names += text(", {}", candidate.transport->name());
  return names;
}

std::vector<std::string_view> split(std::string_view names) {
  std::vector<std::string_view> parts;
  for (size_t comma; (comma = names.find(',')) != std::string_view::npos; names.remove_prefix(comma + 1))
    parts.push_back(names.substr(0, comma));
  parts.push_back(names);
  return parts;
}

bool admits(std::string_view wanted, const Candidate& candidate) {
  if (wanted == "auto") return !candidate.caps.only_by_name;
  return std::ranges::count(split(wanted), candidate.transport->name()) > 0;
}

bool is_known(std::string_view name, const std::vector<Candidate>& candidates) {
  const auto is_it = [&](const Candidate& candidate) { return name == candidate.transport->name(); };
  return std::ranges::any_of(candidates, is_it);
}

// Why `candidate` does not reach `peer` from `self`; empty when it does.
std::string obstacle(const Candidate& candidate, const RankFacts& self, const RankFacts& peer) {
  if (!candidate.caps.is_usable()) return candidate.caps.unusable_because;
  // Both ways: a peer that cannot answer the same way would take another one.
  const std::string why = candidate.transport->refuses(self, peer);
  return why.empty() ? candidate.transport->refuses(peer, self) : why;
}

Result<const Transport*> select_one(const std::vector<Candidate>& candidates, const RankFacts& self,
                                    const RankFacts& peer, std::string_view wanted) {
  std::string reasons;
  for (const Candidate& candidate : candidates) {
    if (!admits(wanted, candidate)) continue;
    const std::string why = obstacle(candidate, self, peer);
    if (why.empty()) return candidate.transport;
    reasons += text("{}{}: {}", reasons.empty() ? "" : "; ", candidate.transport->name(), why);
  }
  return Status::make(Code::kUnsupported, "transport '{}': rank {} cannot reach rank {} ({})", wanted,
                      self.rank, peer.rank, reasons);
}

}  // namespace

const std::vector<const Transport*>& memory_transports() {
#define WEFT_TRANSPORT(folder) &folder##_transport(),
  static const std::vector<const Transport*> all = {WEFT_MEMORY_TRANSPORTS(WEFT_TRANSPORT)};
#undef WEFT_TRANSPORT
  return all;
}

const std::vector<const Transport*>& transports() {
  static const std::vector<const Transport*> all = [] {
#define WEFT_TRANSPORT(folder, Mesh) &folder##_transport(),
    std::vector<const Transport*> best_first = {WEFT_TRANSPORTS(WEFT_TRANSPORT)};
#undef WEFT_TRANSPORT
    // They map peers: after mapped itself, before every port.
    std::ptrdiff_t place = 1;
    for (const Transport* memory : memory_transports()) {
      if (std::ranges::count(best_first, memory) == 0) best_first.insert(best_first.begin() + place, memory);
      ++place;
    }
    return best_first;
  }();
  return all;
}

std::vector<Candidate> candidates(Device device) {
  std::vector<Candidate> all;
  for (const Transport* transport : transports()) all.push_back({transport, transport->caps(device)});
  return all;
}

void number_nodes(std::vector<RankFacts>& facts, int64_t ranks_per_node) {
  std::map<std::pair<std::string, int64_t>, int> nodes;  // (host, part of the host) -> node
  std::map<std::string, int64_t> ranks_seen;             // per host
  for (RankFacts& rank : facts) {
    const int64_t index = ranks_seen[rank.host]++;
    const int64_t part = ranks_per_node > 0 ? index / ranks_per_node : 0;
    rank.node = nodes.try_emplace({rank.host, part}, static_cast<int>(nodes.size())).first->second;
  }
}

Result<std::vector<const Transport*>> select_transports(const std::vector<Candidate>& candidates,
                                                        const std::vector<RankFacts>& facts, int self,
                                                        std::string_view wanted) {
  for (std::string_view name : split(wanted))
    if (wanted != "auto" && !is_known(name, candidates))
      return Status::invalid("transport: got '{}', allowed: {}", wanted, names_of(candidates));
  std::vector<const Transport*> chosen(facts.size(), nullptr);
  for (size_t peer = 0; peer < facts.size(); ++peer) {
    if (static_cast<int>(peer) == self) continue;
    WEFT_TRY_ASSIGN(chosen[peer], select_one(candidates, facts[self], facts[peer], wanted));
  }
  return chosen;
}

MeshPart hybrid_mesh(const MeshPart& mapped, const MeshPart& port) {
  MeshPart both{text("HybridMesh<weft::{}, weft::{}>", mapped.type, port.type), mapped.value, port.sources};
  both.value.insert(both.value.end(), port.value.begin(), port.value.end());
  return both;
}

}  // namespace weft
