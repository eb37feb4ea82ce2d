// SPDX-License-Identifier: Apache-2.0
#include "moe/two_level.h"

#include <cstring>

#include "memory/device_memory.h"
#include "moe/buffer.h"

namespace weft {

Result<IslandPlan> meet_islands(Communicator& comm, bool each_alone) {
  std::vector<uint64_t> mine((static_cast<size_t>(comm.size()) + 63) / 64, 0);
  for (const int rank : each_alone ? std::vector<int>{comm.rank()} : comm.mapped_ranks())
    mine[static_cast<size_t>(rank) / 64] |= uint64_t{1} << (rank % 64);
  WEFT_TRY_ASSIGN(const auto mapped, comm.show("moe.islands", mine));
  return plan_islands(mapped);
}

Status TwoLevel::write_tables(Window& window) const {
  std::vector<uint32_t> words;
  for (const auto* part :
       {&islands_.island, &islands_.place, &islands_.members, &islands_.first, &served_, &numbers_})
    words.insert(words.end(), part->begin(), part->end());
  std::byte* at = window.local() + control_.tables;
  const Device device = window.communicator()->device();
  if (!device.is_host())
    return copy_to_device(device.ordinal, at, words.data(), words.size() * sizeof(uint32_t));
  std::memcpy(at, words.data(), words.size() * sizeof(uint32_t));
  return {};
}

Islands TwoLevel::tables(const Window& window) const {
  Islands is{};
  const size_t ranks = islands_.island.size();
  is.island = reinterpret_cast<const uint32_t*>(window.local() + control_.tables);
  is.place = is.island + ranks;
  is.members = is.place + ranks;
  is.first = is.members + ranks;
  is.served = is.first + islands_.first.size();
  is.number = is.served + served_.size();
  is.count = islands_.count;
  is.widest = islands_.widest;
  is.served_count = static_cast<uint32_t>(served_.size());
  is.batches = control_.batches;
  return is;
}

TwoLevelRoutes TwoLevel::routes(const HandleMemory& memory, uint32_t tokens) const {
  if (!memory.routes) return {};
  return routes_in(memory.routes, memory.records, tokens, islands_.island.size(), islands_.count,
                   islands_.widest, control_.batches, memory.sum_place != nullptr);
}

uint64_t TwoLevel::route_words(uint64_t tokens, bool is_ordered) const {
  return weft::route_words(tokens, islands_.island.size(), islands_.count, islands_.widest, control_.batches,
                           is_ordered);
}

Status TwoLevel::fits(uint64_t row_bytes, uint64_t scale_words, uint64_t top_k) const {
  const uint64_t beside = message_form(0, scale_words, top_k, islands_.widest).stride;
  const uint64_t room = control_.offsets.slot_bytes;
  if (row_bytes + beside <= room) return {};
  return Status::invalid(
      "x: got rows of {} bytes, allowed: up to {} among ranks that do not all map each other", row_bytes,
      room - beside);
}

// Within the island rows go to their final places, or back to the hub of their source. To and from hubs, messages.
std::vector<std::pair<uint32_t, uint64_t>> TwoLevel::rows_sent(const HandleMemory& memory, uint32_t tokens,
                                                               bool comes_back) const {
  std::vector<std::pair<uint32_t, uint64_t>> sent;
  const auto ranks = static_cast<uint32_t>(islands_.island.size());
  const uint32_t own = islands_.island[rank_];
  const int32_t* pairs = routes(memory, tokens).pairs;
  const auto rows = [&](uint32_t from, uint32_t to) {
    return rows_between(memory.prefix, static_cast<int>(ranks), static_cast<int>(from), static_cast<int>(to));
  };
  const auto messages = [&](uint32_t source, uint32_t island) {
    return static_cast<uint64_t>(pairs[source * islands_.count + island]);
  };
  for (uint32_t source = 0; comes_back && source < ranks; ++source) {
    const uint32_t hub = islands_.hub(source, own);
    if (hub != rank_) sent.emplace_back(hub, rows(source, rank_));
    if (hub == rank_ && source != rank_) sent.emplace_back(source, messages(source, own));
  }
  for (uint32_t island = 0; !comes_back && island < islands_.count; ++island)
    if (island != own) sent.emplace_back(islands_.hub(rank_, island), messages(rank_, island));
  for (uint32_t i = islands_.first[own]; !comes_back && i < islands_.first[own + 1]; ++i)
    if (islands_.members[i] != rank_)
      sent.emplace_back(islands_.members[i], rows(rank_, islands_.members[i]));
  return sent;
}

}  // namespace weft
