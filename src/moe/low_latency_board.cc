// SPDX-License-Identifier: Apache-2.0
//
// The board of a LowLatency (low_latency_watch.cuh), and what stands there or in the window: who carries tokens to a node.
#include <algorithm>

#include "memory/device_memory.h"
#include "moe/low_latency.h"

namespace weft {
namespace {

// LowLatencyControl::carriers.
std::vector<uint32_t> carriers_of(const DomainPlan& domains, uint32_t ranks, uint32_t rank) {
  std::vector<uint32_t> carriers(uint64_t{kCarrierTables} * ranks);
  const auto entry = [&](CarrierTable table, uint32_t of) -> uint32_t& {
    return carriers[table * ranks + of];
  };
  const uint32_t own = domains.domain[rank];
  for (uint32_t peer = 0; peer < ranks; ++peer) {
    const uint32_t theirs = domains.domain[peer];
    const bool is_near = theirs == own;
    entry(kCarrierTo, peer) = is_near ? peer : domains.rail_peer(rank, theirs);
    entry(kCarrierFrom, peer) = is_near ? rank : domains.rail_peer(peer, own);
    entry(kCarriedNumber, peer) = kNotCarried;
    entry(kPlaceInNode, peer) = domains.place[peer];
  }
  for (uint32_t place = 0; place < domains.size(own); ++place) {
    const uint32_t near = domains.members[domains.first[own] + place];
    entry(kRankOfNode, place) = near;
    const std::vector<uint32_t> carried = domains.sources_of(near);
    for (uint32_t number = 0; number < carried.size(); ++number)
      entry(kCarriedNumber, carried[number]) = number;
  }
  return carriers;
}

}  // namespace

Result<std::shared_ptr<LocalMemory>> make_low_latency_board(const Communicator& comm, uint64_t region_bytes,
                                                            const DomainPlan& domains) {
  const auto ranks = static_cast<uint32_t>(comm.size());
  WEFT_TRY_ASSIGN(std::shared_ptr<LocalMemory> board,
                  LocalMemory::create(comm.device(), low_latency_board_bytes(ranks, region_bytes)));
  if (domains.count == 0) return board;
  const std::vector<uint32_t> carriers = carriers_of(domains, ranks, static_cast<uint32_t>(comm.rank()));
  WEFT_TRY(board->write(low_latency_control(ranks).carriers, carriers.data(), carriers.size() * 4));
  return board;
}

std::byte* LowLatency::control() const {
  return terms_.board ? terms_.board->data() : window_->local() + begin_;
}

LowLatencyBoard LowLatency::board(uint64_t own_bytes) const {
  if (!has_board()) return {};
  if (!terms_.board) return {control(), nullptr, 0};
  const uint64_t control_end = low_latency_control(ranks()).end;
  const uint64_t half = (terms_.board->bytes() - control_end) / 2 / kLineBytes * kLineBytes;
  return {control(), own_bytes <= half ? control() + control_end : nullptr, half};
}

uint32_t* LowLatency::carriers() const {
  return reinterpret_cast<uint32_t*>(control() + low_latency_control(ranks()).carriers);
}

// Who makes a board writes them there. A buffer that serves no such calls has no region.
Status LowLatency::write_carriers() const {
  if (!has_ports() || terms_.board || terms_.domains.count == 0 || half_bytes() == 0) return {};
  const std::vector<uint32_t> made = carriers_of(terms_.domains, ranks(), rank());
  const Device device = comm_->device();
  if (!device.is_host())
    return copy_to_device(device.ordinal, reinterpret_cast<std::byte*>(carriers()), made.data(),
                          made.size() * sizeof(uint32_t));
  std::copy(made.begin(), made.end(), carriers());
  return {};
}

}  // namespace weft
