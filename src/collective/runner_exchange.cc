// SPDX-License-Identifier: Apache-2.0
#include "collective/runner_parts.h"
#include "jit/mesh_launch.h"
#include "kernels/collective/element.cuh"

namespace weft {
namespace {

constexpr char kExchangeFile[] = "kernels/collective/exchange.cuh";
constexpr const char* kWayNames[] = {"an exchange by lines", "an exchange in place", "an exchange by stages"};

bool reduces(Exchange kind) {
  return kind == Exchange::kAllReduce || kind == Exchange::kReduceScatter || kind == Exchange::kReduce;
}

// Bytes that go from one rank to a peer, however they go.
uint64_t bytes_between(const ExchangeCall& call, const ExchangeArgs& args, uint32_t ranks, bool is_to_root,
                       bool is_from_root) {
  const uint64_t shared = args.bytes / exchange_owners(call.kind, ranks);
  const bool has_owners =
      args.way != ExchangeWay::kLines && ranks > 2;  // other ranks between root and others
  switch (call.kind) {
    case Exchange::kAllReduce:  // in two phases each rank gets its part of the sum, then everyone the own one
      return call.is_one_shot ? args.bytes : 2 * args.bytes / ranks;
    case Exchange::kBroadcast:
      if (has_owners) return is_to_root ? 0 : shared;
      return is_from_root ? args.bytes : 0;
    case Exchange::kReduce:
      if (has_owners) return shared;
      return is_to_root ? args.bytes : 0;
    case Exchange::kGather:
      return is_to_root ? args.bytes : 0;
    case Exchange::kScatter:
      return is_from_root ? args.bytes : 0;
    default:
      return args.bytes;
  }
}

}  // namespace

Status CollectiveRunner::exchange(const ExchangeCall& call) {
  if (call.part_elems == 0) {
    const Status why = fault();
    return why.ok() ? why : refused("a call without elements", why);
  }
  WEFT_TRY_ASSIGN(const PlannedExchange planned, plan(call));
  return run(planned, call.input, call.output, call.stream);
}

Result<CollectiveRunner::PlannedExchange> CollectiveRunner::plan(const ExchangeCall& call) const {
  if (exchange_.blocks == 0)
    return Status::make(Code::kUnsupported, "exchange: this communicator has none, allowed: programs{}",
                        rings_.has_outbox ? "; " + comm_->why_not_all_mapped() : "");
  const auto ranks = static_cast<uint32_t>(comm_->size());
  const bool adds = reduces(call.kind);
  if (has_root(call.kind) && (call.root < 0 || call.root >= comm_->size()))
    return Status::invalid("root: got {}, allowed: a rank of {}", call.root, ranks);
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
  args.root = has_root(call.kind) ? static_cast<uint32_t>(call.root) : 0;
  args.digest = CallDigest()
                    .add(static_cast<uint64_t>(call.kind) << 32 | static_cast<uint64_t>(call.element) << 16 |
                         (adds ? static_cast<uint64_t>(call.reduction) : 0))
                    .add(call.part_elems)
                    .add(static_cast<uint64_t>(args.way) << 1 | (call.is_one_shot ? 1 : 0))
                    .add(uint64_t{plan.grid.blocks} << 32 | plan.slice_units)
                    .add(uint64_t{plan.stage_slice_units} << 32 | plan.piece_bytes)
                    .add(args.root)
                    .value();
  CallRecord& record = planned.record;
  record.digest = args.digest;
  record.count = call.part_elems;
  record.element = call.element;
  if (adds) record.reduction = static_cast<int32_t>(call.reduction);
  if (has_root(call.kind)) record.root = call.root;
  set_name(record, kExchangeNames[static_cast<uint32_t>(call.kind)],
           kWayNames[static_cast<uint32_t>(args.way)]);
  planned.facts = {args.bytes, call.part_elems, static_cast<int32_t>(call.element)};
  for (int peer = 0; peer < comm_->size(); ++peer) {
    if (peer == comm_->rank()) continue;
    const uint64_t sent = bytes_between(call, args, ranks, peer == call.root, comm_->rank() == call.root);
    if (sent) planned.bytes_sent.push_back({peer, sent});
  }

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
  if (const Status why = fault(); !why.ok()) return refused(describe(planned.record), why);
  if (!links_.empty()) return Status::invalid("an exchange, allowed: programs, while links are delayed");
  last_program_ = kExchangeNames[planned.shape.exchange];
  WEFT_TRY(bring_up_windows());
  ExchangeArgs args = planned.args;
  args.wait = wait_rule();
  const auto kind = static_cast<Exchange>(planned.shape.exchange);
  if (has_root(kind) && args.root != static_cast<uint32_t>(comm_->rank())) {
    const bool is_from_root = kind == Exchange::kBroadcast || kind == Exchange::kScatter;
    (is_from_root ? input : output) = nullptr;
  }
  args.input = input;
  args.output = output;
  const bool is_aligned = (reinterpret_cast<uint64_t>(input) | reinterpret_cast<uint64_t>(output)) % 16 == 0;
  if (args.way == ExchangeWay::kPlaces && is_aligned) {
    args.places[0] = descriptor(input, &args.own_windows[0]);
    args.places[1] = descriptor(output, &args.own_windows[1]);
  }
  call_log_->post(planned.record);
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
