// SPDX-License-Identifier: Apache-2.0
#include "collective/runner_parts.h"
#include "jit/mesh_launch.h"
#include "kernels/collective/element.cuh"

namespace weft {
namespace {

constexpr char kExchangeFile[] = "kernels/collective/exchange.cuh";
constexpr const char* kWayNames[] = {"an exchange by lines", "an exchange in place", "an exchange by stages"};

}  // namespace

Status CollectiveRunner::exchange(const ExchangeCall& call) {
  WEFT_TRY(fault());
  if (call.part_elems == 0) return {};
  WEFT_TRY_ASSIGN(const PlannedExchange planned, plan(call));
  return run(planned, call.input, call.output, call.stream);
}

Result<CollectiveRunner::PlannedExchange> CollectiveRunner::plan(const ExchangeCall& call) const {
  if (exchange_.blocks == 0)
    return Status::make(Code::kUnsupported, "exchange: this communicator has none, allowed: programs{}",
                        rings_.has_outbox ? "; " + comm_->why_not_all_mapped() : "");
  const auto ranks = static_cast<uint32_t>(comm_->size());
  const bool adds = call.kind == Exchange::kAllReduce || call.kind == Exchange::kReduceScatter;
  PlannedExchange planned{};
  ExchangeArgs& args = planned.args;
  args.bytes = call.part_elems * element_bytes(call.element);
  args.is_one_shot = call.is_one_shot;
  args.way = call.way == ExchangeWay::kPlaces && args.bytes % 16 != 0 ? ExchangeWay::kStages : call.way;
  args.windows = direct_->at<std::byte* const*>(
      direct_tables(static_cast<uint64_t>(ranks), comm_->device().is_host()).windows_at);
  args.states = exchange_states_->at<ExchangeState>(0);
  args.layout = exchange_;
  const ExchangePlan plan = plan_exchange({call.kind, args.bytes, ranks, call.is_one_shot, args.way},
                                          exchange_, call.num_sms, limits_);
  args.slice_units = plan.slice_units;
  args.stage_slice_units = plan.stage_slice_units;
  args.piece_bytes = plan.piece_bytes;
  args.pipe_warps = plan.pipe_warps;
  args.digest = CallDigest()
                    .add(static_cast<uint64_t>(call.kind) << 32 | static_cast<uint64_t>(call.element) << 16 |
                         (adds ? static_cast<uint64_t>(call.reduction) : 0))
                    .add(call.part_elems)
                    .add(static_cast<uint64_t>(args.way) << 1 | (call.is_one_shot ? 1 : 0))
                    .add(uint64_t{plan.grid.blocks} << 32 | plan.slice_units)
                    .add(uint64_t{plan.stage_slice_units} << 32 | plan.piece_bytes)
                    .value();
  CallRecord& record = planned.record;
  record.digest = args.digest;
  record.count = call.part_elems;
  record.element = call.element;
  if (adds) record.reduction = static_cast<int32_t>(call.reduction);
  set_name(record, kExchangeNames[static_cast<uint32_t>(call.kind)],
           kWayNames[static_cast<uint32_t>(args.way)]);
  planned.facts = {args.bytes, call.part_elems, static_cast<int32_t>(call.element)};
  // An all-reduce in two phases sends each rank its part of the sum, then everyone the own one.
  const bool has_two_phases = call.kind == Exchange::kAllReduce && !call.is_one_shot;
  const uint64_t each = has_two_phases ? 2 * args.bytes / ranks : args.bytes;
  for (int peer = 0; peer < comm_->size(); ++peer)
    if (peer != comm_->rank()) planned.bytes_sent.push_back({peer, each});

  planned.shape = {static_cast<int64_t>(call.kind), adds ? static_cast<int64_t>(call.element) : 0,
                   adds ? static_cast<int64_t>(call.reduction) : 0, ranks};
  planned.how = launch_of(plan.grid);
  KernelKey key{kExchangeFile, "run_exchange", "ExchangeArgs"};
  key.shape = {{"exchange", planned.shape.exchange},
               {"element", planned.shape.element},
               {"reduction", planned.shape.reduction},
               {"ranks", planned.shape.ranks}};
  WEFT_TRY_ASSIGN(planned.kernel, kernel_on_mesh(*window_, std::move(key), planned.how));
  return planned;
}

Status CollectiveRunner::run(const PlannedExchange& planned, std::byte* input, std::byte* output,
                             void* stream) {
  count_sent(planned.bytes_sent);
  return tally_.count(*exchanges_[planned.shape.exchange], planned.facts,
                      [&] { return start(planned, input, output, stream); });
}

Status CollectiveRunner::start(const PlannedExchange& planned, std::byte* input, std::byte* output,
                               void* stream) {
  WEFT_TRY(fault());
  if (!links_.empty()) return Status::invalid("an exchange, allowed: programs, while links are delayed");
  last_program_ = kExchangeNames[planned.shape.exchange];
  WEFT_TRY(bring_up_windows());
  ExchangeArgs args = planned.args;
  args.wait = wait_rule();
  args.input = input;
  args.output = output;
  const bool is_aligned = (reinterpret_cast<uint64_t>(input) | reinterpret_cast<uint64_t>(output)) % 16 == 0;
  if (args.way == ExchangeWay::kPlaces && is_aligned) {
    args.places[0] = descriptor(input, &args.own_windows[0]);
    args.places[1] = descriptor(output, &args.own_windows[1]);
  }
  board_->post(planned.record);
  WEFT_TRY(compare_calls());
  return launch(*planned.kernel, planned.how, &args, sizeof(args), &planned.shape, stream);
}

// Where peers find a buffer, as in a descriptor; sets the table of base addresses there.
uint64_t CollectiveRunner::descriptor(std::byte* memory, std::byte* const** bases) const {
  const Communicator::WindowPlace found = find_place(memory);
  if (found.number >= kMaxWindows)
    *bases = addresses_.table(found.number);
  else if (found.number >= 0 && static_cast<size_t>(found.number) < known_windows_.size())
    *bases = known_windows_[static_cast<size_t>(found.number)];  // which direct_ holds already
  const bool fits =
      *bases && found.offset % 16 == 0 && found.offset / 16 < uint64_t{1} << kDescriptorOffsetBits;
  return fits ? (static_cast<uint64_t>(found.number) + 1) << kDescriptorOffsetBits | found.offset / 16 : 0;
}

}  // namespace weft
