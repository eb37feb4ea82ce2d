// SPDX-License-Identifier: Apache-2.0
#include "moe/low_latency.h"

#include <algorithm>
#include <limits>

#include "base/config.h"
#include "jit/mesh_launch.h"
#include "moe/kernel_keys.h"
#include "moe/low_latency_call_word.h"
#include "moe/low_latency_known.h"
#include "topology/nvml.h"

namespace weft {
namespace {

constexpr double kMillionPutsPerS = 1;  // as `weft plan` takes it

Launch launch_of(const LowLatencyPlan& plan) {
  return {.blocks = plan.blocks,
          .threads_per_block = plan.threads_per_block,
          .shared_bytes = plan.shared_bytes,
          .blocks_per_cluster = plan.blocks_per_cluster};
}

PlannedCombine::Grid grid_of(const LowLatencyPlan& plan) {
  return {launch_of(plan), Divisor::of(plan.receive_splits), Divisor::of(plan.receive_splits / plan.pieces)};
}

BulkRows bulk_rows_of(const std::string& setting) {
  return setting == "auto" ? BulkRows::kPlanned : setting == "never" ? BulkRows::kNever : BulkRows::kAlways;
}

// The first id that is neither that of an expert nor from `least` to -1; -1 where all are good.
template <class Id>
int64_t wrong_id(const Id* ids, uint64_t count, int64_t experts, int64_t least) {
  for (uint64_t i = 0; i < count; ++i)
    if (ids[i] < least || ids[i] >= experts) return ids[i];
  return -1;
}

// Links other than NVLink may deliver a line in pieces.
bool loads_full_lines(const std::vector<RankFacts>& ranks) {
  for (const RankFacts& from : ranks)
    for (const RankFacts& to : ranks)
      if (from.host != to.host || (from.gpu != to.gpu && !is_nvlink_pair(from.gpu, to.gpu))) return false;
  return true;
}

// Of this rank, in thousandths of LinkFigures' units, so that ranks can show them; none: more than any.
std::vector<uint64_t> shown_links(Communicator& comm) {
  double mapped_gb_s = 1e6, network_gb_s = 1e6, mapped_us = 0, network_us = 0;
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    const Transport& transport = *comm.transport_to(peer);
    const Caps caps =
        transport.towards(transport.caps(comm.device()), comm.facts()[static_cast<size_t>(comm.rank())],
                          comm.facts()[static_cast<size_t>(peer)]);
    double& gb_s = caps.reach == Reach::kMapped ? mapped_gb_s : network_gb_s;
    double& us = caps.reach == Reach::kMapped ? mapped_us : network_us;
    gb_s = std::min(gb_s, caps.bandwidth_gb_s);
    us = std::max(us, caps.latency_us);
  }
  std::vector<uint64_t> shown;
  for (const double figure : {mapped_gb_s, network_gb_s, mapped_us, network_us})
    shown.push_back(static_cast<uint64_t>(figure * 1e3));
  return shown;
}

LinkFigures least_of(const std::vector<std::vector<uint64_t>>& shown) {
  std::vector<uint64_t> least = shown[0];
  for (const std::vector<uint64_t>& of_rank : shown)
    for (size_t i = 0; i < least.size(); ++i)
      least[i] = i < 2 ? std::min(least[i], of_rank[i]) : std::max(least[i], of_rank[i]);
  const auto figure = [&](size_t i) { return static_cast<double>(std::max<uint64_t>(least[i], 1)) / 1e3; };
  return {figure(0), figure(1), figure(2), figure(3), kMillionPutsPerS};
}

TallyCaller caller_of(const Window& window) {
  TallyCaller caller = window.communicator()->tally_caller();
  caller.key +=
      (uint64_t{1} << 32) + static_cast<uint64_t>(window.number());  // the buffer's own has no such bit
  return caller;
}

}  // namespace

