// SPDX-License-Identifier: Apache-2.0
#include "comm/transport_choice.h"

#include <algorithm>

#include "transports/mapped_peers.h"

namespace weft {

bool is_asked_for(std::string_view wanted, const Transport& transport) {
  if (wanted == "auto")
    return std::ranges::find(memory_transports(), &transport) == memory_transports().end();
  return wanted.find(transport.name()) != std::string_view::npos;
}

std::vector<Candidate> candidates_for(std::string_view wanted, Device device) {
  std::vector<Candidate> all;
  for (const Transport* transport : transports()) {
    all.push_back({transport, {}});
    if (is_asked_for(wanted, *transport))
      all.back().caps = transport->caps(device);
    else
      all.back().caps.only_by_name = true;  // and not named: never taken
  }
  return all;
}

const Caps& caps_of(const std::vector<Candidate>& candidates, const Transport* transport) {
  const auto is_it = [&](const Candidate& candidate) { return candidate.transport == transport; };
  return std::find_if(candidates.begin(), candidates.end(), is_it)->caps;
}

Reach reach_between(const std::vector<Candidate>& candidates, const Transport* taken,
                    const std::vector<RankFacts>& facts, int self, int peer) {
  if (!taken) return Reach::kMapped;
  return taken
      ->towards(caps_of(candidates, taken), facts[static_cast<size_t>(self)],
                facts[static_cast<size_t>(peer)])
      .reach;
}

void gather_in_one_memory(std::vector<std::vector<const Transport*>>& chosen,
                          const std::vector<Candidate>& candidates, const std::vector<RankFacts>& facts) {
  const Transport* brings = nullptr;
  for (const auto& of_rank : chosen)
    for (const Transport* taken : of_rank)
      if (taken && !brings && caps_of(candidates, taken).brings_memory) brings = taken;
  if (!brings) return;
  for (size_t self = 0; self < chosen.size(); ++self)
    for (size_t peer = 0; peer < chosen.size(); ++peer)
      if (chosen[self][peer] && brings->refuses(facts[self], facts[peer]).empty() &&
          brings->refuses(facts[peer], facts[self]).empty())
        chosen[self][peer] = brings;
}

Result<const Transport*> who_brings_memory(const std::vector<std::vector<const Transport*>>& chosen,
                                           const std::vector<Candidate>& candidates) {
  const Transport* brings = nullptr;
  const Transport* other = nullptr;
  for (const auto& of_rank : chosen)
    for (const Transport* taken : of_rank) {
      if (!taken) continue;
      const Transport*& kind = caps_of(candidates, taken).brings_memory ? brings : other;
      if (kind && kind != taken && &kind == &brings) other = taken;
      if (!kind) kind = taken;
    }
  if (brings && other)
    return Status::make(
        Code::kUnsupported,
        "transports: got {} and {}, allowed: {} alone, since windows lie in the memory that it brings",
        brings->name(), other->name(), brings->name());
  return brings;
}

namespace {

// The first rank that says why it cannot; empty: none does.
std::string first_refusal(const std::vector<std::string>& refusals) {
  for (size_t rank = 0; rank < refusals.size(); ++rank)
    if (!refusals[rank].empty()) return text("rank {}: {}", rank, refusals[rank]);
  return "";
}

}  // namespace

Result<PortWindows> choose_port_windows(const std::vector<std::string>& refusals,
                                        const std::vector<std::string>& undivided, bool hosts_store_words,
                                        std::string_view wanted) {
  if (wanted == "host") return PortWindows{false, false, "WEFT_PORT_WINDOWS=host"};
  const std::string unreached = first_refusal(refusals);
  const std::string whole = hosts_store_words ? first_refusal(undivided) : "";
  if (wanted == "device" && !(unreached + whole).empty())
    return Status::make(Code::kUnsupported, "WEFT_PORT_WINDOWS=device: {}",
                        whole.empty() ? unreached : whole);
  if (!whole.empty()) return PortWindows{false, false, whole};
  if (!unreached.empty()) return PortWindows{false, hosts_store_words, unreached};
  return PortWindows{true, hosts_store_words, "the network reaches them on every rank"};
}

}  // namespace weft
