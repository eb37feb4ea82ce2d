// SPDX-License-Identifier: Apache-2.0
#include "plan/low_latency.h"

#include <algorithm>

#include "base/text.h"

namespace weft {
namespace {

constexpr uint32_t kCudaThreads = 512;
constexpr uint32_t kMostPieces = 8;
static_assert(kMaxBatches * kMostPieces <= kWordsPerSource);
// Combine cuts replies so that about so many warps have one: all of a large GPU, or of the SMs that calls may take.
// Ranks must agree on it.
constexpr uint32_t kAnsweringWarps = 2048;
constexpr uint32_t kMostSplitsOfPiece = 16;

// One block per SM, all of them unless the caller wants some for other kernels: the calls are short, and no block may
// wait for one that cannot start. On the host every thread is a block of its own, so that no thread waits for another.
LowLatencyPlan grid_plan(const LowLatencySizes& sizes, const ComputeLimits& limits) {
  LowLatencyPlan plan{};
  plan.blocks = limits.is_cuda ? limits.max_blocks : limits.host_threads;
  if (sizes.grid_sms != 0) plan.blocks = std::min(plan.blocks, sizes.grid_sms);
  if (sizes.is_watched) plan.blocks = limits.is_cuda ? std::max(plan.blocks, 2u) : plan.blocks + 1;
  plan.threads_per_block = limits.is_cuda ? kCudaThreads : 1;
  // Blocks of large products go in clusters. Single blocks of a call on some SMs can leave none side by side for the last ones.
  if (sizes.grid_sms != 0 && limits.has_clusters && plan.blocks % 2 == 0) plan.blocks_per_cluster = 2;
  return plan;
}

// Of all blocks that do a call's work.
uint32_t working_warps(const LowLatencySizes& sizes, const LowLatencyPlan& plan, uint32_t warps_per_block) {
  return (plan.blocks - (sizes.is_watched ? 1 : 0)) * warps_per_block;
}

uint32_t warps_per_block(const LowLatencyPlan& plan, const ComputeLimits& limits) {
  return limits.is_cuda ? plan.threads_per_block / 32 : plan.threads_per_block;
}

constexpr uint32_t kWarpsPerSm = kCudaThreads / 32;

uint32_t answering_warps(const LowLatencySizes& sizes) {
  if (sizes.grid_sms == 0 || sizes.grid_sms > kAnsweringWarps / kWarpsPerSm) return kAnsweringWarps;
  return sizes.grid_sms * kWarpsPerSm;
}

// How many ranks a token goes to, in the mean, when it chooses experts at random.
double ranks_of_token(const LowLatencySizes& sizes) {
  double missed = 1;
  for (uint32_t k = 0; k < sizes.top_k; ++k) missed *= 1 - 1.0 / sizes.ranks;
  return sizes.ranks * (1 - missed);
}

// Whether a call has fewer warps than messages, each of which then has several of its own. Registers of so few SMs cannot
// hold enough under way, and 16-byte stores of theirs do not fill the links; bulk copies do both. Ranks must agree on it: who
// goes so has no lines.
bool wants_bulk(const LowLatencySizes& sizes, bool has_weights, const ComputeLimits& limits) {
  if (sizes.grid_sms == 0 || sizes.has_ports || !has_weights || sizes.top_k > kMostBulkTopK ||
      sizes.bulk_rows == BulkRows::kNever)
    return false;
  if (sizes.bulk_rows == BulkRows::kAlways) return true;
  return limits.is_cuda && sizes.grid_sms * kWarpsPerSm <= sizes.batches().count * ranks_of_token(sizes);
}

// The same messages and words by the kernels of a GPU whose blocks have less shared memory.
bool has_bulk_room(uint64_t bytes, const ComputeLimits& limits) {
  return !limits.is_cuda || bytes <= limits.shared_bytes;
}

// Lines save a fence and a trip to memory each way, and cost a seventh of the bytes that leave. Both
// constants are of H200: 4.4 and 4.0 us less for a round trip of 64 and 128 tokens between two GPUs, with
// what their lines cost there (bench/results/low-latency-on-gpus.md), and what pushes of all SMs reach among eight.
uint32_t most_line_tokens(const LowLatencySizes& sizes, const LowLatencyDispatchShape& shape,
                          const MessageLayout& message) {
  constexpr double kSavedUs = 4.5;
  constexpr double kEgressBytesPerUs = 350e3;
  const double peers = ranks_of_token(sizes) * (sizes.ranks - 1) / sizes.ranks;
  const double reply_bytes = static_cast<double>(shape.row_bytes) * payload(shape.payload).shrinks_by;
  const double extra_bytes = peers * (static_cast<double>(message.bytes) + reply_bytes) / kLineVecs;
  const double tokens = kSavedUs * kEgressBytesPerUs / std::max(extra_bytes, 1.0);
  return static_cast<uint32_t>(std::min<double>(tokens, kMaxBatches));
}

bool may_have_lines(const LowLatencySizes& sizes, uint64_t line_bytes) {
  return sizes.line_tokens != 0 && line_bytes <= sizes.line_room && !sizes.has_ports;
}

uint64_t port_combine_bytes(const LowLatencySizes& sizes, const LowLatencyCombineShape& shape) {
  const Batches batches = sizes.batches();
  const PortCombineLayout at =
      port_combine_layout(sizes.ranks, sizes.max_tokens, sizes.top_k, batches, shape.row_bytes, shape.reply);
  return std::max(at.inbox_bytes, least_outbox(at, sizes.ranks, batches));
}

uint64_t bytes_of_any_form(const LowLatencySizes& sizes, uint64_t hidden) {
  // Rows in bf16 with float32 scales per 16 channels are larger than any payload.
  const MessageLayout message =
      message_layout(sizes.top_k, true, (hidden * 2 + 15) / 16 * 16, hidden / 16 * 4);
  const Batches batches = batches_of(sizes.max_tokens);
  const uint64_t row_bytes = (hidden * 2 + 15) / 16 * 16;
  const uint64_t reply =
      std::max(reply_stride(row_bytes, kReplyExact), reply_stride(row_bytes, kReplyExactLog));
  const CombineLayout combine = combine_layout(sizes.ranks, sizes.max_tokens, sizes.top_k, reply);
  const uint64_t words = std::max(message_bytes(sizes.ranks, batches, message), combine.word_bytes);
  const uint64_t lines = std::max(line_message_bytes(sizes.ranks, batches, message), combine.line_bytes);
  return low_latency_region_bytes(sizes.ranks,
                                  std::max(words, std::min(lines, most_line_bytes(sizes.ranks))));
}

}  // namespace

LowLatencyPlan plan_low_latency_dispatch(const LowLatencySizes& sizes, const LowLatencyDispatchShape& shape,
                                         const ComputeLimits& limits) {
  LowLatencyPlan plan = grid_plan(sizes, limits);
  const Batches batches = sizes.batches();
  const MessageLayout message =
      message_layout(shape.top_k, shape.weights != 0, shape.row_bytes, shape.scale_bytes);
  plan.word_bytes = sizes.has_ports
                        ? dispatch_outbox(sizes.ranks, sizes.experts_per_rank(), batches, message).bytes
                        : message_bytes(sizes.ranks, batches, message);
  const bool wants =
      payload(shape.payload).encoder == Encoder::kNone && wants_bulk(sizes, shape.weights != 0, limits);
  plan.lines = !wants && may_have_lines(sizes, line_message_bytes(sizes.ranks, batches, message));
  const uint32_t warps = warps_per_block(plan, limits);
  auto shared_bytes = [&](bool has_image) {
    return dispatch_shared(sizes.ranks, sizes.experts_per_rank(), sizes.top_k, warps, message, has_image,
                           shape.padding != 0)
        .bytes;
  };
  const bool has_room = plan.lines && (!limits.is_cuda || shared_bytes(true) <= limits.shared_bytes);
  const uint32_t wanted =
      sizes.line_tokens == kPlannedLineTokens ? most_line_tokens(sizes, shape, message) : sizes.line_tokens;
  plan.line_tokens = has_room ? std::min(wanted, batches.count) : 0;
  plan.shared_bytes = static_cast<uint32_t>(shared_bytes(plan.line_tokens != 0));
  plan.pieces = 1;
  plan.receive_splits =
      limits.is_cuda
          ? std::clamp(working_warps(sizes, plan, warps) / (sizes.ranks * batches.count), 1u, kMostPieces)
          : 1;
  const uint64_t bulk_bytes = dispatch_bulk_shared(plan.shared_bytes, sizes.ranks, sizes.experts_per_rank(),
                                                   sizes.top_k, warps, shape.row_bytes)
                                  .bytes;
  if (!wants || !has_bulk_room(bulk_bytes, limits)) return plan;
  plan.in_bulk = true;
  plan.shared_bytes = static_cast<uint32_t>(bulk_bytes);
  plan.receive_splits = 1;
  return plan;
}

LowLatencyPlan plan_low_latency_combine(const LowLatencySizes& sizes, const LowLatencyCombineShape& shape,
                                        uint32_t tokens, const ComputeLimits& limits) {
  LowLatencyPlan plan = grid_plan(sizes, limits);
  const CombineLayout layout =
      combine_layout(sizes.ranks, sizes.max_tokens, sizes.top_k, reply_stride(shape.row_bytes, shape.reply));
  plan.word_bytes = layout.word_bytes;
  const bool wants = shape.reply == kReplyReduced && wants_bulk(sizes, shape.weights != 0, limits);
  plan.lines = !wants && may_have_lines(sizes, layout.line_bytes);
  if (sizes.has_ports) plan.word_bytes = port_combine_bytes(sizes, shape);
  const uint32_t warps = warps_per_block(plan, limits);
  const uint64_t gathered = uint64_t{sizes.domain_ranks} * sizes.batches().capacity;
  plan.shared_bytes = static_cast<uint32_t>(combine_shared(sizes.ranks, sizes.top_k, warps, gathered).bytes);
  plan.pieces = 1;
  plan.receive_splits = 1;
  const uint64_t bulk_bytes = combine_bulk_shared(plan.shared_bytes, sizes.top_k, warps).bytes;
  if (wants && has_bulk_room(bulk_bytes, limits)) {
    plan.in_bulk = true;
    plan.shared_bytes = static_cast<uint32_t>(bulk_bytes);
  }
  if (!limits.is_cuda || plan.in_bulk) return plan;
  const double messages = sizes.batches().count * ranks_of_token(sizes);
  // A reply leaves the outbox in one piece.
  if (!sizes.has_ports && !wants)
    plan.pieces = std::clamp(static_cast<uint32_t>(answering_warps(sizes) / messages), 1u, kMostPieces);
  const uint32_t sums = std::max(tokens, 1u) * plan.pieces;
  plan.receive_splits =
      plan.pieces * std::clamp(working_warps(sizes, plan, warps) / sums, 1u, kMostSplitsOfPiece);
  if (sizes.has_ports) plan.answer_parts = std::max(warps / sizes.batches().capacity, 1u);
  return plan;
}

uint64_t low_latency_routes_words(const LowLatencySizes& sizes, bool has_weights) {
  return routes_layout(sizes.ranks, sizes.batches(), sizes.top_k, has_weights).words;
}

uint64_t low_latency_region_bytes(uint32_t ranks, uint64_t word_bytes, bool has_ports) {
  const uint64_t rounded = (word_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  const uint64_t beside = has_ports ? rounded : std::min(rounded, most_line_bytes(ranks));
  return low_latency_control(ranks).end + 2 * (rounded + beside);
}

uint64_t low_latency_half_bytes(uint32_t ranks, uint64_t region_bytes) {
  const uint64_t control = low_latency_control(ranks).end;
  return region_bytes <= control ? 0 : (region_bytes - control) / 2 / kLineBytes * kLineBytes;
}

// Messages of a rank to itself fit, and its reduced replies.
uint64_t low_latency_page_bytes(uint32_t ranks, uint64_t region_bytes) {
  const uint64_t inbox = low_latency_lines_at(ranks, low_latency_half_bytes(ranks, region_bytes), true);
  const uint64_t own = (inbox / ranks + kLineBytes - 1) / kLineBytes * kLineBytes;
  return low_latency_control(ranks).end + 2 * own;
}

uint64_t low_latency_lines_at(uint32_t ranks, uint64_t half_bytes, bool has_ports) {
  return has_ports ? half_bytes / 2 / kLineBytes * kLineBytes : lines_begin(ranks, half_bytes);
}

// Batches of ports may have room for an eighth more tokens than there are; what ranks tell each other besides has at most
// 16 bytes for each of kMaxExperts, and handshakes.
uint64_t low_latency_bytes_with_ports(uint32_t ranks, uint64_t region_bytes) {
  const uint64_t half = low_latency_half_bytes(ranks, region_bytes);
  if (half == 0) return region_bytes;
  const uint64_t words = lines_begin(ranks, half);
  return low_latency_region_bytes(
      ranks, words + words / 8 + uint64_t{16} * kMaxExperts + ranks * uint64_t{128}, true);
}

// Where batches get room for one token more there are fewer of them, and small rows then take less: a buffer for so many
// tokens must do for fewer, too.
uint64_t low_latency_hint_bytes(const LowLatencySizes& sizes, uint64_t hidden) {
  LowLatencySizes fewer = sizes;
  fewer.max_tokens = (batches_of(sizes.max_tokens).capacity - 1) * kMaxBatches;
  const uint64_t bytes = bytes_of_any_form(sizes, hidden);
  return fewer.max_tokens == 0 ? bytes : std::max(bytes, bytes_of_any_form(fewer, hidden));
}

std::string to_text(const LowLatencyPlan& plan) {
  return text("words {} bytes, {} blocks of {} threads, {} bytes shared, {} pieces, {} receive splits{}",
              plan.word_bytes, plan.blocks, plan.threads_per_block, plan.shared_bytes, plan.pieces,
              plan.receive_splits, plan.in_bulk ? ", in bulk" : "");
}

}  // namespace weft