Result<LowLatencyTerms> agree_on_low_latency(Communicator& comm, DomainPlan domains) {
  const int64_t wanted = config().low_latency_line_tokens;
  const bool is_valid = wanted >= -1 && wanted <= kMaxBatches;
  const bool may =
      comm.why_not_all_mapped().empty() && (comm.device().is_host() || loads_full_lines(comm.facts()));
  const uint32_t mine = !may || !is_valid ? 0
                        : wanted < 0      ? kPlannedLineTokens
                                          : static_cast<uint32_t>(wanted);
  constexpr uint64_t kRefused = uint64_t{kPlannedLineTokens} + 1;  // so that all ranks fail where one does
  const Status agreed =
      comm.agree("low_latency.lines",
                 {{"WEFT_LOW_LATENCY_LINE_TOKENS, where links allow it", is_valid ? mine : kRefused}});
  if (!is_valid)
    return Status::invalid("WEFT_LOW_LATENCY_LINE_TOKENS: got {}, allowed: -1 to {}", wanted, kMaxBatches);
  WEFT_TRY(agreed);
  LowLatencyTerms terms{mine, std::move(domains), {}};
  if (comm.why_not_all_mapped().empty()) return terms;
  WEFT_TRY_ASSIGN(const auto shown, comm.show("low_latency.links", shown_links(comm)));
  terms.links = least_of(shown);
  return terms;
}

LowLatency::LowLatency(Window& window, uint64_t begin, uint64_t end, const ComputeLimits& limits,
                       const LowLatencyWaits& waits, LowLatencyTerms terms)
    : window_(&window),
      comm_(window.communicator()),
      begin_(begin),
      end_(end),
      limits_(limits),
      waits_(waits),
      terms_(std::move(terms)),
      tally_("low latency", caller_of(window)),
      dispatches_(counted("low_latency_dispatch")),
      combines_(counted("low_latency_combine")),
      order_(window.communicator()->device()),
      last_phase_(window.communicator()->device()),
      known_masked_(ranks()),
      has_rail_tables_(write_rail_tables()) {}

LowLatency::~LowLatency() {
  for (uint32_t peer = 0; peer < known_masked_.size(); ++peer)
    if (known_masked_[peer]) comm_->peers().mask(static_cast<int>(peer), false);
}

LowLatency::Counted LowLatency::counted(const std::string& name) {
  return {&tally_.operation(name), &tally_.operation(name + ".send"), &tally_.operation(name + ".receive")};
}

Result<bool> LowLatency::begin_phase(void* stream) {
  WEFT_TRY_ASSIGN(const bool captured, is_captured(stream));
  if (!captured) WEFT_TRY(last_phase_.wait(stream));
  return captured;
}

Result<bool> LowLatency::is_captured(void* stream) const {
  return is_capturing(window_->communicator()->device(), stream);
}

Status LowLatency::end_phase(void* stream, bool is_captured) {
  return is_captured ? Status{} : last_phase_.note(stream);
}

Result<LowLatencyRun> LowLatency::begin_run(void* stream, void* after, bool joins) {
  WEFT_TRY_ASSIGN(const bool captured, is_captured(after));
  void* on = joins && !captured ? after : stream;
  WEFT_TRY(order_.wait(on, after));
  if (!captured) WEFT_TRY(last_phase_.wait(on));
  return LowLatencyRun{on, joins ? after : on, captured};
}

Status LowLatency::end_run(const LowLatencyRun& run) {
  WEFT_TRY(order_.wait(run.joined, run.stream));
  WEFT_TRY(end_phase(run.stream, run.is_captured));
  count_call(run.is_captured);
  return {};
}

void LowLatency::send_later(uint64_t number, std::function<Status()> send) {
  later_.emplace_back(number, std::move(send));
}

Status LowLatency::send_up_to(uint64_t number) {
  while (!later_.empty() && later_.front().first <= number) {
    const std::function<Status()> send = std::move(later_.front().second);
    later_.pop_front();
    WEFT_TRY(send());
  }
  return {};
}

void LowLatency::forget_later(uint64_t number) {
  std::erase_if(later_, [&](const auto& send) { return send.first == number; });
}

void LowLatency::note_unreceived(uint64_t number, std::string receive) {
  if (number != 0) unreceived_.emplace_back(number, std::move(receive));
}

void LowLatency::note_received(uint64_t number) {
  const auto is_it = [&](const auto& sent) { return sent.first == number; };
  unreceived_.erase(std::remove_if(unreceived_.begin(), unreceived_.end(), is_it), unreceived_.end());
}

const std::string* LowLatency::late_receive() const {
  return unreceived_.empty() || unreceived_.front().first >= calls_ ? nullptr : &unreceived_.front().second;
}

