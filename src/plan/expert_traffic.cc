// SPDX-License-Identifier: Apache-2.0
#include "plan/expert_traffic.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "plan/low_latency.h"
#include "plan/two_level.h"

namespace weft {
namespace {

// The chance that one of `top_k` different experts is one of `owned`.
double chance(uint32_t owned, uint32_t experts, uint32_t top_k) {
  double missed = 1;
  for (uint32_t k = 0; k < top_k; ++k)
    missed *= std::max(0.0, static_cast<double>(experts) - owned - k) / (experts - k);
  return 1 - missed;
}

// Chances that a token goes to a rank, and to a node: the mean over all, as the last ones may own fewer experts.
struct Chances {
  double rank = 0;
  double node = 0;
};
Chances chances_of(const ExpertTrafficShape& shape) {
  const uint32_t ranks = shape.nodes * shape.ranks_per_node;
  const uint32_t each = (shape.experts + ranks - 1) / ranks;
  const auto owned_before = [&](uint32_t rank) {
    return static_cast<uint32_t>(std::min<uint64_t>(uint64_t{rank} * each, shape.experts));
  };
  Chances mean;
  for (uint32_t rank = 0; rank < ranks; ++rank)
    mean.rank += chance(owned_before(rank + 1) - owned_before(rank), shape.experts, shape.top_k) / ranks;
  for (uint32_t node = 0; node < shape.nodes; ++node) {
    const uint32_t first = node * shape.ranks_per_node;
    const uint32_t owned = owned_before(first + shape.ranks_per_node) - owned_before(first);
    mean.node += chance(owned, shape.experts, shape.top_k) / shape.nodes;
  }
  return mean;
}

Status check(const ExpertTrafficShape& shape) {
  if (shape.nodes == 0 || shape.ranks_per_node == 0 || shape.tokens == 0)
    return Status::invalid("nodes, ranks_per_node, tokens: got {}, {}, {}, allowed: 1 or more", shape.nodes,
                           shape.ranks_per_node, shape.tokens);
  if (shape.top_k == 0 || shape.top_k > shape.experts)
    return Status::invalid("top_k: got {}, allowed: 1 to the {} experts", shape.top_k, shape.experts);
  if (shape.row_bytes == 0 || shape.row_bytes % 16 != 0 || shape.result_bytes % 16 != 0)
    return Status::invalid("hidden: got rows of {} and {} bytes, allowed: multiples of 16", shape.row_bytes,
                           shape.result_bytes);
  return Status();
}

// Fills in how long a phase takes. `mapped_trips`, `network_trips`: what one after another waits for.
void time_phase(TrafficPhase& phase, const LinkFigures& machine, double mapped_trips, double network_trips) {
  const auto us = [](uint64_t bytes, double gb_s) { return static_cast<double>(bytes) / gb_s / 1e3; };
  const double latency =
      mapped_trips * machine.mapped_latency_us + network_trips * machine.network_latency_us;
  const std::pair mapped{us(phase.mapped_bytes, machine.mapped_gb_s), Bound::kMapped};
  const std::pair network{us(phase.network_bytes, machine.network_gb_s), Bound::kNetwork};
  const std::pair posting{static_cast<double>(phase.num_puts) / machine.million_puts_per_s, Bound::kPuts};
  const std::pair pcie{us(phase.network_bytes, machine.pcie_gb_s), Bound::kPcie};
  const auto time = [](double steps, const std::pair<double, Bound>& longest) {
    return PhaseTime{steps + longest.first, longest.first < steps ? Bound::kLatency : longest.second};
  };
  phase.in_gpu = time(latency, std::max({mapped, network, posting}));
  // The sender stores over PCIe before a trip, and the receiver reads after it.
  const double crossings = 2 * network_trips * machine.pcie_latency_us;
  phase.in_host = time(latency + crossings, std::max({mapped, network, posting, pcie}));
}

uint64_t whole(double count) {
  return static_cast<uint64_t>(std::llround(count));
}

// Puts of `messages` to one domain, dealt over batches, as many to a slot as fit: every batch ends with one.
uint64_t ring_puts(double messages, uint32_t batches, uint64_t per_slot) {
  const double of_batch = messages / batches / static_cast<double>(per_slot);
  return batches * std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(of_batch)));
}

}  // namespace

const char* to_string(Bound bound) {
  switch (bound) {
    case Bound::kLatency:
      return "latency";
    case Bound::kMapped:
      return "mapped links";
    case Bound::kNetwork:
      return "network";
    case Bound::kPcie:
      return "PCIe";
    case Bound::kPuts:
      return "puts";
  }
  return "?";
}

