// SPDX-License-Identifier: Apache-2.0
//
// The work of an average dispatch or combine over nodes, and its predicted time: grid, chunks, bytes, puts,
// microseconds.
//   const ExpertTraffic traffic = plan_high_throughput_traffic(shape, machine);
//   traffic.dispatch.in_gpu.us, traffic.dispatch.in_gpu.bound
// Tokens choose different experts with equal chances. Decisions are those of the planners that calls use. The time is
// the longest of the times of each link and of each rail's puts, plus the latency of earlier steps. It leaves out all
// other work of a kernel, so calls take longer. Pure functions: no device, no environment, no clock.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "plan/high_throughput.h"

namespace weft {

// R = nodes * ranks_per_node ranks; those of a node map each other, all others are behind ports.
struct ExpertTrafficShape {
  uint32_t nodes;
  uint32_t ranks_per_node;
  uint32_t tokens;  // of each rank
  uint32_t top_k;
  uint32_t experts;
  uint64_t row_bytes;     // dispatch, a multiple of 16
  uint64_t scale_bytes;   // beside a row, a multiple of 4
  uint64_t result_bytes;  // combine's rows, a multiple of 16
};

// Of one rank. Rates are in 10^9 bytes and 10^6 puts per second.
struct LinkFigures {
  double mapped_gb_s;
  double network_gb_s;
  double mapped_latency_us;
  double network_latency_us;  // a put with signal until the peer sees it
  double million_puts_per_s;
  // Between a GPU and memory of its host, in each direction.
  double pcie_gb_s = 1e6;
  double pcie_latency_us = 0;
};
struct MachineFigures : LinkFigures {
  ComputeLimits limits;
  int nvlinks;
  int compute_major;
};

enum class Bound { kLatency, kMapped, kNetwork, kPcie, kPuts };
const char* to_string(Bound bound);

struct PhaseTime {
  double us = 0;
  Bound bound = Bound::kLatency;  // what takes longest
};

// The traffic that one rank sends in one direction.
struct TrafficPhase {
  uint64_t mapped_bytes;
  uint64_t network_bytes;
  uint64_t num_puts;
  uint64_t chunk_bytes;  // of the largest put
  // Where what ports write lies in memory of the GPU, and where it lies in memory of the host, so that kernels store
  // and read it over PCIe.
  PhaseTime in_gpu = {}, in_host = {};
};

// Low latency may send a row once for each (token, rank), or once for each (token, node): a dispatch's rows are then read
// there by the node's other ranks, and a combine's are gathered from them.
struct FanOut {
  TrafficPhase per_rank;
  TrafficPhase per_node;
  bool is_per_domain() const { return per_node.in_gpu.us < per_rank.in_gpu.us; }
  const TrafficPhase& shorter() const { return is_per_domain() ? per_node : per_rank; }
};

struct ExpertTraffic {
  uint32_t sms;
  GridPlan dispatch_grid;
  GridPlan combine_grid;
  uint32_t dispatch_batch_warps;  // of each SM: the network, high throughput over nodes only
  uint32_t combine_batch_warps;
  uint32_t piece_bytes;  // a row moves in pieces of these to mapped ranks; low latency: of a row
  uint32_t batches;      // over the network, each in an order of its own; 0 without
  uint64_t inbox_bytes;  // of a rank's window that the network writes, with the outbox that mirrors it
  TrafficPhase dispatch;
  TrafficPhase combine;
  FanOut dispatch_ways, combine_ways;  // low latency: dispatch and combine are the shorter ones
};

// Errors: kInvalid naming what is 0 or does not fit.
Result<ExpertTraffic> plan_high_throughput_traffic(const ExpertTrafficShape& shape,
                                                   const MachineFigures& machine);
Result<ExpertTraffic> plan_low_latency_traffic(const ExpertTrafficShape& shape,
                                               const MachineFigures& machine);
// The inputs by which calls decide their fan-out. If nodes differ, ranks_per_node is that of the widest. All ranks must
// give the same values.
FanOut plan_low_latency_fan_out(const ExpertTrafficShape& shape, const LinkFigures& links);        // dispatch
FanOut plan_low_latency_reply_fan_out(const ExpertTrafficShape& shape, const LinkFigures& links);  // combine

}  // namespace weft