LowLatencySizes LowLatency::sizes(uint32_t max_tokens, uint32_t top_k, uint32_t experts) const {
  LowLatencySizes sizes{ranks(),     max_tokens,         top_k,
                        experts,     terms_.line_tokens, half_bytes() - lines_at(),
                        has_ports(), has_page()};
  sizes.bulk_rows = bulk_rows_of(config().low_latency_bulk);
  return sizes;
}

uint32_t* LowLatency::masks() const {
  return reinterpret_cast<uint32_t*>(control() + low_latency_control(ranks()).masked);
}

// Where peers may be masked each rank gets its own: a lost rail peer would take the tokens of ranks that live.
bool LowLatency::may_share_domains() const {
  return has_ports() && !waits_.may_mask && terms_.domains.widest >= 2;
}

ExpertTrafficShape LowLatency::traffic_shape(uint32_t max_tokens, uint32_t top_k, uint32_t experts) const {
  const DomainPlan& domains = terms_.domains;
  return {domains.count, domains.widest, max_tokens, std::min(top_k, experts), experts, 0, 0, 0};
}

bool LowLatency::sends_once_per_domain(const LowLatencyDispatchFacts& facts) const {
  if (!may_share_domains()) return false;
  if (config().low_latency_fanout != "auto") return config().low_latency_fanout == "node";
  ExpertTrafficShape shape = traffic_shape(facts.max_tokens, facts.top_k, facts.experts);
  shape.row_bytes = facts.row_bytes;
  shape.scale_bytes = facts.scale_bytes;
  return plan_low_latency_fan_out(shape, terms_.links).is_per_domain();
}

// Replies that are exact or LogFMT, and those that find no room, go once for each rank, whatever the setting says.
bool LowLatency::replies_once_per_domain(const LowLatencyCombineFacts& facts) const {
  if (!may_share_domains() || facts.reply != kReplyReduced) return false;
  const Batches batches = sizes(facts.max_tokens, facts.top_k, facts.experts).batches();
  if (!has_room_for_domains(
          port_combine_layout(ranks(), facts.max_tokens, facts.top_k, batches, facts.row_bytes, facts.reply),
          batches))
    return false;
  if (config().low_latency_fanout != "auto") return config().low_latency_fanout == "node";
  ExpertTrafficShape shape = traffic_shape(facts.max_tokens, facts.top_k, facts.experts);
  shape.result_bytes = facts.row_bytes;
  return plan_low_latency_reply_fan_out(shape, terms_.links).is_per_domain();
}

// The same on all ranks.
bool LowLatency::has_room_for_domains(const PortCombineLayout& at, Batches batches) const {
  const DomainPlan& domains = terms_.domains;
  for (uint32_t which = 0; which < domains.count; ++which) {
    const uint32_t size = domains.size(which);
    if (domain_word(batches, size, 0) > kWordsPerSource ||
        domain_combine_layout(at, batches, size, domains.most_sources_in(which)).bytes >
            half_bytes() - lines_at())
      return false;
  }
  return true;
}

Status LowLatency::check(const LowLatencySizes& sizes, uint32_t tokens, const LowLatencyPlan& plan) const {
  if (plan.word_bytes > lines_at())
    return Status::make(Code::kCapacity,
                        "num_rdma_bytes: got {}, allowed: at least {} for num_max_dispatch_tokens_per_rank "
                        "{}, num_experts {}, "
                        "top-k {} and these rows",
                        end_ - begin_, low_latency_region_bytes(ranks(), plan.word_bytes, sizes.has_ports),
                        sizes.max_tokens, sizes.experts, sizes.top_k);
  if (tokens > sizes.max_tokens)
    return Status::invalid("x: got {} tokens, allowed: at most num_max_dispatch_tokens_per_rank, {}", tokens,
                           sizes.max_tokens);
  const uint64_t rows = uint64_t{sizes.experts_per_rank()} * sizes.ranks * sizes.max_tokens;
  if (rows > std::numeric_limits<int32_t>::max() || sizes.batches().capacity > kMaxBatchTokens)
    return Status::invalid(
        "num_max_dispatch_tokens_per_rank: got {}, allowed: at most {} rows received by all experts of a "
        "rank together",
        sizes.max_tokens, std::numeric_limits<int32_t>::max());
  const uint32_t counted =
      sizes.has_ports ? port_count_words(sizes.experts_per_rank()) : sizes.experts_per_rank();
  if (sizes.ranks * counted > kMaxExperts)
    return Status::invalid("num_experts: got {}, allowed: at most {}, rounded up to a multiple of the ranks",
                           sizes.experts, kMaxExperts);
  if (limits_.is_cuda && plan.shared_bytes > limits_.shared_bytes)
    return Status::invalid("num_experts: got {}, allowed: what fits {} bytes of shared memory, these take {}",
                           sizes.experts, limits_.shared_bytes, plan.shared_bytes);
  return {};
}