Result<ExpertTraffic> plan_high_throughput_traffic(const ExpertTrafficShape& shape,
                                                   const MachineFigures& machine) {
  WEFT_TRY(check(shape));
  const Chances to = chances_of(shape);
  const uint32_t ranks = shape.nodes * shape.ranks_per_node, others = shape.nodes - 1;
  ExpertTraffic traffic{};
  traffic.sms = plan_num_sms(machine.nvlinks, machine.compute_major, machine.limits);
  traffic.piece_bytes = plan_piece_bytes(shape.row_bytes);
  const uint32_t result_piece = plan_combine_piece_bytes(shape.result_bytes);
  // Rows that a rank stores to ranks of its node: its own tokens', and those that it forwards.
  const double stored = double(shape.tokens) * shape.nodes * (shape.ranks_per_node - 1) * to.rank;
  const uint64_t beside = shape.scale_bytes + uint64_t{8} * shape.top_k;
  traffic.dispatch.mapped_bytes = whole(stored * static_cast<double>(shape.row_bytes + beside));
  traffic.combine.mapped_bytes =
      whole(stored * static_cast<double>(shape.result_bytes + uint64_t{4} * shape.top_k));
  if (others == 0) {
    traffic.dispatch_grid = plan_dispatch(ranks, traffic.piece_bytes, traffic.sms, machine.limits);
    const uint32_t combine_sms =
        plan_combine_num_sms(traffic.sms, ranks, machine.compute_major, machine.limits);
    traffic.combine_grid = plan_combine(ranks, result_piece, combine_sms, machine.limits);
    time_phase(traffic.dispatch, machine, 2, 0);
    time_phase(traffic.combine, machine, 1, 0);
    return traffic;
  }

  DomainPlan domains;  // as plan_domains() would find them, without the matrix of who maps whom
  domains.domain.resize(ranks);
  domains.count = shape.nodes;
  domains.widest = shape.ranks_per_node;
  domains.most_sources = others;
  const HighThroughputControl control = plan_control(ranks, shape.nodes);
  const TwoLevelControl rings =
      plan_two_level(control.end, control.offsets.record_words, domains, machine.limits);
  const TwoLevelGrid dispatch = plan_two_level_dispatch(ranks, domains, rings.batches, traffic.piece_bytes,
                                                        traffic.sms, machine.limits);
  const TwoLevelGrid combine = plan_two_level_combine(domains, rings.batches, traffic.sms, machine.limits);
  traffic.dispatch_grid = dispatch.grid;
  traffic.combine_grid = combine.grid;
  traffic.dispatch_batch_warps = dispatch.batch_warps.count;
  traffic.combine_batch_warps = combine.batch_warps.count;
  traffic.batches = rings.batches;
  traffic.inbox_bytes = rings.end - control.end;

  const double crossing = shape.tokens * to.node;  // tokens for one other node
  const ForwardLayout layout =
      forward_layout(shape.row_bytes, shape.scale_bytes / 4, shape.top_k, shape.ranks_per_node);
  const uint64_t strides[] = {layout.stride, sum_stride(shape.result_bytes, shape.top_k)};
  TrafficPhase* const phases[] = {&traffic.dispatch, &traffic.combine};
  for (int i = 0; i < 2; ++i) {
    const uint64_t per_slot = rings.offsets.slot_bytes / strides[i];
    if (per_slot == 0)
      return Status::invalid("hidden: got rows that take {} bytes on the network, allowed: {} at most",
                             strides[i], rings.offsets.slot_bytes);
    phases[i]->network_bytes = whole(crossing * others * static_cast<double>(strides[i]));
    phases[i]->num_puts = others * ring_puts(crossing, rings.batches, per_slot);
    phases[i]->chunk_bytes = per_slot * strides[i];
  }
  time_phase(traffic.dispatch, machine, 1, 2);  // counts go first
  time_phase(traffic.combine, machine, 1, 1);
  return traffic;
}

FanOut plan_low_latency_fan_out(const ExpertTrafficShape& shape, const LinkFigures& links) {
  const Chances to = chances_of(shape);
  const double near = shape.ranks_per_node - 1.0, others = shape.nodes - 1.0;
  const MessageLayout message = message_layout(shape.top_k, false, shape.row_bytes, shape.scale_bytes);
  const auto bytes = static_cast<double>(message.bytes), stride = static_cast<double>(message.stride);
  const Batches batches = others > 0 ? port_batches_of(shape.tokens) : Batches{0, 0};
  const uint64_t far = uint64_t{shape.nodes - 1} * shape.ranks_per_node;
  const double to_rank = shape.tokens * to.rank, to_node = shape.tokens * to.node;
  const uint64_t near_bytes = whole(to_rank * near * bytes);
  // Slots of ports travel whole.
  const uint64_t chunk = batches.capacity * message.stride;
  FanOut made{{near_bytes, whole(to_rank * static_cast<double>(far) * stride), far * batches.count, chunk},
              // Rows that came once for a node go on to its other ranks over mapped links.
              {near_bytes + whole(to_rank * others * near * bytes), whole(to_node * others * stride),
               uint64_t{shape.nodes - 1} * batches.count, chunk}};
  time_phase(made.per_rank, links, far ? 0 : 1, far ? 1 : 0);
  time_phase(made.per_node, links, 1, far ? 1 : 0);
  return made;
}

