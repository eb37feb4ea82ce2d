// SPDX-License-Identifier: Apache-2.0
//
// The control page of a LowLatency (low_latency_watch.cuh), and the rail tables there or in the window.
#include <algorithm>

#include "memory/device_memory.h"
#include "moe/low_latency.h"

namespace weft {
namespace {

// LowLatencyControl::rail_tables.
std::vector<uint32_t> rail_tables_of(const DomainPlan& domains, uint32_t ranks, uint32_t rank) {
  std::vector<uint32_t> tables(uint64_t{kRailTables} * ranks);
  const auto entry = [&](RailTable table, uint32_t of) -> uint32_t& { return tables[table * ranks + of]; };
  const uint32_t own = domains.domain[rank];
  for (uint32_t peer = 0; peer < ranks; ++peer) {
    const uint32_t theirs = domains.domain[peer];
    const bool is_near = theirs == own;
    entry(kRailPeerTo, peer) = is_near ? peer : domains.rail_peer(rank, theirs);
    entry(kRailPeerFrom, peer) = is_near ? rank : domains.rail_peer(peer, own);
    entry(kSourceNumber, peer) = kOwnDomain;
    entry(kPlaceInDomain, peer) = domains.place[peer];
  }
  for (uint32_t place = 0; place < domains.size(own); ++place) {
    const uint32_t near = domains.members[domains.first[own] + place];
    entry(kRankOfDomain, place) = near;
    const std::vector<uint32_t> sources = domains.sources_of(near);
    for (uint32_t number = 0; number < sources.size(); ++number)
      entry(kSourceNumber, sources[number]) = number;
  }
  return tables;
}

}  // namespace

Result<std::shared_ptr<LocalMemory>> make_low_latency_page(const Communicator& comm, uint64_t region_bytes,
                                                           const DomainPlan& domains) {
  const auto ranks = static_cast<uint32_t>(comm.size());
  WEFT_TRY_ASSIGN(std::shared_ptr<LocalMemory> page,
                  LocalMemory::create(comm.device(), low_latency_page_bytes(ranks, region_bytes)));
  if (domains.count == 0) return page;
  const std::vector<uint32_t> tables = rail_tables_of(domains, ranks, static_cast<uint32_t>(comm.rank()));
  WEFT_TRY(page->write(low_latency_control(ranks).rail_tables, tables.data(), tables.size() * 4));
  return page;
}

std::byte* LowLatency::control() const {
  return terms_.page ? terms_.page->data() : window_->local() + begin_;
}

LowLatencyPage LowLatency::page(uint64_t own_bytes) const {
  if (!has_page()) return {};
  if (!terms_.page) return {control(), nullptr, 0};
  const uint64_t control_end = low_latency_control(ranks()).end;
  const uint64_t half = (terms_.page->bytes() - control_end) / 2 / kLineBytes * kLineBytes;
  return {control(), own_bytes <= half ? control() + control_end : nullptr, half};
}

uint32_t* LowLatency::rail_tables() const {
  return reinterpret_cast<uint32_t*>(control() + low_latency_control(ranks()).rail_tables);
}

// Who makes a control page writes them there. A buffer that serves no such calls has no region.
Status LowLatency::write_rail_tables() const {
  if (!has_ports() || terms_.page || terms_.domains.count == 0 || half_bytes() == 0) return {};
  const std::vector<uint32_t> made = rail_tables_of(terms_.domains, ranks(), rank());
  const Device device = comm_->device();
  if (!device.is_host())
    return copy_to_device(device.ordinal, reinterpret_cast<std::byte*>(rail_tables()), made.data(),
                          made.size() * sizeof(uint32_t));
  std::copy(made.begin(), made.end(), rail_tables());
  return {};
}

}  // namespace weft