LowLatencyCall LowLatency::common(const LowLatencySizes& sizes, const LowLatencyPlan& plan,
                                  uint32_t tokens) const {
  LowLatencyCall call{};
  call.wait = {static_cast<uint64_t>(waits_.timeout_s * 1e9), waits_.fault, rank(), 0, waits_.trace,
               waits_.may_mask ? nullptr : waits_.gave_up};
  call.region = begin_;
  call.half_bytes = half_bytes();
  call.lines_at = lines_at();
  call.masked = waits_.may_mask ? masks() : nullptr;
  call.silent = waits_.may_mask ? waits_.silent : nullptr;
  call.may_mask = waits_.may_mask ? 1 : 0;
  call.max_tokens = sizes.max_tokens;
  call.tokens = tokens;
  call.experts = sizes.experts;
  call.lines = plan.lines ? 1 : 0;
  call.batches = sizes.batches();
  call.batch_tokens = Divisor::of(std::max(call.batches.share(tokens), 1u));
  return call;
}

Status LowLatency::launch(const Kernel& kernel, const Launch& how, const void* args, size_t args_bytes,
                          const void* shape) {
  if (waits_.may_mask) WEFT_TRY(own_mask());
  WEFT_TRY(launch_on_mesh(*window_, kernel, how, args, args_bytes, shape,
                          waits_.may_mask ? Losses::kAreNoErrors : Losses::kAreErrors));
  if (waits_.may_mask) note_silent();
  return limits_.is_cuda ? Status{} : fault();
}

Result<PlannedDispatch> LowLatency::plan(const LowLatencyDispatchFacts& facts) const {
  LowLatencySizes all = sizes(facts.max_tokens, facts.top_k, facts.experts);
  all.grid_sms = facts.grid_sms;
  const LowLatencyDispatchShape shape{
      ranks(),       all.experts_per_rank(),    facts.top_k,  facts.row_bytes, facts.scale_bytes,
      facts.payload, facts.has_weights ? 1 : 0, facts.padding};
  const LowLatencyPlan plan = plan_low_latency_dispatch(all, shape, limits_);
  WEFT_TRY(check(all, facts.tokens, plan));
  LowLatencyDispatchArgs args{};
  args.call = common(all, plan, facts.tokens);
  args.call.id_bytes = facts.id_bytes;
  args.call.handshake = {
      {facts.max_tokens, facts.row_bytes, facts.top_k, facts.experts, facts.scale_bytes,
       dispatch_word(static_cast<uint32_t>(facts.payload), shape.weights != 0, sends_once_per_domain(facts))},
      0};
  if (sends_once_per_domain(facts)) {
    WEFT_TRY(Status(has_rail_tables_));
    args.rail_tables = rail_tables();
  }
  args.x_row_bytes = facts.row_bytes * payload(facts.payload).shrinks_by;
  args.scale_expert_stride = facts.scale_expert_stride;
  args.scale_row_stride = facts.scale_row_stride;
  args.scale_word_stride = facts.tiled_scales ? kTiledWordStride : facts.scale_word_stride;
  args.tiled_scales = facts.tiled_scales ? 1 : 0;
  args.receive_splits = Divisor::of(plan.receive_splits);
  args.source_jobs = Divisor::of(args.call.batches.count * plan.receive_splits);
  args.line_tokens = plan.line_tokens;
  args.expert_rows = facts.expert_rows != 0 ? facts.expert_rows : ranks() * facts.max_tokens;
  args.max_rows = facts.max_rows;
  args.call.page =
      page(own_dispatch_bytes(args.call.batches, message_layout(shape.top_k, shape.weights != 0,
                                                                shape.row_bytes, shape.scale_bytes)));
  const Launch how = launch_of(plan);
  // A combine follows, most often a reduced one: it is compiled beside this. Not where outputs have other places: who asks
  // for these knows what its results will be; nor where its kernel depends on what only the combine says.
  const std::string& known = config().low_latency_constants;
  if (limits_.is_cuda && known == "never" && facts.padding == 0 && facts.expert_rows == 0)
    prepare_on_mesh(*window_, low_latency_keys(all, facts, kReplyReduced, limits_));
  KernelKey key = with_known(low_latency_key(shape, plan.in_bulk), args, known);
  WEFT_TRY_ASSIGN(const Kernel* kernel, kernel_on_mesh(*window_, std::move(key), how));
  return PlannedDispatch{facts, shape, args, how, kernel};
}

