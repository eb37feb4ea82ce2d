// SPDX-License-Identifier: Apache-2.0
//
// weft._core.plan_experts: what calls over nodes send, and how long they take on paper.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bind/bind.h"
#include "plan/expert_traffic.h"

namespace weft {
namespace {

namespace nb = nanobind;

void add_times(nb::dict& dict, const TrafficPhase& phase) {
  dict["us"] = phase.in_gpu.us;
  dict["bound"] = to_string(phase.in_gpu.bound);
  dict["host_us"] = phase.in_host.us;
  dict["host_bound"] = to_string(phase.in_host.bound);
}

nb::dict to_dict(const TrafficPhase& phase, const GridPlan& grid, uint32_t batch_warps) {
  nb::dict dict;
  dict["blocks"] = grid.blocks;
  dict["threads_per_block"] = grid.threads_per_block;
  dict["row_warps"] = grid.first_role.count;
  dict["other_warps"] = grid.second_role.count;
  dict["watch_warps"] = grid.watch_role.count;
  dict["batch_warps"] = batch_warps;
  dict["mapped_bytes"] = phase.mapped_bytes;
  dict["network_bytes"] = phase.network_bytes;
  dict["puts"] = phase.num_puts;
  dict["chunk_bytes"] = phase.chunk_bytes;
  add_times(dict, phase);
  return dict;
}

void add_ways(nb::dict phase, const FanOut& ways) {
  for (const auto& [name, way] :
       {std::pair{"per_rank", &ways.per_rank}, std::pair{"per_node", &ways.per_node}}) {
    nb::dict of_way;
    of_way["network_bytes"] = way->network_bytes;
    of_way["puts"] = way->num_puts;
    add_times(of_way, *way);
    phase[name] = of_way;
  }
  phase["fan_out"] = ways.is_per_domain() ? "node" : "direct";
}

nb::dict plan_experts(bool is_low_latency, const nb::dict& shape, const nb::dict& machine) {
  const auto count = [](const nb::dict& from, const char* name) { return nb::cast<uint32_t>(from[name]); };
  const auto figure = [&](const char* name) { return nb::cast<double>(machine[name]); };
  const ExpertTrafficShape asked{count(shape, "nodes"),       count(shape, "ranks_per_node"),
                                 count(shape, "tokens"),      count(shape, "top_k"),
                                 count(shape, "experts"),     count(shape, "row_bytes"),
                                 count(shape, "scale_bytes"), count(shape, "result_bytes")};
  const MachineFigures figures{{figure("mapped_gb_s"), figure("network_gb_s"), figure("mapped_latency_us"),
                                figure("network_latency_us"), figure("million_puts_per_s"),
                                figure("pcie_gb_s"), figure("pcie_latency_us")},
                               {true, count(machine, "sms"), 1, count(machine, "shared_bytes")},
                               nb::cast<int>(machine["nvlinks"]),
                               nb::cast<int>(machine["compute_major"])};
  const ExpertTraffic traffic = value_or_throw(is_low_latency ? plan_low_latency_traffic(asked, figures)
                                                              : plan_high_throughput_traffic(asked, figures));
  nb::dict dict;
  dict["sms"] = traffic.sms;
  dict["piece_bytes"] = traffic.piece_bytes;
  dict["batches"] = traffic.batches;
  dict["inbox_bytes"] = traffic.inbox_bytes;
  dict["dispatch"] = to_dict(traffic.dispatch, traffic.dispatch_grid, traffic.dispatch_batch_warps);
  dict["combine"] = to_dict(traffic.combine, traffic.combine_grid, traffic.combine_batch_warps);
  if (!is_low_latency) return dict;
  add_ways(nb::cast<nb::dict>(dict["dispatch"]), traffic.dispatch_ways);
  add_ways(nb::cast<nb::dict>(dict["combine"]), traffic.combine_ways);
  return dict;
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def("plan_experts", &plan_experts);
}

}  // namespace weft
