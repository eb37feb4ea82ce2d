// SPDX-License-Identifier: Apache-2.0
#include "moe/two_level.h"

#include <cstring>

#include "memory/device_memory.h"
#include "moe/buffer.h"

namespace weft {

Result<DomainPlan> agree_on_domains(Communicator& comm, bool single_rank_domains) {
  std::vector<uint64_t> mine((static_cast<size_t>(comm.size()) + 63) / 64, 0);
  for (const int rank : single_rank_domains ? std::vector<int>{comm.rank()} : comm.mapped_ranks())
    mine[static_cast<size_t>(rank) / 64] |= uint64_t{1} << (rank % 64);
  WEFT_TRY_ASSIGN(const auto mapped, comm.show("moe.domains", mine));
  return plan_domains(mapped);
}

Status TwoLevel::write_tables(Window& window) const {
  std::vector<uint32_t> words;
  for (const auto* part :
       {&domains_.domain, &domains_.place, &domains_.members, &domains_.first, &sources_, &numbers_})
    words.insert(words.end(), part->begin(), part->end());
  std::byte* at = window.local() + control_.tables;
  const Device device = window.communicator()->device();
  if (!device.is_host())
    return copy_to_device(device.ordinal, at, words.data(), words.size() * sizeof(uint32_t));
  std::memcpy(at, words.data(), words.size() * sizeof(uint32_t));
  return {};
}

Domains TwoLevel::tables(const Window& window) const {
  Domains tables{};
  const size_t ranks = domains_.domain.size();
  tables.domain = reinterpret_cast<const uint32_t*>(window.local() + control_.tables);
  tables.place = tables.domain + ranks;
  tables.members = tables.place + ranks;
  tables.first = tables.members + ranks;
  tables.sources = tables.first + domains_.first.size();
  tables.number = tables.sources + sources_.size();
  tables.count = domains_.count;
  tables.widest = domains_.widest;
  tables.source_count = static_cast<uint32_t>(sources_.size());
  tables.batches = control_.batches;
  return tables;
}

TwoLevelRoutes TwoLevel::routes(const HandleMemory& memory, uint32_t tokens) const {
  if (!memory.routes) return {};
  return routes_in(memory.routes, memory.records, tokens, domains_.domain.size(), domains_.count,
                   domains_.widest, control_.batches, memory.sum_place != nullptr);
}

uint64_t TwoLevel::route_words(uint64_t tokens, bool is_ordered) const {
  return weft::route_words(tokens, domains_.domain.size(), domains_.count, domains_.widest, control_.batches,
                           is_ordered);
}

Status TwoLevel::fits(uint64_t row_bytes, uint64_t scale_words, uint64_t top_k) const {
  const uint64_t beside = forward_layout(0, scale_words, top_k, domains_.widest).stride;
  const uint64_t room = control_.offsets.slot_bytes;
  if (row_bytes + beside <= room) return {};
  return Status::invalid(
      "x: got rows of {} bytes, allowed: up to {} among ranks that do not all map each other", row_bytes,
      room - beside);
}

// Within the domain rows go to their final places, or back to the rail peer of their source. Between rail peers go
// messages.
std::vector<std::pair<uint32_t, uint64_t>> TwoLevel::rows_sent(const HandleMemory& memory, uint32_t tokens,
                                                               bool comes_back) const {
  std::vector<std::pair<uint32_t, uint64_t>> sent;
  const auto ranks = static_cast<uint32_t>(domains_.domain.size());
  const uint32_t own = domains_.domain[rank_];
  const int32_t* pairs = routes(memory, tokens).pairs;
  const auto rows = [&](uint32_t from, uint32_t to) {
    return rows_between(memory.prefix, static_cast<int>(ranks), static_cast<int>(from), static_cast<int>(to));
  };
  const auto messages = [&](uint32_t source, uint32_t domain) {
    return static_cast<uint64_t>(pairs[source * domains_.count + domain]);
  };
  for (uint32_t source = 0; comes_back && source < ranks; ++source) {
    const uint32_t rail_peer = domains_.rail_peer(source, own);
    if (rail_peer != rank_) sent.emplace_back(rail_peer, rows(source, rank_));
    if (rail_peer == rank_ && source != rank_) sent.emplace_back(source, messages(source, own));
  }
  for (uint32_t domain = 0; !comes_back && domain < domains_.count; ++domain)
    if (domain != own) sent.emplace_back(domains_.rail_peer(rank_, domain), messages(rank_, domain));
  for (uint32_t i = domains_.first[own]; !comes_back && i < domains_.first[own + 1]; ++i)
    if (domains_.members[i] != rank_)
      sent.emplace_back(domains_.members[i], rows(rank_, domains_.members[i]));
  return sent;
}

}  // namespace weft