// Bytes are those of all chosen rows: how many of a token's go to one rank only the kernel knows.
template <class Planned, class Memory>
Status LowLatency::count_launch(const Counted& counted, const Planned& plan, const Memory& memory,
                                uint32_t call_slot, uint32_t phases, void* stream) {
  const auto& facts = plan.facts;
  const bool sends = (phases & kPhaseSend) != 0;
  const uint64_t bytes = sends ? uint64_t{facts.tokens} * facts.top_k * facts.row_bytes : 0;
  return tally_.count(counted.of(phases), {bytes, facts.tokens, -1, sends},
                      [&] { return start(plan, memory, call_slot, phases, stream); });
}

Status LowLatency::launch(const PlannedDispatch& plan, const LowLatencyDispatchMemory& memory,
                          uint32_t call_slot, uint32_t phases, void* stream) {
  return count_launch(dispatches_, plan, memory, call_slot, phases, stream);
}

Status LowLatency::start(const PlannedDispatch& plan, const LowLatencyDispatchMemory& memory,
                         uint32_t call_slot, uint32_t phases, void* stream) {
  WEFT_TRY(fault());
  LowLatencyDispatchArgs args = plan.args;
  args.call.phases = phases;
  args.call.call_slot = call_slot % kCallSlots;
  static_cast<LowLatencyDispatchMemory&>(args) = memory;
  Launch how = plan.how;
  how.stream = stream;
  return launch(*plan.kernel, how, &args, sizeof(args), &plan.shape);
}

Result<PlannedCombine> LowLatency::plan(const LowLatencyCombineFacts& facts) const {
  if (!facts.has_weights && (!is_reduced(facts.reply) || !facts.dispatch_had_weights))
    return Status::invalid(
        "topk_weights: got none, allowed: float32 of the shape of topk_idx, or none for a reduced combine "
        "after a dispatch with weights");
  if (is_log(facts.reply) &&
      (facts.element != kElementBf16 || facts.out_element != kElementBf16 || facts.accumulate))
    return Status::invalid(
        "use_logfmt: got True, allowed: with bfloat16 rows and sums that are not added to");
  LowLatencySizes all = sizes(facts.max_tokens, facts.top_k, facts.experts);
  all.grid_sms = facts.grid_sms;
  if (replies_once_per_domain(facts)) all.domain_ranks = own_domain_ranks();
  const LowLatencyCombineShape shape{ranks(),
                                     all.experts_per_rank(),
                                     facts.top_k,
                                     facts.row_bytes,
                                     facts.reply,
                                     facts.dispatch_had_weights ? 1 : 0,
                                     facts.element,
                                     facts.out_element,
                                     facts.accumulate ? 1 : 0};
  ComputeLimits few = limits_;
  if (facts.num_sms != 0) few.max_blocks = std::min(few.max_blocks, facts.num_sms);
  const LowLatencyPlan sends = plan_low_latency_combine(all, shape, facts.tokens, few);
  const LowLatencyPlan plan = plan_low_latency_combine(all, shape, facts.tokens, limits_);
  WEFT_TRY(check(all, facts.tokens, plan));
  LowLatencyCombineArgs args{};
  args.call = common(all, plan, facts.tokens);
  args.call.id_bytes = facts.id_bytes;
  const auto row_options = static_cast<uint32_t>(facts.element * 4 + facts.reply);
  const uint32_t kind = combine_word(row_options, facts.has_weights, all.domain_ranks != 0);
  args.call.handshake = {{facts.max_tokens, facts.row_bytes, facts.top_k, facts.experts, 0, kind}, 0};
  args.x_row_bytes = facts.row_bytes;
  args.sent_id_bytes = facts.sent_id_bytes;
  args.has_saved_weights = facts.saved_weights ? 1 : 0;
  args.signal_value = facts.signal_value;
  args.signals_per_expert = facts.signals_per_expert;
  args.signal_rows = facts.signal_rows;
  args.answer_parts = Divisor::of(1);
  if (all.has_ports) {
    const PortCombineLayout at = port_combine_layout(ranks(), facts.max_tokens, facts.top_k,
                                                     args.call.batches, shape.row_bytes, facts.reply);
    args.answer_room = answer_room(at, ranks(), args.call.batches, half_bytes() - lines_at());
    if (args.answer_room == at.batch_answers) args.answer_parts = Divisor::of(plan.answer_parts);
    args.call.page = page(own_combine(at, facts.max_tokens, facts.top_k, args.call.batches).replies);
    if (all.domain_ranks != 0) {
      args.rail_tables = rail_tables();
      args.domain_ranks = all.domain_ranks;
      args.domain_sources = terms_.domains.most_sources_in(terms_.domains.domain[rank()]);
    }
  }
  args.pieces = Divisor::of(plan.pieces);
  args.owner_jobs = Divisor::of(args.call.batches.count * plan.pieces);
  const PlannedCombine::Grid receiving = grid_of(plan);
  if (sends.blocks == plan.blocks) {  // the same in all launches
    args.receive_splits = receiving.receive_splits;
    args.piece_splits = receiving.piece_splits;
  }
  KernelKey key = with_known(low_latency_key(shape, plan.in_bulk), args, config().low_latency_constants);
  WEFT_TRY_ASSIGN(const Kernel* kernel, kernel_on_mesh(*window_, std::move(key), receiving.how));
  return PlannedCombine{facts, shape, args, grid_of(sends), receiving, kernel};
}

