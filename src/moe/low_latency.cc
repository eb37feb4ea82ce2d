// SPDX-License-Identifier: Apache-2.0
#include "moe/low_latency.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "topology/nvml.h"

namespace weft {
namespace {

constexpr uint32_t kCombineForms = 16;  // so that a dispatch and a combine that meet do not agree

KernelKey key_of(const LowLatencyDispatchShape& shape) {
  KernelKey key{"kernels/moe/low_latency_dispatch.cuh", "low_latency_dispatch", "LowLatencyDispatchArgs"};
  key.shape = {{"ranks", shape.ranks},
               {"experts_per_rank", shape.experts_per_rank},
               {"top_k", shape.top_k},
               {"row_bytes", shape.row_bytes},
               {"scale_bytes", shape.scale_bytes},
               {"payload", shape.payload},
               {"weights", shape.weights}};
  return key;
}

KernelKey key_of(const LowLatencyCombineShape& shape) {
  KernelKey key{"kernels/moe/low_latency_combine.cuh", "low_latency_combine", "LowLatencyCombineArgs"};
  key.shape = {{"ranks", shape.ranks}, {"experts_per_rank", shape.experts_per_rank},
               {"top_k", shape.top_k}, {"row_bytes", shape.row_bytes},
               {"reply", shape.reply}, {"weights", shape.weights}};
  return key;
}

// Links other than NVLink may deliver a line in pieces.
bool keeps_lines_whole(const std::vector<RankFacts>& ranks) {
  for (const RankFacts& from : ranks)
    for (const RankFacts& to : ranks)
      if (from.host != to.host || (from.gpu != to.gpu && !is_nvlink_pair(from.gpu, to.gpu))) return false;
  return true;
}

}  // namespace

Result<uint32_t> agree_on_line_tokens(Communicator& comm) {
  const int64_t wanted = config().low_latency_line_tokens;
  const bool is_valid = wanted >= -1 && wanted <= kMaxLanes;
  const bool may = comm.device().is_host() || keeps_lines_whole(comm.facts());
  const uint32_t mine = !may || !is_valid ? 0
                        : wanted < 0      ? kPlannedLineTokens
                                          : static_cast<uint32_t>(wanted);
  constexpr uint64_t kRefused = uint64_t{kPlannedLineTokens} + 1;  // so that all ranks fail where one does
  const Status agreed =
      comm.agree("low_latency.lines",
                 {{"WEFT_LOW_LATENCY_LINE_TOKENS, where links allow it", is_valid ? mine : kRefused}});
  if (!is_valid)
    return Status::invalid("WEFT_LOW_LATENCY_LINE_TOKENS: got {}, allowed: -1 to {}", wanted, kMaxLanes);
  WEFT_TRY(agreed);
  return mine;
}

LowLatency::LowLatency(Window& window, uint64_t begin, uint64_t end, const ComputeLimits& limits,
                       const LowLatencyWaits& waits, uint32_t line_tokens)
    : window_(&window),
      begin_(begin),
      end_(end),
      limits_(limits),
      waits_(waits),
      line_tokens_(line_tokens),
      known_masked_(ranks()) {}

LowLatencySizes LowLatency::sizes(uint32_t max_tokens, uint32_t top_k, uint32_t experts) const {
  return {ranks(), max_tokens, top_k, experts, line_tokens_, half_bytes() - lines_at()};
}

uint32_t* LowLatency::masks() const {
  return reinterpret_cast<uint32_t*>(window_->local() + begin_ + low_latency_control(ranks()).masked);
}

Status LowLatency::check(const LowLatencySizes& sizes, uint32_t tokens, const LowLatencyPlan& plan) const {
  if (plan.word_bytes > lines_at())
    return Status::make(Code::kCapacity,
                        "num_rdma_bytes: got {}, allowed: at least {} for num_max_dispatch_tokens_per_rank "
                        "{}, num_experts {}, "
                        "top-k {} and these rows",
                        end_ - begin_, low_latency_region_bytes(ranks(), plan.word_bytes), sizes.max_tokens,
                        sizes.experts, sizes.top_k);
  if (tokens > sizes.max_tokens)
    return Status::invalid("x: got {} tokens, allowed: at most num_max_dispatch_tokens_per_rank, {}", tokens,
                           sizes.max_tokens);
  const uint64_t rows = uint64_t{sizes.experts_per_rank()} * sizes.ranks * sizes.max_tokens;
  if (rows > std::numeric_limits<int32_t>::max() || lanes_of(sizes.max_tokens).capacity > kMaxLaneTokens)
    return Status::invalid(
        "num_max_dispatch_tokens_per_rank: got {}, allowed: at most {} rows received by all experts of a "
        "rank together",
        sizes.max_tokens, std::numeric_limits<int32_t>::max());
  if (sizes.ranks * sizes.experts_per_rank() > kMaxExperts)
    return Status::invalid("num_experts: got {}, allowed: at most {}, rounded up to a multiple of the ranks",
                           sizes.experts, kMaxExperts);
  if (limits_.is_cuda && plan.shared_bytes > limits_.shared_bytes)
    return Status::invalid("num_experts: got {}, allowed: what fits {} bytes of shared memory, these take {}",
                           sizes.experts, limits_.shared_bytes, plan.shared_bytes);
  return {};
}

LowLatencyCall LowLatency::common(const LowLatencySizes& sizes, const LowLatencyPlan& plan, uint32_t tokens,
                                  uint32_t phases, uint32_t ticket) const {
  LowLatencyCall call{};
  call.wait = {static_cast<uint64_t>(waits_.timeout_s * 1e9), waits_.fault, rank(), 0, waits_.trace};
  call.region = begin_;
  call.half_bytes = half_bytes();
  call.lines_at = lines_at();
  call.masked = waits_.may_mask ? masks() : nullptr;
  call.phases = phases;
  call.ticket = ticket % kTickets;
  call.may_mask = waits_.may_mask ? 1 : 0;
  call.max_tokens = sizes.max_tokens;
  call.tokens = tokens;
  call.experts = sizes.experts;
  call.lines = plan.lines ? 1 : 0;
  call.lanes = lanes_of(sizes.max_tokens);
  call.lane_tokens = Divisor::of(std::max(call.lanes.share(tokens), 1u));
  return call;
}

Status LowLatency::launch(KernelKey key, const LowLatencyPlan& plan, const void* args, size_t args_bytes,
                          const void* shape, void* stream) {
  const Launch how{plan.blocks, plan.threads_per_block, plan.shared_bytes, stream, false};
  WEFT_TRY(launch_on_mesh(*window_, std::move(key), how, args, args_bytes, shape));
  if (limits_.is_cuda) return {};
  if (waits_.may_mask) warn_of_masked();
  return fault();
}

// Only of kernels on the host: a look at what a GPU has masked would have to wait for it.
void LowLatency::warn_of_masked() {
  for (uint32_t peer = 0; peer < ranks(); ++peer) {
    const bool masked = load_relaxed(masks() + peer) != 0;
    if (masked && !known_masked_[peer])
      log_warn("rank {}: rank {} stayed silent for {} s in a low-latency call and is masked from now on",
               rank(), peer, waits_.timeout_s);
    known_masked_[peer] = masked;
  }
}

LowLatencyDispatchShape LowLatency::shape_of(const LowLatencyDispatchCall& call) const {
  return {ranks(),
          sizes(call.max_tokens, call.top_k, call.experts).experts_per_rank(),
          call.top_k,
          call.row_bytes,
          call.scale_bytes,
          call.payload,
          call.topk_weights ? 1 : 0};
}

Status LowLatency::check(const LowLatencyDispatchCall& call) const {
  const LowLatencySizes all = sizes(call.max_tokens, call.top_k, call.experts);
  return check(all, call.tokens, plan_low_latency_dispatch(all, shape_of(call), limits_));
}

Status LowLatency::dispatch(const LowLatencyDispatchCall& call, uint32_t phases) {
  WEFT_TRY(fault());
  const LowLatencySizes all = sizes(call.max_tokens, call.top_k, call.experts);
  const LowLatencyDispatchShape shape = shape_of(call);
  const LowLatencyPlan plan = plan_low_latency_dispatch(all, shape, limits_);
  WEFT_TRY(check(all, call.tokens, plan));
  LowLatencyDispatchArgs args{};
  args.call = common(all, plan, call.tokens, phases, call.ticket);
  args.call.topk_idx = call.topk_idx;
  args.call.id_bytes = call.id_bytes;
  args.call.wait_cycles = call.wait_cycles;
  args.call.hello = {{call.max_tokens, call.row_bytes, call.top_k, call.experts, call.scale_bytes,
                      static_cast<uint32_t>(call.payload * 2 + shape.weights)},
                     0};
  args.x = static_cast<const std::byte*>(call.x);
  args.x_row_bytes = call.row_bytes * shrinks_by(call.payload);
  args.x_scales = static_cast<const std::byte*>(call.x_scales);
  args.topk_weights = call.topk_weights;
  args.out = static_cast<std::byte*>(call.out);
  args.out_scales = static_cast<uint32_t*>(call.out_scales);
  args.scale_expert_stride = call.scale_expert_stride;
  args.scale_row_stride = call.scale_row_stride;
  args.scale_word_stride = call.tiled_scales ? kTiledWordStride : call.scale_word_stride;
  args.tiled_scales = call.tiled_scales ? 1 : 0;
  args.src_info = call.src_info;
  args.layout_range = call.layout_range;
  args.counts = call.counts;
  args.out_weights = call.out_weights;
  args.out_source = call.out_source;
  args.expert_stats = call.expert_stats;
  args.routes = call.routes;
  args.receive_splits = Divisor::of(plan.receive_splits);
  args.source_jobs = Divisor::of(args.call.lanes.count * plan.receive_splits);
  args.line_tokens = plan.line_tokens;
  return launch(key_of(shape), plan, &args, sizeof(args), &shape, call.stream);
}

Status LowLatency::combine(const LowLatencyCombineCall& call, uint32_t phases) {
  WEFT_TRY(fault());
  if (!call.topk_weights && (!is_reduced(call.reply) || !call.dispatch_had_weights))
    return Status::invalid(
        "topk_weights: got none, allowed: float32 of the shape of topk_idx, or none for a reduced combine "
        "after a dispatch with weights");
  const LowLatencySizes all = sizes(call.max_tokens, call.top_k, call.experts);
  const LowLatencyCombineShape shape{ranks(),    all.experts_per_rank(),           call.top_k, call.row_bytes,
                                     call.reply, call.dispatch_had_weights ? 1 : 0};
  ComputeLimits limits = limits_;
  if (call.num_sms != 0 && (phases & kPhaseSend) != 0)
    limits.max_blocks = std::min(limits.max_blocks, call.num_sms);
  const LowLatencyPlan plan = plan_low_latency_combine(all, shape, call.tokens, limits);
  WEFT_TRY(check(all, call.tokens, plan));
  LowLatencyCombineArgs args{};
  args.call = common(all, plan, call.tokens, phases, call.ticket);
  args.call.topk_idx = call.topk_idx;
  args.call.id_bytes = call.id_bytes;
  args.call.wait_cycles = call.wait_cycles;
  const uint32_t form = kCombineForms + static_cast<uint32_t>(call.reply) * 2 + (call.topk_weights ? 1 : 0);
  args.call.hello = {{call.max_tokens, call.row_bytes, call.top_k, call.experts, 0, form}, 0};
  args.x = static_cast<const std::byte*>(call.x);
  args.x_row_bytes = call.x_row_bytes;
  args.topk_weights = call.topk_weights;
  args.routes = call.routes;
  args.combined = static_cast<std::byte*>(call.combined);
  args.pieces = Divisor::of(plan.pieces);
  args.owner_jobs = Divisor::of(args.call.lanes.count * plan.pieces);
  args.receive_splits = Divisor::of(plan.receive_splits);
  args.piece_splits = Divisor::of(plan.receive_splits / plan.pieces);
  args.signals = static_cast<const uint32_t*>(call.signals);
  args.signal_value = call.signal_value;
  args.signals_per_expert = call.signals_per_expert;
  args.signal_rows = call.signal_rows;
  return launch(key_of(shape), plan, &args, sizeof(args), &shape, call.stream);
}

Status LowLatency::write_words(uint32_t* at, uint32_t value, uint64_t words, void* stream) {
  if (!limits_.is_cuda) {
    for (uint64_t i = 0; i < words; ++i) store_relaxed(at + i, value);
    return {};
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  return cuda_status(driver->cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(at), value, words,
                                              static_cast<CUstream>(stream)),
                     "set a mask");
}

Status LowLatency::set_mask(uint32_t rank, bool masked, void* stream) {
  if (rank >= ranks()) return Status::invalid("rank_to_mask: got {}, allowed: 0 to {}", rank, ranks() - 1);
  known_masked_[rank] = masked;
  return write_words(masks() + rank, masked ? 1 : 0, 1, stream);
}

Status LowLatency::clear_masks(void* stream) {
  known_masked_.assign(ranks(), false);
  return write_words(masks(), 0, ranks(), stream);
}

Status LowLatency::query_masks(int32_t* out, void* stream) {
  const uint64_t bytes = ranks() * sizeof(int32_t);
  if (!limits_.is_cuda) {
    std::memcpy(out, masks(), bytes);
    return {};
  }
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  return cuda_status(
      driver->cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(out), reinterpret_cast<CUdeviceptr>(masks()), bytes,
                            static_cast<CUstream>(stream)),
      "read the masks");
}

}  // namespace weft
