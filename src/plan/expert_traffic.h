// SPDX-License-Identifier: Apache-2.0
//
// What a mean dispatch or combine over nodes does and how long it takes on paper: grid, chunks, bytes, puts, time.
//   const ExpertTraffic traffic = plan_high_throughput_traffic(shape, machine);
//   traffic.dispatch.us, traffic.dispatch.bound
// Tokens choose different experts with equal chances. Decisions are those of the planners that calls use; the time is
// the largest of what each link and each rail's puts take, and the latency of what must come before. Nothing else that
// a kernel does is in it, so that calls take longer. Pure functions: no device, no environment, no clock.
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
struct MachineFigures {
  ComputeLimits limits;
  int nvlinks;
  int compute_major;
  double mapped_gb_s;
  double network_gb_s;
  double mapped_latency_us;
  double network_latency_us;  // a put with signal until the peer sees it
  double million_puts_per_s;
};

enum class Bound { kLatency, kMapped, kNetwork, kPuts };
const char* to_string(Bound bound);

// What one rank sends in one direction.
struct TrafficPhase {
  uint64_t mapped_bytes;
  uint64_t network_bytes;
  uint64_t num_puts;
  uint64_t chunk_bytes;  // of the largest put
  double us;
  Bound bound;  // what takes longest
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
  // Low latency: what dispatch would send, a row for each (token, node) instead of (token, rank).
  uint64_t per_node_bytes;
  double per_node_us;
};

// Errors: kInvalid naming what is 0 or does not fit.
Result<ExpertTraffic> plan_high_throughput_traffic(const ExpertTrafficShape& shape,
                                                   const MachineFigures& machine);
Result<ExpertTraffic> plan_low_latency_traffic(const ExpertTrafficShape& shape,
                                               const MachineFigures& machine);

}  // namespace weft