// What a caller does not give the routes hold.
LowLatencyCombineMemory LowLatency::filled(const PlannedCombine& plan, LowLatencyCombineMemory memory) const {
  const LowLatencyCombineFacts& facts = plan.facts;
  const RoutesLayout at =
      routes_layout(ranks(), plan.args.call.batches, facts.top_k, facts.dispatch_had_weights);
  if (!memory.sent_idx) memory.sent_idx = memory.routes + at.chosen;
  if (!facts.has_weights) memory.topk_idx = memory.sent_idx;
  if (facts.saved_weights) memory.topk_weights = reinterpret_cast<const float*>(memory.routes + at.weights);
  return memory;
}

Status LowLatency::launch(const PlannedCombine& plan, const LowLatencyCombineMemory& memory,
                          uint32_t call_slot, uint32_t phases, void* stream) {
  return count_launch(combines_, plan, memory, call_slot, phases, stream);
}

Status LowLatency::start(const PlannedCombine& plan, const LowLatencyCombineMemory& memory,
                         uint32_t call_slot, uint32_t phases, void* stream) {
  WEFT_TRY(fault());
  const PlannedCombine::Grid& grid = (phases & kPhaseSend) != 0 ? plan.sends : plan.receives;
  LowLatencyCombineArgs args = plan.args;
  args.call.phases = phases;
  args.call.call_slot = call_slot % kCallSlots;
  static_cast<LowLatencyCombineMemory&>(args) = filled(plan, memory);
  args.receive_splits = grid.receive_splits;
  args.piece_splits = grid.piece_splits;
  Launch how = grid.how;
  how.stream = stream;
  return launch(*plan.kernel, how, &args, sizeof(args), &plan.shape);
}

Status check_expert_ids(const void* ids, uint32_t id_bytes, uint64_t count, uint32_t experts,
                        EmptyIds empty) {
  const int64_t least = empty == EmptyIds::kMinusOne ? -1 : std::numeric_limits<int64_t>::min();
  const int64_t wrong = id_bytes == 8 ? wrong_id(static_cast<const int64_t*>(ids), count, experts, least)
                                      : wrong_id(static_cast<const int32_t*>(ids), count, experts, least);
  if (wrong == -1) return {};
  return Status::invalid("topk_idx: got expert {}, allowed: -1 to {} (num_experts is {})", wrong, experts - 1,
                         experts);
}

Status LowLatency::check_ids(const void* ids, uint32_t id_bytes, uint64_t count, uint32_t experts,
                             EmptyIds empty) const {
  return limits_.is_cuda ? Status() : check_expert_ids(ids, id_bytes, count, experts, empty);
}

}  // namespace weft