// The owner's notes go to each rank, with the weights of its tokens, whichever way replies come.
FanOut plan_low_latency_reply_fan_out(const ExpertTrafficShape& shape, const LinkFigures& links) {
  const Chances to = chances_of(shape);
  const double near = shape.ranks_per_node - 1.0, others = shape.nodes - 1.0;
  const Batches batches = others > 0 ? port_batches_of(shape.tokens) : Batches{0, 0};
  const uint64_t far = uint64_t{shape.nodes - 1} * shape.ranks_per_node;
  const auto bytes = static_cast<double>(shape.result_bytes);
  const double of_rank = shape.tokens * to.rank, of_node = shape.tokens * to.node;
  const NoteLayout note = note_layout(batches, shape.tokens, shape.top_k);
  const uint64_t notes = far * note.bytes, near_bytes = whole(of_rank * near * bytes);
  const uint64_t chunk = batches.capacity * shape.result_bytes;
  // Each put of a note, and those of replies.
  FanOut made{{near_bytes, notes + whole(of_rank * static_cast<double>(far) * bytes),
               far * (1 + batches.count), chunk},
              // What goes to a rail peer's window in the domain goes over mapped links.
              {near_bytes + whole(of_rank * others * near * bytes), notes + whole(of_node * others * bytes),
               far + uint64_t{shape.nodes - 1} * batches.count, chunk}};
  time_phase(made.per_rank, links, far ? 0 : 1, far ? 1 : 0);
  time_phase(made.per_node, links, 1, far ? 1 : 0);
  return made;
}

Result<ExpertTraffic> plan_low_latency_traffic(const ExpertTrafficShape& shape,
                                               const MachineFigures& machine) {
  WEFT_TRY(check(shape));
  const uint32_t ranks = shape.nodes * shape.ranks_per_node, far = ranks - shape.ranks_per_node;
  LowLatencySizes sizes{};
  sizes.ranks = ranks;
  sizes.max_tokens = shape.tokens;
  sizes.top_k = shape.top_k;
  sizes.experts = shape.experts;
  sizes.has_ports = far != 0;
  const auto row_bytes = static_cast<int64_t>(shape.row_bytes);
  const LowLatencyDispatchShape dispatch{
      ranks, sizes.experts_per_rank(), shape.top_k, row_bytes, static_cast<int64_t>(shape.scale_bytes), 0, 0,
      0};
  LowLatencyCombineShape combine{};
  combine.ranks = ranks;
  combine.experts_per_rank = sizes.experts_per_rank();
  combine.top_k = shape.top_k;
  combine.row_bytes = static_cast<int64_t>(shape.result_bytes);
  combine.reply = kReplyReduced;
  const LowLatencyPlan plans[] = {plan_low_latency_dispatch(sizes, dispatch, machine.limits),
                                  plan_low_latency_combine(sizes, combine, shape.tokens, machine.limits)};

  ExpertTraffic traffic{};
  traffic.sms = plans[0].blocks;
  for (int i = 0; i < 2; ++i) {
    GridPlan& grid = i == 0 ? traffic.dispatch_grid : traffic.combine_grid;
    grid.blocks = plans[i].blocks;
    grid.threads_per_block = plans[i].threads_per_block;
    grid.shared_bytes = plans[i].shared_bytes;
  }
  traffic.piece_bytes = static_cast<uint32_t>(shape.row_bytes);
  const Batches batches = sizes.batches();
  traffic.batches = far ? batches.count : 0;
  if (far)
    traffic.inbox_bytes =
        low_latency_region_bytes(ranks, std::max(plans[0].word_bytes, plans[1].word_bytes), true);

  traffic.dispatch_ways = plan_low_latency_fan_out(shape, machine);
  traffic.combine_ways = plan_low_latency_reply_fan_out(shape, machine);
  traffic.dispatch = traffic.dispatch_ways.shorter();
  traffic.combine = traffic.combine_ways.shorter();
  return traffic;
}

}  // namespace weft
